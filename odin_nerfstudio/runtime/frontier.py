"""The frontier: which steps are staged, which are published, and what may be published next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from odin_nerfstudio.runtime import hazards
from odin_nerfstudio.runtime.evidence import EvidenceStore
from odin_nerfstudio.runtime.gate import Awaited, GatePolicy
from odin_nerfstudio.runtime.messages import Contribution
from odin_nerfstudio.runtime.patience import Patience
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.reduction import ReducedStaging, Traffic
from odin_nerfstudio.runtime.row_watch import RowWatch
from odin_nerfstudio.runtime.staging import Phase, StepStaging
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.telemetry import StepRecord, Telemetry


class TaskPlan(Protocol):
    """Who renders what when (`planning.Plan`)."""

    @property
    def views_per_step(self) -> int:
        """Lanes L."""
        ...

    @property
    def steps(self) -> int | None:
        """Length of the plan; None: without end."""
        ...

    def view(self, step: int, lane: int, /) -> int:
        """View of a task; negative: the lane is empty."""
        ...

    def rank(self, step: int, lane: int, /) -> int:
        """Rank that runs a task."""
        ...


class Frontier:
    """Steps between the oldest unpublished one, `low`, and the one that this rank works on, `current`."""

    def __init__(
        self,
        plan: TaskPlan,
        tables: Sequence[RowTable],
        policy: GatePolicy,
        publisher: Publisher,
        telemetry: Telemetry,
        rank: int,
        world_size: int,
        start_step: int,
    ) -> None:
        self.plan, self.tables = plan, tables
        self._patience: dict[type[GatePolicy], Patience] = {}
        self._whole: bool | None = None
        self.evidence: EvidenceStore | None = None
        """Learns from every complete contribution; None: not of interest."""
        self.use_policy(policy)
        self.publisher, self.telemetry = publisher, telemetry
        self.rank, self.world_size = rank, world_size
        self.low = self.current = start_step
        self.staged_rows = 0
        """Gradient rows staged since the start."""
        self.on_step: Callable[[StepRecord], None] | None = None
        self.reduced = False
        """Rows of new steps are summed by their owners; changes at structural steps only."""
        self.traffic: Traffic | None = None
        """Counts what reducing would save; None: not of interest."""
        self.on_retire: Callable[[int], None] | None = None
        self.row_watch: RowWatch | None = None
        self._steps: dict[int, StepStaging] = {}

    def use_policy(self, policy: GatePolicy) -> None:
        """Decide by a policy from now on. Evidence that one policy wanted is kept up to date for later ones too."""
        self.policy = policy
        self.patience = self._patience.setdefault(type(policy), Patience(self._whole))
        if isinstance(evidence := getattr(policy, "evidence", None), EvidenceStore):
            self.evidence = evidence

    def linger(self, wanted: bool) -> None:
        """Whether tasks may wait for whole steps where that is cheaper; forgets what was found out about it."""
        self._whole = None if wanted else False
        self._patience = {}
        self.use_policy(self.policy)

    # -- staging

    def staging(self, step: int) -> StepStaging:
        """The staging of a step, made at first use."""
        staged = self._steps.get(step)
        if staged is None:
            lanes = range(self.plan.views_per_step)
            views = [self.plan.view(step, n) for n in lanes]
            working = {self.plan.rank(step, n) for n in lanes if views[n] >= 0}
            silent = set(range(self.world_size)) - working
            if self.reduced:
                staged = ReducedStaging(step, views, self.tables, silent, self.world_size)
            else:
                staged = StepStaging(step, views, self.tables, silent)
            self._steps[step] = staged
        return staged

    def stage(self, message: Contribution) -> None:
        """Stage a message of a task, this rank's or another's."""
        staged = self.staging(message.step)
        before = staged.staged_rows()
        staged.accept(message)
        self.staged_rows += staged.staged_rows() - before
        if self.row_watch is not None and self.row_watch.active and message.has_first:
            rank = self.plan.rank(message.step, message.lane) if message.lane >= 0 else -1 - message.lane
            self.row_watch.wrote(message.tables[0].ids, rank)
        if self.evidence is not None and message.lane >= 0 and message.has_rest and not message.share:
            parts = staged.lanes[message.lane].parts[0]
            self.evidence.learn(self.tables[0], message.step, staged.views[message.lane], parts)

    def outstanding(self) -> list[StepStaging]:
        """Steps that this rank has contributed to and that are not published entirely, oldest first."""
        return [self.staging(s) for s in range(self.low, self.current)]

    def missing(self) -> tuple[Awaited, ...]:
        """Lanes that the outstanding steps wait for."""
        return tuple(Awaited(s.step, lane) for s in self.outstanding() for lane in s.missing())

    def waiting_rows(self) -> int:
        """Gradient rows staged for steps that are not published entirely."""
        return sum(s.staged_rows() for s in self._steps.values())

    def candidates(self, staged: StepStaging, number: int) -> list[Tensor]:
        """Masks of the rows that a lane's task can read, per table; taken before any row of its step is published."""
        lane = staged.lanes[number]
        if lane.candidates is None:
            hazards.check_candidates_first(staged.step, staged.started)
            lane.candidates = []
            for table in self.tables:
                mask = torch.empty(table.count, dtype=torch.uint8, device=table.device)
                table.reads.mark(staged.step, staged.views[number], table.versions, self.policy.least_lag, mask)
                lane.candidates.append(mask)
        return lane.candidates

    def track(self, staged: StepStaging) -> None:
        """Make sure that a step counts its pending lanes."""
        if staged.pending is None:
            for number, lane in enumerate(staged.lanes):
                if lane.phase == Phase.WAITING:
                    self.candidates(staged, number)
            staged.track()

    def read_by_others(self, step: int) -> list[Tensor]:
        """Per table the rows that other ranks' tasks of a step may read, if nothing of them has arrived. [N] uint8."""
        staged = self.staging(step)
        union = [torch.zeros(t.count, dtype=torch.uint8, device=t.device) for t in self.tables]
        for number, lane in enumerate(staged.lanes):
            if self.plan.rank(step, number) != self.rank and lane.phase == Phase.WAITING:
                for mask, candidates in zip(union, self.candidates(staged, number)):
                    mask |= candidates
        return [mask if table.defer else torch.ones_like(mask) for table, mask in zip(self.tables, union)]

    # -- publication

    def publish_ready(self, step: int) -> None:
        """Publish the complete steps, in one go where nothing of them is published. step: for the telemetry."""
        while self.low < self.current and self.staging(self.low).complete:
            staged = self.staging(self.low)
            with self.telemetry.timed(step, "publish"):
                begin, in_parts = self.telemetry.now(), staged.started
                if not in_parts:
                    self.publisher.whole(staged)
                else:
                    self.track(staged)
                    self.publisher.some(staged, 0)
                    self.publisher.finish(staged)
                self.publisher.statistics(staged)
                if not in_parts:
                    self.telemetry.timeline.whole(self.telemetry.now() - begin)
            self._retire(staged)

    def publish_some(self, step: int) -> None:
        """Publish the rows of incomplete steps that no lane is pending on. step: for the telemetry.

        All of them, not only those that the task at hand reads: rows that lag make candidate sets wider, also those of
        the other ranks' next tasks, so that more of them meet.
        """
        changed = False
        for number in range(self.low, self.current):
            staged = self.staging(number)
            changed = changed or staged.changed  # a row of a step can go where it has gone in the step before
            if changed:
                with self.telemetry.timed(step, "publish"):
                    self.track(staged)
                    self.publisher.some(staged, number - self.low)
                staged.changed = False

    def _retire(self, staged: StepStaging) -> None:
        step = staged.step
        del self._steps[step]
        if self.traffic is not None:
            self.traffic.count(staged, self.tables[0])
        if self.on_retire is not None:
            self.on_retire(step)
        self.low = step + 1
        if self.low in self._steps:
            self._steps[self.low].changed = True  # its rows could not go further than the retired step so far
        record = self.telemetry.finish(step)
        if record is not None and self.on_step is not None:
            self.on_step(record)
