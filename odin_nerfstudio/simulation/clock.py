"""The virtual clock: events in order of time, and processes as generators."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Nap:
    """Sleep until `Clock.wake`, or for some seconds."""

    seconds: float


Process = Iterator[float | Nap | None]
"""Yields seconds to spend, a nap, or None to sleep until `Clock.wake`."""


class Clock:
    """Runs events in order of time, and in order of scheduling where times are equal."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual time. [s]"""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._asleep: dict[int, Process] = {}
        self._naps: dict[int, int] = {}
        """Number of the nap that a process is taking."""

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Schedule a call, not before now."""
        heapq.heappush(self._events, (max(time, self.now), self._number, call))
        self._number += 1

    def start(self, name: int, process: Process) -> None:
        """Start a process now."""
        self.at(self.now, lambda: self._go_on(name, process))

    def wake(self, name: int) -> None:
        """Let a process that sleeps go on now; nothing if it does not sleep."""
        process = self._asleep.pop(name, None)
        self._naps.pop(name, None)
        if process is not None:
            self.at(self.now, lambda: self._go_on(name, process))

    def _end_nap(self, name: int, nap: int) -> None:
        if self._naps.get(name) == nap:
            self.wake(name)

    def run(self) -> None:
        """Run until nothing is left to happen.

        Raises:
            RuntimeError: Processes sleep that nothing will ever wake.
        """
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
        if self._asleep:
            raise RuntimeError(f"the simulation stands still at {self.now:.3f} s: {sorted(self._asleep)} wait for ever")

    def _go_on(self, name: int, process: Process) -> None:
        for spend in process:
            if spend is None:
                self._asleep[name] = process
                return
            if isinstance(spend, Nap):
                self._asleep[name] = process
                nap = self._naps[name] = self._number
                self.at(self.now + spend.seconds, lambda nap=nap: self._end_nap(name, nap))
                return
            if spend > 0:
                self.at(self.now + spend, lambda: self._go_on(name, process))
                return
