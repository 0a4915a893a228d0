"""What goes wrong between ranks, as errors that name the rank, the step and what was awaited."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EXIT_CODE = 75
"""Exit status of a process that another rank's failure ended (EX_TEMPFAIL: trying again may help)."""


@dataclass(frozen=True)
class FaultLimits:
    """Times after which a silent peer counts as failed, in seconds."""

    stall: float = 120.0
    """A peer that has sent nothing, not even a heartbeat, for that long has stalled; so has one that is awaited that
    long."""
    heartbeat: float = 1.0
    """Idle connections carry a heartbeat this often."""
    exit_grace: float | None = 10.0
    """After a failure the process is ended this late if its main thread has not ended it; None: never."""
    kill_stalled: bool = True
    """Kill a stalled peer that runs on this machine: stopped, it would be left behind as an orphan."""

    def __post_init__(self) -> None:
        if self.heartbeat <= 0 or self.stall < 3 * self.heartbeat:
            raise ValueError(f"stall limit {self.stall} s must be at least three heartbeats of {self.heartbeat} s")


class RankFailure(RuntimeError):
    """A rank failed, stalled or left, and the run cannot go on.

    Attributes:
        rank: The rank at fault.
        step: Step that this rank was at when it was noticed.
        awaited: What this rank was waiting for, in words; empty if nothing.
        reason: What happened.
    """

    def __init__(self, rank: int, reason: str, step: int = -1, awaited: str = "") -> None:
        self.rank, self.reason, self.step, self.awaited = rank, reason, step, awaited
        waiting = f", waiting for {awaited}" if awaited else ""
        at = f" (noticed at step {step}{waiting})" if step >= 0 else ""
        super().__init__(f"rank {rank} {reason}{at}")

    def at(self, step: int, awaited: str) -> RankFailure:
        """The same failure with where this rank was."""
        return RankFailure(self.rank, self.reason, step, awaited)


class NonFiniteGradient(RuntimeError):
    """A task's gradient holds infinities or NaN; nothing of it has left the rank."""


def brief(error: BaseException) -> str:
    """What an error of gloo or NCCL says, on one line, without places in its source and its advice to developers."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    plain = re.split(r" This is typically caused| Exception raised from", first)[0]
    return re.sub(r"\[\S*:\d+\] ", "", plain).strip().rstrip(".")


def machine_word() -> int:
    """A number that processes on one machine share. 31 bits."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            text = file.read()
    except OSError:
        text = ""
    try:
        text += str(os.stat("/proc/self/ns/pid").st_ino)  # process ids are only comparable within a namespace
    except OSError:
        text += "-"
    value = 0
    for byte in (text + socket.gethostname()).encode():
        value = (value * 131 + byte) % 0x7FFFFFFF
    return value


def kill_process(pid: int) -> None:
    """End a stalled process of this machine, stopped or not."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError:
        sys.stderr.write(f"odin: no permission to end the stalled process {pid}\n")


class Deadline:
    """Ends the process a while after a failure, whatever its main thread is doing by then."""

    def __init__(self, grace: float | None) -> None:
        self._grace = grace
        self._timer: threading.Timer | None = None

    def arm(self, message: str) -> None:
        """Start the clock; a second call changes nothing."""
        if self._grace is None or self._timer is not None:
            return

        def end() -> None:
            sys.stderr.write(f"odin: {message}; ending this process, which did not end by itself\n")
            sys.stderr.flush()
            os._exit(EXIT_CODE)

        self._timer = threading.Timer(self._grace, end)
        self._timer.daemon = True
        self._timer.start()

    def disarm(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class OwnPauses:
    """Notices that this process itself was stopped, so that it does not blame its peers for the silence."""

    def __init__(self, tick: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tick, self._clock, self._last = tick, clock, clock()

    def paused(self) -> bool:
        """Whether much more than a tick has passed since the last call."""
        now = self._clock()
        gap, self._last = now - self._last, now
        return gap > self._tick + 2.0
