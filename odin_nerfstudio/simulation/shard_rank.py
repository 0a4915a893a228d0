"""One rank of a simulated job with sharded primitives: its views, its shard, its messages, in virtual time.

The device does one thing at a time: while its view renders, work for other ranks' views interrupts it (as if that had
the higher priority), so that no computing time is lost or won by doing two things at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from odin_nerfstudio.runtime.frontier import TaskPlan
from odin_nerfstudio.runtime.gate import BARRIER, DRAIN, LOOKAHEAD, RAW, STRUCTURAL, GatePolicy
from odin_nerfstudio.runtime.messages import FRAME_WORDS
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.runtime.sharded.packets import SplatPacket
from odin_nerfstudio.runtime.stage_costs import StageCosts
from odin_nerfstudio.simulation.clock import Clock, Nap, Process
from odin_nerfstudio.simulation.fabric import FabricNetwork
from odin_nerfstudio.simulation.network import Network
from odin_nerfstudio.simulation.rank import VersionPublisher, VirtualTelemetry
from odin_nerfstudio.simulation.scene import Meter, stand_in
from odin_nerfstudio.simulation.shard_owner import SimulatedOwner
from odin_nerfstudio.simulation.shards import Cut

_HEADER = 4.0 * (FRAME_WORDS + 6)


@dataclass(frozen=True)
class ShardJob:
    """What all ranks of a simulated job share.

    Attributes:
        ranks: Number of ranks.
        cut: The scene and its shards.
        stages: Times of the parts of a view.
        plan: Who renders what when.
        steps: How many steps.
        pixels: Time of a task's second stage.
        lookahead: See `runtime.engine.EngineOptions`.
        is_structural: Whether a step ends with surgery.
    """

    ranks: int
    cut: Cut
    stages: StageCosts
    plan: TaskPlan
    steps: int
    pixels: Callable[[Task], float]
    lookahead: int
    is_structural: Callable[[int], bool]


@dataclass(frozen=True)
class Packet:
    """Splats of a view, or their gradients."""

    step: int
    lane: int
    back: bool


class ShardRank:
    """A rank; `process` is its course."""

    def __init__(
        self, number: int, job: ShardJob, policy: GatePolicy, clock: Clock, network: Network | FabricNetwork
    ) -> None:
        self.number, self.job, self._clock, self._network = number, job, clock, network
        self._meter = Meter()
        shard = job.cut.shard(number)
        self.table = stand_in(shard, self._meter)
        self.owner = SimulatedOwner(
            job.plan, shard, self.table, job.stages, policy, VersionPublisher(shard, self.table, self._meter),
            VirtualTelemetry(number, self._meter, clock), self._meter, job.lookahead, self._limit, self._ship,
        )  # fmt: skip
        self._inbox: deque[tuple[int, Packet]] = deque()
        self._splats: dict[tuple[int, int], set[int]] = {}
        self._released = 0
        self._hazard = RAW if policy.partial else BARRIER
        self.waits: dict[str, float] = defaultdict(float)
        """By hazard. [s]"""
        self.ended = self.busy = self.rendered = self.sent = 0.0
        """When the last step was published; time of all work and of the second stage alone [s]; bytes."""
        self.tasks = self.packets_out = self.packets_in = 0

    # -- messages

    def deliver(self, source: int, packet: Packet) -> None:
        """A message has arrived."""
        self._inbox.append((source, packet))
        self._clock.wake(self.number)

    def _send(self, rank: int, size: float, packet: Packet) -> None:
        """Send when what has been metered so far is done."""
        self.sent += size
        self.packets_out += 1
        self._clock.at(self._clock.now + self._meter.spent, lambda: self._network.send(self.number, rank, size, packet))

    def _ship(self, rank: int, packet: SplatPacket) -> int:
        if rank == self.number:
            self._splats.setdefault((packet.step, packet.lane), set()).add(rank)
            return 0
        view, size = self.job.plan.view(packet.step, packet.lane), _HEADER
        if packet.ids.shape[0]:
            size += self.job.stages.splat_bytes * float(self.job.cut.visible(view)[self.number])
        self._send(rank, size, Packet(packet.step, packet.lane, back=False))
        return int(size)

    def _take(self) -> None:
        """Take in the oldest message."""
        source, packet = self._inbox.popleft()
        self.packets_in += 1
        if packet.back:
            self.owner.gradients(packet.step, packet.lane)
        else:
            self._splats.setdefault((packet.step, packet.lane), set()).add(source)

    # -- course

    def process(self) -> Process:
        """Every step, then a drain."""
        job, owner, costs = self.job, self.owner, self.job.cut.scene.overheads
        for step in range(job.steps):
            self._release(step)
            mine = [n for n in range(job.plan.views_per_step) if job.plan.rank(step, n) == self.number]
            for task in [Task(step, n, v) for n in mine if (v := job.plan.view(step, n)) >= 0]:
                yield from self._work(costs.between)
                yield from self._serve()
                while len(self._splats.get((step, task.lane), ())) < job.ranks:
                    yield from self._await(self._hazard)
                yield from self._render(task)
                yield from self._serve()
            self._release(step)
            owner.current = step + 1
            yield from self._serve()
            while owner.low < step - job.lookahead:
                yield from self._await(LOOKAHEAD)
            if job.is_structural(step):
                yield from self._drain(STRUCTURAL)
                yield from self._work(costs.structural)
        yield from self._drain(DRAIN)
        self.ended = self._clock.now

    def _work(self, seconds: float) -> Process:
        self.busy += seconds
        yield seconds

    def _render(self, task: Task) -> Process:
        """Merge, render, send gradients back; owners' work for other views comes in between."""
        job, key = self.job, (task.step, task.lane)
        del self._splats[key]
        visible, active = job.cut.visible(task.view), job.cut.active(task.view)
        left = job.pixels(task)
        self.rendered += left
        self.tasks += 1
        yield from self._work(job.stages.merge.seconds(float(visible.sum())))
        while left > 0:
            if self._inbox:
                self._take()
                self.owner.advance()
                yield from self._work(self._meter.take())
                continue
            begin = self._clock.now
            yield Nap(left)
            spent = self._clock.now - begin
            self.busy += spent
            left -= spent
            if left < 1e-12 * max(1.0, self._clock.now):
                break
        self._meter.spend(job.stages.split.seconds(float(visible.sum())))
        each = job.stages.gradient_bytes + (job.stages.norm_bytes if job.cut.scene.statistics else 0)
        seen = np.flatnonzero(active).tolist()
        for rank in (r for r in seen if r != self.number):
            size = _HEADER + visible[rank] / 8 + active[rank] * each
            self._send(rank, float(size), Packet(task.step, task.lane, back=True))
        if self.number in seen:
            self.owner.gradients(task.step, task.lane)
        yield from self._work(self._meter.take())

    def _serve(self) -> Process:
        """Take in what has arrived, and do all that may be done with it."""
        while self._inbox:
            self._take()
        self.owner.advance()
        yield from self._work(self._meter.take())

    def _await(self, hazard: str) -> Process:
        """Sleep until something has arrived, and do what it asks for."""
        begin = self._clock.now
        if not self._inbox:
            yield None
        self.waits[hazard] += self._clock.now - begin
        yield from self._serve()

    def _drain(self, reason: str) -> Process:
        yield from self._serve()
        while self.owner.low < self.owner.current:
            yield from self._await(reason)

    # -- fences

    def _release(self, step: int) -> None:
        if step > self._released:
            self._released, self.owner.changed = step, True

    def _limit(self) -> int:
        """As `ShardedEngine._limit`: the next fence that this rank has not passed."""
        step, end = self._released, self.owner.low + self.job.lookahead
        while step < end and not (step == self.job.steps - 1 or self.job.is_structural(step)):
            step += 1
        return step
