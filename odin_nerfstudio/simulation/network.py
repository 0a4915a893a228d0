"""Links between ranks, and messages on them.

Every rank has a network card, full duplex, whose bandwidth its messages share; messages to one peer travel one after
the other (one sending thread per peer, as in `runtime.gloo`), those to different peers at the same time. A message that
is under way gets the smaller of the sender's and the receiver's bandwidth, each divided by the number of messages that
leave or reach it. It has arrived `latency` after its last byte left.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from odin_nerfstudio.simulation.clock import Clock


@dataclass(frozen=True)
class Link:
    """A class of links.

    Attributes:
        name: As given on the command line.
        bandwidth: Of a rank's card, in each direction. [bytes/s]
        latency: [s]
        burst: Bytes that an idle sender may send at once, which it saves up at the rate of the bandwidth: the bucket of
            a shaped link.
    """

    name: str
    bandwidth: float
    latency: float
    burst: float = 0.0

    def describe(self) -> str:
        """Name and figures."""
        rate = "unlimited" if math.isinf(self.bandwidth) else f"{self.bandwidth / 1e9:g} GB/s"
        return f"{self.name} ({rate} each way per device, {self.latency * 1e6:g} µs)"


LINKS = {
    "nvlink": Link("nvlink", 300e9, 5e-6),  # NVLink 3 through a switch: 600 GB/s in both directions together
    "pcie4": Link("pcie4", 25e9, 10e-6),  # 16 lanes: 31.5 GB/s on paper
    "100gbe": Link("100gbe", 11.5e9, 30e-6),  # 12.5 GB/s less headers
    "none": Link("none", math.inf, 0.0),
}
"""Links by name."""
_RATES = {"bit": 0.125, "B": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_link(text: str) -> Link:
    """A link from its name, or from ``BANDWIDTH[,LATENCY]`` such as ``25GB/s,10us`` or ``800Mbit/s``.

    Raises:
        ValueError: It is neither.
    """
    if text in LINKS:
        return LINKS[text]
    match = re.fullmatch(r"([\d.]+)\s*([kMG]?)(bit|B)/s(?:\s*,\s*([\d.]+)\s*(us|µs|ms|s))?", text)
    try:
        if match is None:
            raise ValueError("no match")
        bandwidth = float(match[1]) * _PREFIXES[match[2]] * _RATES[match[3]]
        latency = float(match[4]) * _TIMES[match[5]] if match[4] else 0.0
        if bandwidth <= 0:
            raise ValueError("no bandwidth")
    except ValueError:
        known = ", ".join(LINKS)
        raise ValueError(
            f"--link {text!r} is none of {known}, nor BANDWIDTH[,LATENCY] such as 25GB/s,10us or 800Mbit/s"
        ) from None
    return Link(text, bandwidth, latency)


@dataclass(eq=False)
class _Flow:
    """A message that is under way."""

    message: Any
    left: float
    """Bytes, at time `since`."""
    rate: float = 0.0
    since: float = 0.0
    plan: int = 0
    """Number of the last planned end; earlier ones are void."""


class Network:
    """Moves messages between ranks."""

    def __init__(self, clock: Clock, ranks: int, link: Link, deliver: Callable[[int, int, Any], None]) -> None:
        """deliver: called with source, destination and message when a message has arrived."""
        self._clock, self._link, self._deliver = clock, link, deliver
        self._queues: dict[tuple[int, int], deque[tuple[float, Any]]] = {}
        self._leaving: list[dict[int, _Flow]] = [{} for _ in range(ranks)]
        """By source: flows by destination."""
        self._reaching: list[dict[int, _Flow]] = [{} for _ in range(ranks)]
        """By destination: flows by source."""
        self._saved = [(link.burst, 0.0)] * ranks
        """By source: bytes that may leave at once, as of a time."""

    def send(self, source: int, destination: int, size: float, message: Any) -> None:
        """Queue a message of `size` bytes."""
        if destination in self._leaving[source]:
            self._queues.setdefault((source, destination), deque()).append((size, message))
            return
        self._begin(source, destination, size, message)
        self._share(source, destination)

    def _begin(self, source: int, destination: int, size: float, message: Any) -> None:
        now = self._clock.now
        if self._link.burst > 0:
            saved, since = self._saved[source]
            if not self._leaving[source]:
                saved = min(self._link.burst, saved + self._link.bandwidth * (now - since))
            at_once = min(saved, size)
            size, self._saved[source] = size - at_once, (saved - at_once, now)
        flow = _Flow(message, float(size), since=now)
        self._leaving[source][destination] = self._reaching[destination][source] = flow

    def _share(self, source: int, destination: int) -> None:
        """Share the bandwidth of two cards anew among the messages that use them."""
        for to in list(self._leaving[source]):
            self._plan(source, to)
        for origin in list(self._reaching[destination]):
            if origin != source:
                self._plan(origin, destination)

    def _plan(self, source: int, destination: int) -> None:
        """Set a message's rate, and schedule its end if that has changed."""
        flow, now = self._leaving[source][destination], self._clock.now
        rate = self._link.bandwidth / max(len(self._leaving[source]), len(self._reaching[destination]))
        if rate == flow.rate:
            return
        flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
        flow.rate, flow.since, flow.plan = rate, now, flow.plan + 1
        plan, lasts = flow.plan, 0.0 if math.isinf(rate) else flow.left / rate
        self._clock.at(now + lasts, lambda: self._finish(source, destination, flow, plan))

    def _finish(self, source: int, destination: int, flow: _Flow, plan: int) -> None:
        if plan != flow.plan:
            return
        flow.plan += 1
        del self._leaving[source][destination], self._reaching[destination][source]
        self._clock.at(self._clock.now + self._link.latency, lambda: self._deliver(source, destination, flow.message))
        self._saved[source] = (self._saved[source][0], self._clock.now)
        queue = self._queues.get((source, destination))
        if queue:
            self._begin(source, destination, *queue.popleft())
        self._share(source, destination)
