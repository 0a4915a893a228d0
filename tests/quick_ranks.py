"""Ranks of the toy that start within a moment: forked from a server process that has everything imported.

Importing this module loads all kernels; the server does so once for all ranks to come.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import runtime_toy
import torch

from odin_nerfstudio.runtime.warm_up import warm_up

warm_up()


def start_server(module: str = __name__) -> None:
    """Starts the server, with a module imported; call it before the first rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        context.Process(target=sys.getswitchinterval).start()  # the server starts with its first process
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class QuickRanks:
    """The processes of one attempt; use it in a ``with`` block, which leaves none behind."""

    def __init__(self, ranks: int, folder: Path, toy: runtime_toy.Toy) -> None:
        """Starts the toy; its checkpoints are in ``folder/run``."""
        folder.mkdir(parents=True)
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        target = runtime_toy._rank_main
        self.processes = [
            context.Process(target=target, args=(rank, ranks, str(folder), {"run": toy}), daemon=True)
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> QuickRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join()

    def until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Waits until something holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end and all(p.exitcode is None for p in self.processes), self.reports()
            time.sleep(0.005)

    def kill(self, rank: int) -> None:
        """kill -9."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def ended(self, seconds: float) -> float:
        """Waits until all have ended; returns after how long. [s]"""
        begin = time.monotonic()
        for process in self.processes:
            process.join(max(0.0, begin + seconds - time.monotonic()))
        assert None not in [p.exitcode for p in self.processes], f"still running after {seconds} s: {self.reports()}"
        return time.monotonic() - begin

    def reports(self) -> dict[str, str]:
        """What ranks left behind: ``failure.R`` (first line: the rank at fault) and ``error.R``."""
        return {p.name: p.read_text() for p in self.folder.glob("*.[0-9]")}

    def checkpoints(self) -> dict[int, Path]:
        """Finished steps and files, torn ones included."""
        return {int(p.stem): p for p in (self.folder / "run").glob("*.pt") if p.stem.isdigit()}


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint of the toy was written to its end."""
    try:
        torch.load(checkpoint)
    except (RuntimeError, EOFError, OSError):
        return False
    return True
