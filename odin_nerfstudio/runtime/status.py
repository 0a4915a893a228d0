"""What all ranks are doing, for those who watch a run: rank 0 asks, the others answer.

A question and its answers are handled by the threads of the transport as soon as they arrive, whatever the training
threads are doing, so a rank that waits or evaluates answers too. Nobody asks, nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from odin_nerfstudio.runtime.barrier_estimate import BarrierEstimate, estimate, pack_timeline
from odin_nerfstudio.runtime.telemetry import Telemetry, now
from odin_nerfstudio.runtime.transport import Received, message_bytes

WINDOW = 120
"""Steps over which the barrier's cost is estimated while a run goes on."""
_QUESTION, _ANSWER, _TIMELINE = b"?", b"!", b"#"


@dataclass(frozen=True)
class RankStatus:
    """What one rank said."""

    rank: int
    step: int
    what: str
    """`telemetry.Doing.what`."""
    hazard: str = ""
    awaited: Sequence[Sequence[int]] = ()
    """(step, rank) of the contributions that it waits for."""
    seconds: float = 0.0
    """For how long it has been doing so."""
    clock: float = 0.0
    """Its monotonic clock."""
    totals: dict[str, float] = field(default_factory=dict)
    """Some of its telemetry's totals."""

    TOTALS = (
        "tasks", "steps", "compute", "wait", "sent", "conflicts", "conflict_rows", "delayed_tasks", "delayed_rows",
    )  # fmt: skip


class StatusBoard:
    """This rank's answers and, on the rank that asks, what the others have answered."""

    def __init__(
        self,
        telemetry: Telemetry,
        peers: Sequence[int],
        send: Callable[[Sequence[int], bytes], None],
        rank_of: Callable[[int, int], int],
    ) -> None:
        """send: sends bytes to some peers as `Kind.STATUS`. rank_of: rank of a step's lane."""
        self._telemetry, self._peers, self._send = telemetry, list(peers), send
        self._rank_of = rank_of
        self._heard: dict[int, RankStatus] = {}
        self._heard_at: dict[int, float] = {}
        self._timelines: dict[int, bytes] = {}

    def ask(self, with_timeline: bool = False) -> None:
        """Ask every peer; answers come in a moment. with_timeline: also for what `estimate` needs."""
        if self._peers:
            self._send(self._peers, _QUESTION + (_TIMELINE if with_timeline else b""))

    def take(self, received: Received) -> None:
        """Answer a question or keep an answer. In a thread of the transport."""
        data = message_bytes(received.words)
        kind, rest = data[:1], data[1:]
        if kind == _QUESTION:
            self._send([received.peer], _ANSWER + json.dumps(asdict(self._describe())).encode())
            if rest == _TIMELINE:
                self._send([received.peer], _TIMELINE + pack_timeline(self._telemetry, WINDOW))
        elif kind == _ANSWER:
            answer = json.loads(rest)
            self._heard[received.peer] = RankStatus(**answer)
            self._heard_at[received.peer] = now()
        elif kind == _TIMELINE:
            self._timelines[received.peer] = rest

    def statuses(self) -> dict[int, RankStatus]:
        """This rank's and the peers' last answers, by rank."""
        mine = self._describe()
        return dict(sorted({mine.rank: mine, **self._heard}.items()))

    def heard_since(self, time: float) -> dict[int, RankStatus]:
        """The answers that have come since a time (monotonic clock, seconds), by rank."""
        return {rank: status for rank, status in self._heard.items() if self._heard_at.get(rank, 0.0) >= time}

    def estimate(self) -> BarrierEstimate | None:
        """What a barrier would have cost lately; None before all peers have answered `ask` with their timelines."""
        if len(self._timelines) < len(self._peers) or not self._peers:
            return None
        parts = {self._telemetry.rank: pack_timeline(self._telemetry, WINDOW), **self._timelines}
        return estimate([parts[rank] for rank in sorted(parts)])

    def _describe(self) -> RankStatus:
        doing, totals, clock = self._telemetry.doing, self._telemetry.totals, now()
        return RankStatus(
            rank=self._telemetry.rank,
            step=doing.step,
            what=doing.what,
            hazard=doing.hazard,
            awaited=[(s, self._rank_of(s, lane) if lane >= 0 else -1 - lane) for s, lane in doing.awaited],
            seconds=clock - doing.since,
            clock=clock,
            totals={name: float(totals.get(name, 0.0)) for name in RankStatus.TOTALS},
        )
