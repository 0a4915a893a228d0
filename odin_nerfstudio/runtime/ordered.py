"""Transport for NCCL: one thread issues the bodies of all messages, on every rank in the order that the plan gives.

Heads of messages, and everything that has no body (heartbeats, notes, the reasons of failures), travel over gloo like
those of `gloo.GlooTransport`, so that a rank that dies, stalls or raises is noticed as early as there. A head says how
large its body is; when its turn in the order has come (`travel_order`), every rank issues the body's operation. Nothing
is issued before its head has arrived: a rank that is slow, busy or paused leaves no operation waiting on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odin_nerfstudio.runtime.channels import Channel
from odin_nerfstudio.runtime.faults import FaultLimits, RankFailure, brief
from odin_nerfstudio.runtime.gloo import GlooTransport
from odin_nerfstudio.runtime.messages import unit_of
from odin_nerfstudio.runtime.pinned import Parcel
from odin_nerfstudio.runtime.transport import FOLLOWS_AT, Kind, Received, frame
from odin_nerfstudio.runtime.travel_order import TravelOrder, Unit

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.frontier import TaskPlan

_IN_ORDER = (Kind.CONTRIBUTION, Kind.SHARE, Kind.SUMS)
"""Messages whose bodies `travel_order` knows."""
_AFTERTHOUGHT = 3.0
"""How long an error of the channel waits for the connections to say which rank is at fault. [s]"""


@dataclass(eq=False)
class _Own:
    """A unit of this rank."""

    kind: Kind
    parts: int
    bodies: dict[int, Tensor] = field(default_factory=dict)
    """By peer. Shares have one for each, which come one by one; everything else is the same for all."""
    made: Any = None
    """The channel's mark behind the making of the bodies."""


@dataclass(frozen=True)
class _Announced:
    """The head of a peer's unit."""

    kind: Kind
    head: Tensor
    words: int
    """Of the body."""


class OrderedTransport(GlooTransport):
    """Heads over gloo, bodies through a channel in the plan's order."""

    def __init__(
        self,
        make_channel: Callable[[], Channel],
        limits: FaultLimits | None = None,
        setup_timeout: float = 300.0,
    ) -> None:
        """make_channel: called on every rank when all have met, and when losses are noticed already."""
        self._turn = threading.Condition()
        self._own: dict[Unit, _Own] = {}
        self._announced: dict[Unit, _Announced] = {}
        self._ended = False
        self._channel: Channel | None = None
        super().__init__(limits, setup_timeout)
        self.apart = True
        self._channel = make_channel()

    def follow(self, plan: TaskPlan, start_step: int) -> None:
        order = TravelOrder(plan, self.world_size, start_step)
        threading.Thread(target=self._issue_loop, args=(order,), name="odin-issue", daemon=True).start()

    def send(self, peers: Iterable[int], kind: Kind, words: Tensor, body: Tensor | None = None) -> None:
        if body is None:
            super().send(peers, kind, words)
            return
        if kind not in _IN_ORDER:
            raise ValueError(f"messages of kind {kind.name} have no place in the order of bodies")
        assert self._channel is not None
        peers = list(peers)
        frame(words, kind, self._step, self._activity, words.shape[0], 1 + body.shape[0])
        step, lane, parts = unit_of(words)
        with self._turn:
            own = self._own.setdefault(Unit.of(step, lane, parts), _Own(kind, parts))
            own.bodies.update(dict.fromkeys(peers, body))
            own.made = self._channel.made()
            self._turn.notify()
        self._post(peers, Parcel(words, receivers=len(peers)))

    def fail(self, failure: RankFailure) -> None:
        super().fail(failure)
        self._end()

    def abort(self, reason: str, root: int | None = None) -> None:
        super().abort(reason, root)
        self._end()

    def close(self) -> None:
        """As `GlooTransport.close`; bodies of this rank are delivered before the peers hear of it."""
        with self._turn:
            while self._own and self.inbox.failure is None:
                self._turn.wait(0.1)
        super().close()
        with self._turn:
            self._ended = True
            self._turn.notify()

    def _arrived(self, peer: int, kind: Kind, words: Tensor, arrived: float) -> None:
        follows = int(words[FOLLOWS_AT])
        if not follows:
            super()._arrived(peer, kind, words, arrived)
            return
        with self._turn:
            self._announced[Unit.of(*unit_of(words))] = _Announced(kind, words, follows - 1)
            self._turn.notify()

    def _end(self) -> None:
        """Stop issuing; what is under way ends with an error."""
        with self._turn:
            if self._ended:
                return
            self._ended = True
            self._turn.notify()
        if self._channel is not None:  # in a thread: a communicator may take its time, or never come back
            threading.Thread(target=self._channel.abort, name="odin-abort", daemon=True).start()

    # -- the issuing thread

    def _issue_loop(self, order: TravelOrder) -> None:
        assert self._channel is not None
        if self._channel.device.type == "cuda":
            torch.cuda.set_device(self._channel.device)  # is a thread's own
        while (at := order.current()) is not None:
            unit, source = at
            if not self._await(unit, source):
                return
            try:
                parts = self._send_body(unit) if source == self.rank else self._receive_body(unit, source)
            except (RuntimeError, ValueError) as error:
                self._channel_lost(unit, source, error)
                return
            order.advance(parts)

    def _await(self, unit: Unit, source: int) -> bool:
        """Wait for a unit's head; False: there will be none."""
        with self._turn:
            while not self._ended:
                own = self._own.get(unit)
                complete = own is not None and len(own.bodies) == len(self._peers)
                if complete if source == self.rank else unit in self._announced:
                    return True
                self._turn.wait()
        return False

    def _send_body(self, unit: Unit) -> int:
        assert self._channel is not None
        own = self._own[unit]
        bodies = {peer: body for peer, body in own.bodies.items() if body.shape[0]}
        if bodies and own.kind == Kind.SHARE:
            self._channel.hand_out(bodies, own.made)
        elif bodies:
            self._channel.share(next(iter(bodies.values())), own.made)
        self.bytes_sent += sum(4 * body.shape[0] for body in bodies.values())
        with self._turn:
            del self._own[unit]
            self._turn.notify_all()  # `close` may wait for that
        return own.parts

    def _receive_body(self, unit: Unit, source: int) -> int:
        assert self._channel is not None
        with self._turn:
            told = self._announced.pop(unit)
        if told.words:
            body = self._channel.receive(source, told.words, told.kind == Kind.SHARE)
        else:
            body = torch.empty(0, dtype=torch.int32, device=self._channel.device)
        self.bytes_received += 4 * told.words
        self._take_in(Received(source, told.kind, told.head, time.monotonic(), body))
        return unit_of(told.head)[2]

    def _channel_lost(self, unit: Unit, source: int, error: Exception) -> None:
        assert self._channel is not None
        end = time.monotonic() + _AFTERTHOUGHT
        while not self._ended and self.inbox.failure is None and time.monotonic() < end:
            time.sleep(0.05)
        if self._ended:
            return
        what = f"step {unit.step} lane {unit.lane} over {self._channel.name}"
        self.fail(RankFailure(source, f"was sending {what} when that failed [{brief(error)}]"))
