"""Throughput mode: a task may read rows late where evidence says that little is lost.

Row p is *late* for a task of step s if an update of an older step is still to come; read now, it lacks at most
``s - version`` updates. With g_v(p), the share of view v's gradient that fell on p at its last visit (`evidence`), the
harm of reading late is the mass overlap with the pending writers u::

    harm = sum over late rows p of min(g_v(p), sum over tasks u pending on p of g_u(p))

It is small if the rows matter little to the reader, or if the writers change them little. What is not known, of a
reader or of a writer, counts as 1: first visits wait, save where the other side's evidence alone proves that little is
at stake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from odin_nerfstudio.runtime import mass, rows
from odin_nerfstudio.runtime.evidence import Evidence
from odin_nerfstudio.runtime.gate import OPEN, RAW, Awaited, Decision, DelayedRead, Gate
from odin_nerfstudio.runtime.staging import Phase, StepStaging
from odin_nerfstudio.runtime.store import RowTable


@dataclass(frozen=True)
class DelayLimits:
    """How late, and how harmful, a read may be; the same on every rank.

    Raises:
        ValueError: A limit is negative.
    """

    max_delay: int = 2
    """Most steps whose updates a row may lack."""
    max_overlap: float = 0.5
    """The harm of a read stays below this."""
    max_impact: float = 0.02
    """Most that a single row may add to the harm."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_delay <= 255 or self.max_overlap < 0 or self.max_impact < 0:
            raise ValueError(f"max_delay, max_overlap, max_impact: {self} makes no sense")


class _Scratch:
    """Per-row buffers, zero between two decisions."""

    def __init__(self, table: RowTable) -> None:
        n, device = table.count, table.device
        self.late = torch.zeros(n, dtype=torch.uint8, device=device)
        self.member = torch.zeros(n, dtype=torch.uint8, device=device)
        self.total = torch.zeros(n, dtype=torch.float32, device=device)
        self.ids = torch.empty(n, dtype=torch.int32, device=device)


@dataclass(eq=False)
class ThroughputPolicy:
    """Waits for hazards unless the evidence admits the read. Per-view rows are never read late."""

    evidence: Evidence
    limits: DelayLimits = field(default_factory=DelayLimits)
    name: str = "throughput"
    partial: bool = True
    _scratch: _Scratch | None = field(default=None, init=False, repr=False)

    @property
    def least_lag(self) -> int:
        """A peer may read rows that old, whatever this rank's copy has."""
        return self.limits.max_delay

    @property
    def max_delay(self) -> int:
        return self.limits.max_delay

    def decide(self, gate: Gate) -> Decision:
        refusal = gate.too_far()
        if refusal is not None:
            return refusal
        if not self.limits.max_delay or not self.limits.max_overlap:
            return gate.blocked()
        steps = [s for s in gate.outstanding() if not s.complete]
        if not steps:
            return OPEN
        per_view = gate.blocked(range(1, len(gate.tables)))
        if not per_view.open:
            return per_view
        primitives = gate.tables[0]
        scratch = self._scratch
        if scratch is None or scratch.late.shape[0] != primitives.count:
            scratch = self._scratch = _Scratch(primitives)
        count, oldest = 0, gate.step
        for staged in steps:
            gate.track(staged)
            assert staged.pending is not None
            before, delay = count, gate.step - staged.step
            args = (primitives.versions, gate.ids[0], staged.step, staged.pending[0], delay, scratch.late, scratch.ids)
            count = mass.mark_late(*args, count)
            if count > before:
                oldest = min(oldest, staged.step)
        late = scratch.ids[:count]
        try:
            if not count:
                return OPEN
            if gate.step - oldest > self.limits.max_delay:
                return gate.blocked((0,), before=gate.step - self.limits.max_delay)
            return self._weigh(gate, steps, scratch, late, gate.step - oldest)
        finally:
            rows.fill_at(scratch.late, late, 0)

    def _weigh(self, gate: Gate, steps: list[StepStaging], scratch: _Scratch, late: Tensor, delay: int) -> Decision:
        """Admit the read of the late rows, or wait for those that carry the mass."""
        shares = self.evidence.of(gate.view)
        reader, total = None if shares is None else shares.mass, scratch.total
        for _, writer, member in self._pending(steps, scratch):
            if writer is None:
                mass.add_unknown(total, late, member)
            else:
                mass.add(total, writer, member)
        harm, peak, count = mass.overlap(reader, late, scratch.late, total)
        for _, writer, _ in self._pending(steps, scratch):
            rows.fill_at(total, late if writer is None else writer[0], 0)
        if harm < self.limits.max_overlap and peak <= self.limits.max_impact:
            return Decision(delayed=DelayedRead(gate.view, int(late.shape[0]), delay, harm, peak))
        if reader is None:
            mass.add_unknown(total, late, scratch.late)
        else:
            mass.add(total, reader, scratch.late)
        awaited = [
            task
            for task, writer, member in self._pending(steps, scratch)
            if mass.meets(late if writer is None else writer[0], member, total)
        ]
        rows.fill_at(total, late if reader is None else reader[0], 0)
        return Decision(RAW, tuple(awaited), count)

    def _pending(
        self, steps: list[StepStaging], scratch: _Scratch
    ) -> Iterator[tuple[Awaited, mass.Mass | None, Tensor]]:
        """What is still to come: task, its mass (None: unknown), and a mask of the rows that it is pending on."""
        for staged in steps:
            for number in staged.missing():
                task = Awaited(staged.step, number)
                if number < 0:  # sums of an owner of rows: any row may be among them
                    yield task, None, scratch.late
                    continue
                lane, shares = staged.lanes[number], self.evidence.of(staged.views[number])
                writer = None if shares is None else shares.mass
                if lane.phase == Phase.WAITING:
                    assert lane.candidates is not None
                    yield task, writer, lane.candidates[0]
                else:
                    rows.fill_at(scratch.member, lane.rest[0], 1)
                    yield task, writer, scratch.member
                    rows.fill_at(scratch.member, lane.rest[0], 0)
