"""Gates: when a task may start, by policy.

The engine shows a policy the steps that are outstanding and the rows that the task can read; the policy answers whether
the task may start, and if not, what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from odin_nerfstudio.runtime import hazards, rows
from odin_nerfstudio.runtime.staging import Phase, StepStaging
from odin_nerfstudio.runtime.store import RowTable

RAW, BARRIER, LOOKAHEAD, STRUCTURAL, DRAIN, LINGER = "raw", "barrier", "lookahead", "structural", "drain", "linger"
"""What a wait is for: a hazard, the barrier mode, the bound on look-ahead, a structural step, any other drain, or the
whole of a step where that is cheaper (`patience`)."""


@dataclass(frozen=True)
class Awaited:
    """What a gate waits for: a task's contribution, or (lane = -1 - rank) the sums of an owner of rows."""

    step: int
    lane: int

    def rank(self, rank_of: Callable[[int, int], int]) -> int:
        """The rank that it comes from. rank_of: rank of a step's lane."""
        return rank_of(self.step, self.lane) if self.lane >= 0 else -1 - self.lane


@dataclass(frozen=True)
class DelayedRead:
    """A RAW hazard that a policy admits on evidence."""

    view: int
    rows: int
    """Primitives read late."""
    delay: int
    """Most steps whose updates one of them lacks."""
    mass: float
    """Importance of these rows, between 0 (none) and 1; see `throughput`."""
    peak: float
    """Importance of the weightiest of them."""


@dataclass(frozen=True)
class Decision:
    """A policy's answer. Open if `hazard` is None."""

    hazard: str | None = None
    awaited: tuple[Awaited, ...] = ()
    rows: int = 0
    """Rows that the gate waits for (RAW)."""
    delayed: DelayedRead | None = None
    """The rows that the task reads late; None: it sees everything."""

    @property
    def open(self) -> bool:
        return self.hazard is None


OPEN = Decision()


@dataclass(eq=False)
class Gate:
    """A task's gate, as a policy sees it."""

    step: int
    view: int
    ids: Sequence[Tensor]
    """Per table: rows that the task can read. [n] int32."""
    tables: Sequence[RowTable]
    outstanding: Callable[[], Sequence[StepStaging]]
    """Steps before this one that are not published entirely, oldest first."""
    track: Callable[[StepStaging], None]
    """Make sure that a step counts its pending lanes."""
    lookahead: int

    def too_far(self) -> Decision | None:
        """The refusal where the oldest outstanding step is more than `lookahead` steps back; else None."""
        late = [s for s in self.outstanding() if s.step < self.step - self.lookahead]
        return Decision(LOOKAHEAD, _missing(late)) if late else None

    def blocked(self, tables: Sequence[int] | None = None, before: int | None = None) -> Decision:
        """Open, or the RAW hazards in the way.

        Args:
            tables: Numbers of the tables to look at; None: all.
            before: Look at pending updates of steps before this one only; None: of all.
        """
        count, awaited = 0, []
        chosen = range(len(self.tables)) if tables is None else tables
        for staged in self.outstanding():
            if staged.complete or (before is not None and staged.step >= before):
                continue
            self.track(staged)
            assert staged.pending is not None
            waiting = [ids[:0] for ids in self.ids]
            for k in chosen:
                table, ids = self.tables[k], self.ids[k]
                waiting[k] = hazards.raw_rows(table.versions, ids, staged.step, staged.pending[k])
                count += int(waiting[k].shape[0])
            if any(r.shape[0] for r in waiting):
                awaited += [Awaited(staged.step, n) for n in staged.missing() if _holds(staged, n, waiting)]
        return Decision(RAW, tuple(awaited), count) if count else OPEN


def _missing(steps: Sequence[StepStaging]) -> tuple[Awaited, ...]:
    return tuple(Awaited(s.step, lane) for s in steps for lane in s.missing())


def _holds(staged: StepStaging, number: int, waiting: Sequence[Tensor]) -> bool:
    """Whether a lane is one of those that rows wait for."""
    if number < 0:
        return True
    lane = staged.lanes[number]
    for k, ids in enumerate(waiting):
        index = ids.long()
        if lane.phase == Phase.WAITING and lane.candidates is not None and bool(lane.candidates[k][index].any()):
            return True
        if lane.phase == Phase.IDS and rows.meet(lane.rest[k], ids):
            return True
    return False


class GatePolicy(Protocol):
    """Decides when tasks start."""

    @property
    def name(self) -> str: ...
    @property
    def partial(self) -> bool:
        """Rows are published before their step is complete."""
        ...

    @property
    def least_lag(self) -> int:
        """Candidate sets of other ranks' tasks are inflated by at least that many steps."""
        ...

    @property
    def max_delay(self) -> int:
        """Most steps that a primitive may be read late."""
        ...

    def decide(self, gate: Gate) -> Decision: ...


@dataclass(frozen=True)
class BarrierPolicy:
    """The synchronized reference: a task waits for every contribution of all older steps."""

    name: str = "barrier"
    partial: bool = False
    least_lag: int = 0
    max_delay: int = 0

    def decide(self, gate: Gate) -> Decision:
        left = gate.outstanding()
        return Decision(BARRIER, _missing(left)) if left else OPEN


@dataclass(frozen=True)
class QualityPolicy:
    """A task waits for the pending updates of the rows that it can read, and for nothing else."""

    name: str = "quality"
    partial: bool = True
    least_lag: int = 0
    max_delay: int = 0

    def decide(self, gate: Gate) -> Decision:
        return gate.too_far() or gate.blocked()
