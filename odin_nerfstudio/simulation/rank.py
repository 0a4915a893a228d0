"""One rank of the simulated job: the engine's course of a step, with its frontier, gates and policy, in virtual time.

What `runtime.engine.Engine` does with real rows, sockets and clocks is done here with stand-ins: computing is time that
passes, messages carry ids without values, and publication raises versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from odin_nerfstudio.runtime import hazards, rows
from odin_nerfstudio.runtime.frontier import Frontier, TaskPlan
from odin_nerfstudio.runtime.gate import BARRIER, DRAIN, LINGER, LOOKAHEAD, STRUCTURAL, Decision, Gate, GatePolicy
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.runtime.staging import StepStaging
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.telemetry import Telemetry
from odin_nerfstudio.simulation.clock import Clock, Process
from odin_nerfstudio.simulation.exchange import SimulatedExchange
from odin_nerfstudio.simulation.fabric import FabricNetwork
from odin_nerfstudio.simulation.network import Network
from odin_nerfstudio.simulation.scene import Meter, Scene, stand_in


class VersionPublisher(Publisher):
    """Publishes versions instead of values, and spends the time of publishing values."""

    def __init__(self, scene: Scene, table: RowTable, meter: Meter) -> None:
        super().__init__([table])
        self._meter, self._costs = meter, scene.overheads

    def whole(self, staged: StepStaging) -> None:
        self.tables[0].versions.fill_(staged.step + 1)
        self._meter.spend(self._costs.publish)
        staged.started = True
        self.whole_steps += 1

    def some(self, staged: StepStaging, ahead: int) -> int:
        table = self.tables[0]
        assert staged.pending is not None
        mask = table.arrays["mask"]
        count = rows.publishable(table.versions, staged.step, staged.pending[0], mask)
        self._meter.spend(self._costs.scan)
        if count:
            rows.fill_at(table.versions, rows.ids_of_mask(mask), staged.step + 1)
            self._meter.spend(self._costs.sweep + self._costs.publish * count / table.count)
        staged.started = staged.started or count > 0
        self.partial_passes += 1
        return count

    def finish(self, staged: StepStaging) -> None:
        pass

    def statistics(self, staged: StepStaging) -> None:
        pass


class VirtualTelemetry(Telemetry):
    """Counts virtual seconds."""

    def __init__(self, rank: int, meter: Meter, clock: Clock) -> None:
        super().__init__(rank)
        self._meter, self._clock = meter, clock

    def now(self) -> float:
        return self._clock.now + self._meter.spent

    @contextmanager
    def timed(self, step: int, what: str, **args: str | int | float) -> Iterator[None]:
        before = self._meter.total
        yield
        record = self.record(step)
        setattr(record, what, getattr(record, what) + self._meter.total - before)


@dataclass(frozen=True)
class Job:
    """What all ranks of a simulated job share.

    Attributes:
        ranks: Number of ranks.
        scene: What is simulated.
        plan: Who renders what when.
        steps: How many steps.
        seconds: Compute time of a task.
        lookahead: See `runtime.engine.EngineOptions`.
        is_structural: Whether a step ends with surgery.
        reduced: Rows are summed by their owners.
        linger: See `runtime.engine.EngineOptions`.
    """

    ranks: int
    scene: Scene
    plan: TaskPlan
    steps: int
    seconds: Callable[[Task], float]
    lookahead: int
    is_structural: Callable[[int], bool]
    reduced: bool
    linger: bool = True


class SimulatedRank:
    """A rank; `process` is its course."""

    def __init__(
        self, number: int, job: Job, policy: GatePolicy, clock: Clock, network: Network | FabricNetwork
    ) -> None:
        self.number, self.job, self.policy, self._clock = number, job, policy, clock
        self._meter = Meter()
        self.table = stand_in(job.scene, self._meter)
        self.telemetry = VirtualTelemetry(number, self._meter, clock)
        publisher = VersionPublisher(job.scene, self.table, self._meter)
        tables = [self.table]
        self.frontier = Frontier(job.plan, tables, policy, publisher, self.telemetry, number, job.ranks, 0)
        self.frontier.reduced = job.reduced
        self.frontier.linger(job.linger)
        self.exchange = SimulatedExchange(number, job.ranks, job.scene, self.frontier, clock, network)
        self.ended = 0.0
        """When the last step was published. [s]"""
        self.tasks = 0
        self.delayed = 0
        """Tasks that were admitted with late rows."""
        self.computed = 0.0
        """Seconds of rendering and backward passes."""

    def process(self) -> Process:
        """Every step, then a drain."""
        job, frontier = self.job, self.frontier
        for step in range(job.steps):
            mine = [lane for lane in range(job.plan.views_per_step) if job.plan.rank(step, lane) == self.number]
            tasks = [Task(step, lane, v) for lane in mine if (v := job.plan.view(step, lane)) >= 0]
            for task in tasks:
                yield job.scene.overheads.between
                yield from self._acquire(task)
                seconds = job.seconds(task)
                self.computed += seconds
                self.tasks += 1
                yield seconds
                first = self._read_next(step)
                self._meter.spend(job.scene.overheads.contribute)
                if first is not None:
                    self._meter.spend(job.scene.overheads.defer)
                yield self._meter.take()
                self.exchange.contribute(task, first)
            frontier.current = step + 1
            if not tasks:
                self.exchange.send_progress(step)
                frontier.staging(step).settle(self.number)
                while frontier.low < step - job.lookahead:
                    yield from self._await(step, Decision(LOOKAHEAD, frontier.missing()))
                    frontier.publish_ready(step)
            self.exchange.poll()
            frontier.publish_ready(step)
            yield self._meter.take()
            if job.is_structural(step):
                yield from self._drain(STRUCTURAL)
                yield job.scene.overheads.structural
        yield from self._drain(DRAIN)
        self.ended = self._clock.now

    def _acquire(self, task: Task) -> Process:
        job, frontier, step, meter = self.job, self.frontier, task.step, self._meter
        frontier.patience.begin(step, self._clock.now)
        self.exchange.poll()
        frontier.publish_ready(step)
        mask = self.table.arrays["mask"]
        self.table.reads.mark(step, task.view, self.table.versions, self.policy.least_lag, mask)
        ids = [rows.ids_of_mask(mask)]
        gate = Gate(step, task.view, ids, [self.table], frontier.outstanding, frontier.track, job.lookahead)
        if self.policy.partial:
            yield from self._linger(step)
        while not (decision := self.policy.decide(gate)).open:
            if self.policy.partial:
                frontier.publish_some(step)
            yield from self._await(step, decision)
            frontier.publish_ready(step)
        if self.policy.partial and frontier.low < step:
            frontier.publish_some(step)
        if getattr(decision, "delayed", None) is not None:
            self.delayed += 1
        elif self.policy.partial:
            hazards.check_read(self.table, ids[0], step)
        meter.spend(job.scene.overheads.acquire)
        yield meter.take()

    def _read_next(self, step: int) -> Tensor | None:
        """As `Engine._read_next`: what other ranks' next tasks may read goes first."""
        alone = self.job.ranks == 1 or not self.policy.partial or self.frontier.reduced
        if alone or self.job.is_structural(step) or step + 1 >= self.job.steps:
            return None
        if self.frontier.patience.waits(1):
            return None
        return self.frontier.read_by_others(step + 1)[0]

    def _linger(self, step: int) -> Process:
        """As `Drains._linger`: wait for the rest of the steps before."""
        frontier = self.frontier
        while frontier.low < step and frontier.patience.waits():
            yield from self._await(step, Decision(LINGER, frontier.missing()))
            frontier.publish_ready(step)

    def _await(self, step: int, decision: Decision) -> Process:
        """Finish what there is to do, then sleep until something has arrived, and take in all."""
        yield self._meter.take()
        begin = self._clock.now
        if not self.exchange.waiting:
            yield None
            yield self.job.scene.overheads.react
        peer = self.exchange.poll()
        record = self.telemetry.record(step)
        key = (decision.hazard or BARRIER, peer)
        record.wait[key] = record.wait.get(key, 0.0) + self._clock.now - begin

    def _drain(self, reason: str) -> Process:
        frontier = self.frontier
        self.exchange.poll()
        frontier.publish_ready(frontier.current - 1)
        while frontier.low < frontier.current:
            yield from self._await(frontier.current - 1, Decision(reason, frontier.missing()))
            frontier.publish_ready(frontier.current - 1)
        yield self._meter.take()
