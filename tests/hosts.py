"""Two machines in one: two network namespaces with host names of their own, joined by a virtual cable."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

import pytest


def _run(*command: str) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise OSError(f"{' '.join(command)}: {result.stdout.strip()}")


class TwoHosts:
    """Use it in a ``with`` block; skips the test where namespaces cannot be made."""

    INTERFACE = "cable"

    def __init__(self) -> None:
        self._names = [f"odin-{os.getpid()}-{i}" for i in range(2)]

    @staticmethod
    def address(host: int) -> str:
        """IP address of host 0 or 1."""
        return f"10.213.77.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """Command that runs its further arguments on a host."""
        script = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self._names[host], "unshare", "--uts", "sh", "-c", script, f"host{host}"]

    def cut(self) -> None:
        """Takes the cable out: packets vanish, connections stay open."""
        _run("ip", "-n", self._names[0], "link", "set", self.INTERFACE, "down")

    def __enter__(self) -> TwoHosts:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
            pytest.skip("two machines are played by network namespaces, which need root, iproute2 and unshare")
        one, two = self._names
        try:
            _run("ip", "netns", "add", one)
            _run("ip", "netns", "add", two)
            peer = ["peer", "name", self.INTERFACE, "netns", two]
            _run("ip", "link", "add", self.INTERFACE, "netns", one, "type", "veth", *peer)
            for host, name in enumerate(self._names):
                _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", self.INTERFACE)
                _run("ip", "-n", name, "link", "set", self.INTERFACE, "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except OSError as error:
            self.__exit__(None, None, None)
            pytest.skip(f"no network namespaces here: {error}")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
