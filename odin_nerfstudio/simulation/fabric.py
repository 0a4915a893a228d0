"""Clusters of nodes: fast links inside a node, slower ones between nodes.

Inside a node every rank has a card of its own. Between nodes it has another one, or all ranks of the node share one. A
message that is under way uses one card at its sender and one at its receiver; the messages on a card share it, and each
gets the smaller of its two shares. As in `network`, messages to one peer follow each other, and one has arrived
`latency` after its last byte left. Very small messages (notices without rows) are so many and so short that they do
not share: they arrive after the latency.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from odin_nerfstudio.simulation.clock import Clock
from odin_nerfstudio.simulation.network import LINKS, Link, Network, parse_link

SMALL = 512.0
"""Messages up to this size do not share links. [bytes]"""


@dataclass(frozen=True)
class Fabric:
    """A class of clusters.

    Attributes:
        name: As given on the command line.
        inside: Between two ranks of a node.
        between: Between two ranks of different nodes.
        node: Ranks of a node.
        shared: The ranks of a node share one card of kind `between`.
    """

    name: str
    inside: Link
    between: Link
    node: int = 8
    shared: bool = False

    def describe(self) -> str:
        """Name and figures."""
        who = "one card a node" if self.shared else "one card a device"
        return (
            f"{self.name}: nodes of {self.node} devices, inside {self.inside.describe()}, between them "
            f"{self.between.bandwidth / 1e9:g} GB/s each way, {who}, {self.between.latency * 1e6:g} µs"
        )


FABRICS = {
    "nvlink+ib": Fabric("nvlink+ib", LINKS["nvlink"], Link("ib", 24e9, 10e-6)),  # HDR: 200 Gbit/s for each device
    "pcie4+100gbe": Fabric("pcie4+100gbe", LINKS["pcie4"], LINKS["100gbe"], shared=True),
}
"""Fabrics by name."""


def parse_fabric(text: str) -> Link | Fabric:
    """A fabric by name, or a link as `network.parse_link` understands it.

    Raises:
        ValueError: It is neither.
    """
    return FABRICS[text] if text in FABRICS else parse_link(text)


Deliver = Callable[[int, int, Any], None]


def make_network(clock: Clock, ranks: int, link: Link | Fabric, deliver: Deliver) -> Network | FabricNetwork:
    """The links of a job. deliver: called with source, destination and message when a message has arrived."""
    if isinstance(link, Fabric):
        return FabricNetwork(clock, link, deliver)
    return Network(clock, ranks, link, deliver)


@dataclass(eq=False)
class _Card:
    """One direction of a card."""

    bandwidth: float
    flows: dict[tuple[int, int], _Flow] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.bandwidth / len(self.flows)


@dataclass(eq=False)
class _Flow:
    """A message that is under way."""

    message: Any
    left: float
    """Bytes, at time `since`."""
    cards: tuple[_Card, _Card]
    latency: float
    since: float
    rate: float = 0.0
    plan: int = 0
    """Number of the last planned end; earlier ones are void."""


class FabricNetwork:
    """Moves messages between ranks of a fabric."""

    def __init__(self, clock: Clock, fabric: Fabric, deliver: Deliver) -> None:
        self._clock, self._fabric, self._deliver = clock, fabric, deliver
        self._cards: dict[tuple[bool, int, bool], _Card] = {}
        self._flows: dict[tuple[int, int], _Flow] = {}
        self._queues: dict[tuple[int, int], deque[tuple[float, Any]]] = {}

    def send(self, source: int, destination: int, size: float, message: Any) -> None:
        """Queue a message of `size` bytes."""
        pair = (source, destination)
        if size <= SMALL and pair not in self._flows:
            link = self._link(*pair)
            when = self._clock.now + link.latency + size / link.bandwidth
            self._clock.at(when, lambda: self._deliver(source, destination, message))
        elif pair in self._flows:
            self._queues.setdefault(pair, deque()).append((size, message))
        else:
            self._begin(pair, size, message)

    def _link(self, source: int, destination: int) -> Link:
        far = source // self._fabric.node != destination // self._fabric.node
        return self._fabric.between if far else self._fabric.inside

    def _card(self, link: Link, rank: int, leaves: bool) -> _Card:
        far = link is self._fabric.between
        place = rank // self._fabric.node if far and self._fabric.shared else rank
        return self._cards.setdefault((far, place, leaves), _Card(link.bandwidth))

    def _begin(self, pair: tuple[int, int], size: float, message: Any) -> None:
        link = self._link(*pair)
        cards = (self._card(link, pair[0], True), self._card(link, pair[1], False))
        flow = self._flows[pair] = _Flow(message, size, cards, link.latency, self._clock.now)
        for card in cards:
            card.flows[pair] = flow
        self._share(cards)

    def _share(self, cards: tuple[_Card, _Card]) -> None:
        """Share two cards anew among the messages that use them."""
        now = self._clock.now
        for pair, flow in {**cards[0].flows, **cards[1].flows}.items():
            rate = min(card.share for card in flow.cards)
            if rate == flow.rate:
                continue
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            flow.rate, flow.since, flow.plan = rate, now, flow.plan + 1
            self._clock.at(now + flow.left / rate, lambda p=pair, f=flow, k=flow.plan: self._finish(p, f, k))

    def _finish(self, pair: tuple[int, int], flow: _Flow, plan: int) -> None:
        if plan != flow.plan:
            return
        flow.plan += 1
        del self._flows[pair]
        for card in flow.cards:
            del card.flows[pair]
        self._clock.at(self._clock.now + flow.latency, lambda: self._deliver(*pair, flow.message))
        queue = self._queues.get(pair)
        if queue:
            self._begin(pair, *queue.popleft())
        self._share(flow.cards)
