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
    """

    name: str
    bandwidth: float
    latency: float

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

    left: float
    message: Any
    rate: float = 0.0


class Network:
    """Moves messages between ranks."""

    def __init__(self, clock: Clock, ranks: int, link: Link, deliver: Callable[[int, int, Any], None]) -> None:
        """deliver: called with source, destination and message when a message has arrived."""
        self._clock, self._link, self._deliver = clock, link, deliver
        self._queues: dict[tuple[int, int], deque[tuple[float, Any]]] = {}
        self._flows: dict[tuple[int, int], _Flow] = {}
        self._leaving, self._reaching = [0] * ranks, [0] * ranks
        self._since = 0.0
        self._plan = 0

    def send(self, source: int, destination: int, size: float, message: Any) -> None:
        """Queue a message of `size` bytes."""
        pair = (source, destination)
        if pair in self._flows:
            self._queues.setdefault(pair, deque()).append((size, message))
            return
        self._advance()
        self._begin(pair, size, message)
        self._replan()

    def _begin(self, pair: tuple[int, int], size: float, message: Any) -> None:
        self._flows[pair] = _Flow(float(size), message)
        self._leaving[pair[0]] += 1
        self._reaching[pair[1]] += 1

    def _advance(self) -> None:
        """Move all messages up to now."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if passed > 0:
            for flow in self._flows.values():
                flow.left -= flow.rate * passed

    def _replan(self) -> None:
        """Share the bandwidth anew, and schedule the next end of a message."""
        self._plan += 1
        if not self._flows:
            return
        soonest = math.inf
        for (source, destination), flow in self._flows.items():
            flow.rate = self._link.bandwidth / max(self._leaving[source], self._reaching[destination])
            soonest = min(soonest, 0.0 if math.isinf(flow.rate) else max(0.0, flow.left) / flow.rate)
        plan = self._plan
        self._clock.at(self._clock.now + soonest, lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        # A picosecond of time: what rounding may leave of a message that has ended.
        ended = [p for p, f in self._flows.items() if math.isinf(f.rate) or f.left <= 1e-3 + f.rate * 1e-12]
        for pair in ended:
            flow = self._flows.pop(pair)
            self._leaving[pair[0]] -= 1
            self._reaching[pair[1]] -= 1
            self._clock.at(self._clock.now + self._link.latency, _delivery(self._deliver, pair, flow.message))
            queue = self._queues.get(pair)
            if queue:
                self._begin(pair, *queue.popleft())
        self._replan()


def _delivery(deliver: Callable[[int, int, Any], None], pair: tuple[int, int], message: Any) -> Callable[[], None]:
    return lambda: deliver(pair[0], pair[1], message)
