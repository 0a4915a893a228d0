"""The engine of sharded primitives: the same hooks as `runtime.engine`, over splats instead of rows.

Public API, in the order of use::

    engine = ShardedEngine(plan, table, ids, total, projector, transport, QualityPolicy(), EngineOptions(...),
                           is_structural=strategy_acts_at, is_fence=saves_or_evaluates_after, start_step=first)
    for step in range(first, last):
        for word in engine.due(step): ...
        for task in engine.tasks(step):
            mine = engine.acquire(task)                    # hook 1: waits for every owner's splats of the view
            image, alphas, info = mine.splats.rasterize()  # forward, backward on these
            engine.contribute(task, mine, info)            # hook 2: splats' gradients go back to their owners
        engine.publish(step)                               # hook 3
        if strategy_acts_at(step):
            engine.structural(step, surgery, strategy_state)
        if saves_or_evaluates_after(step):                 # a fence: no row is published beyond it
            engine.drain()

`table` holds this rank's rows only; `ids` are their places in the whole model of `total` rows. Every step after which
the state of all rows is looked at is a fence, on all ranks; structural steps and the last one are fences by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from odin_nerfstudio.runtime.engine import EngineOptions
from odin_nerfstudio.runtime.frontier import Frontier, TaskPlan
from odin_nerfstudio.runtime.gate import (
    BARRIER,
    DRAIN,
    LOOKAHEAD,
    RAW,
    STRUCTURAL,
    Awaited,
    Decision,
    GatePolicy,
    QualityPolicy,
)
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.ranks import Rank
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.runtime.sharded.balance import Balance
from odin_nerfstudio.runtime.sharded.exchange import ShardExchange
from odin_nerfstudio.runtime.sharded.owner import Owner, Projector
from odin_nerfstudio.runtime.sharded.service import Service
from odin_nerfstudio.runtime.sharded.structure import change_rows
from odin_nerfstudio.runtime.sharded.view_rows import PoseBackward, ViewRows
from odin_nerfstudio.runtime.sharded.views import MergedView, ViewTask, norms_of
from odin_nerfstudio.runtime.status import StatusBoard
from odin_nerfstudio.runtime.store import PublishedStore, RowTable
from odin_nerfstudio.runtime.telemetry import StepRecord, Telemetry, now
from odin_nerfstudio.runtime.transport import Activity, LocalTransport, Received, Transport


class ShardedEngine(Rank):
    """Drives this rank's shard and its views; see the module's text."""

    knows_barrier = False

    def __init__(
        self,
        plan: TaskPlan,
        table: RowTable,
        ids: Tensor,
        total: int,
        projector: Projector,
        transport: Transport | None = None,
        policy: GatePolicy | None = None,
        options: EngineOptions | None = None,
        is_structural: Callable[[int], bool] = lambda step: False,
        is_fence: Callable[[int], bool] = lambda step: False,
        start_step: int = 0,
        imbalance: float = 0.2,
        local: bool = False,
        view_tables: Sequence[RowTable] = (),
        pose_backward: PoseBackward | None = None,
    ) -> None:
        """
        Args:
            ids: Place in the whole model of each row of the table, ascending. [n] int32, on any device.
            is_fence: Whether something looks at the state of all rows after a step.
            imbalance: At a structural step rows change hands if the largest shard exceeds the mean by more than this.
            local: The plan keeps ranks to their parts of the scene; shards follow, see `planning.shards.parts_for`.
            view_tables: Parameters of views, a row for each. Every rank holds all of them.
            pose_backward: Where poses are among them, see `view_rows`.

        Raises:
            ValueError: More than 255 lanes, or ids that do not fit the table.
        """
        if not 1 <= plan.views_per_step <= 255:
            raise ValueError(f"views per step: {plan.views_per_step} lanes are not within 1 to 255")
        if ids.shape != (table.count,) or ids.dtype != torch.int32:
            raise ValueError(f"ids: {ids.dtype} {tuple(ids.shape)}, expected int32 [{table.count}]")
        self.plan, self.store = plan, PublishedStore([table, *view_tables])
        self.transport: Transport = transport or LocalTransport()
        self.options = options or EngineOptions()
        self.policy: GatePolicy = policy or QualityPolicy()
        self.lookahead = 2 * self.options.lookahead + 1  # for announcements: owners run ahead of their rank
        self.is_structural, self._is_fence = is_structural, is_fence
        self.telemetry = Telemetry(self.transport.rank, self.options.trace)
        self.publisher = Publisher([table], self.options.debug)
        self._released = self._recorded = start_step
        self._on_step: Callable[[StepRecord], None] | None = None
        self._exchange = self._shards = ShardExchange(self)
        self.views: ViewRows | None = None
        if view_tables:
            self.views = ViewRows(
                plan, view_tables, self.transport, pose_backward, self._limit, start_step, self.options.debug
            )
        self.owner = Owner(
            plan,
            table,
            ids.to(table.device),
            total,
            self.policy,
            self.publisher,
            self.telemetry,
            projector,
            self.options.lookahead,
            self._limit,
            self._shards.ship,
            start_step,
            self.views,
        )
        self.frontier = cast(Frontier, self.owner)
        self.balance = Balance(self, imbalance, local)
        self.changing = False
        """Rows are being changed by a structural step; no picture can be made."""
        self._service = Service(self.transport, self._take_and_advance, table.device)
        self._open: set[tuple[int, int]] = set()
        self._done: set[tuple[int, int]] = set()
        self.store.start(start_step)
        for each in self.store.tables:
            for name in each.names:
                each.adam_state(name)
        self.transport.report(start_step, Activity.TRAINING)

    @property
    def table(self) -> RowTable:
        """This rank's primitives."""
        return self.store.tables[0]

    @property
    def exchange_of_shards(self) -> ShardExchange:
        """This rank's side of all messages."""
        return self._shards

    @property
    def board(self) -> StatusBoard:
        """What the other ranks are doing."""
        return self._exchange.board

    @property
    def current(self) -> int:
        """The step that this rank works on: its views of all older ones are rendered."""
        return self.owner.current

    @property
    def low(self) -> int:
        """The oldest step that is not published entirely on this rank's rows."""
        return self.owner.low if self.views is None else min(self.owner.low, self.views.low)

    def tasks(self, step: int) -> list[Task]:
        """This rank's tasks of a step, in lane order."""
        mine = [n for n in range(self.plan.views_per_step) if self.plan.rank(step, n) == self.transport.rank]
        return [Task(step, n, v) for n in mine if (v := self.plan.view(step, n)) >= 0]

    def on_step(self, call: Callable[[StepRecord], None]) -> None:
        """Have a function called with the record of every step that is published entirely."""
        self._on_step = call

    def is_fence(self, step: int) -> bool:
        """Whether the state after a step is looked at before anything of the next one is published."""
        last = self.plan.steps is not None and step == self.plan.steps - 1
        return last or self.is_structural(step) or self._is_fence(step) or self._shards.takes_effect(step + 1)

    def _limit(self) -> int:
        """The next fence that this rank has not passed."""
        step, end = self._released, self.owner.low + self.options.lookahead
        while step < end and not self.is_fence(step):
            step += 1
        return step

    def _release(self, step: int) -> None:
        """This rank begins a step: whatever was to be done after the one before is done."""
        if step > self._released:
            self._released = step
            self.owner.changed = True

    # -- hook 1

    def acquire(self, task: Task) -> ViewTask:
        """Wait until every owner's splats of the view are here, and merge them.

        Raises:
            RankFailure: A rank failed or stalled.
            ValueError: The task is not one of the current step's.
        """
        if task.step != self.current or (task.step, task.lane) in self._open | self._done:
            raise ValueError(f"acquire: {task} is out of order; this rank works on step {self.current}")
        self._release(task.step)
        record = self.telemetry.record(task.step)
        self._serve()
        key, everyone, me = (task.step, task.lane), range(self.transport.world_size), self.transport.rank
        hazard = RAW if self.policy.partial else BARRIER
        met = False
        while len(found := self._shards.splats.get(key, {})) < self.transport.world_size:
            if not met:
                met = True
                record.conflicts += 1
            late = tuple(Awaited(task.step, -1 - r) for r in everyone if r not in found and r != me)
            mine = () if me in found else self.owner.awaited(task.step)
            self._await(task.step, Decision(hazard, late + mine))
        while self.views is not None and not self.views.ready(task.view, task.step):
            self._await(task.step, Decision(hazard, self.views.missing(task.step)))
        begin = now()
        projector = self.owner.projector
        merged = MergedView(self._shards.splats.pop(key), projector.view(task.step, task.view), projector.kind)
        own = None if self.views is None else self.views.take(task)
        self._open.add(key)
        end = now()
        record.acquire += end - begin
        record.tasks += 1
        self.telemetry.enter("computing", task.step)
        self._service.start()
        return ViewTask(task, merged, end, own)

    # -- hook 2

    def contribute(self, task: Task, mine: ViewTask, info: Mapping[str, Any] | None = None) -> None:
        """Send what the task's backward pass left in the splats back to their owners.

        info: gsplat's ``meta`` of the view, for the statistics.

        Raises:
            NonFiniteGradient: Some gradient is not finite.
            ValueError: The task was not acquired.
        """
        key = (task.step, task.lane)
        if key not in self._open:
            raise ValueError(f"contribute: {task} was not acquired")
        self._service.stop()
        begin = now()
        record = self.telemetry.record(task.step)
        record.compute += begin - mine.started
        self.telemetry.enter("updating", task.step)
        facts = {"step": task.step, "lane_number": task.lane, "view": task.view}
        self.telemetry.span("task", mine.started, begin, "main", **facts)
        norms = None
        if mine.splats.has_norms:
            norms = norms_of(self.table.statistics, task.step, info, mine.splats.count)
        self._open.discard(key)
        self._done.add(key)
        packets = mine.merged.gradients(task, norms)
        if self.views is not None and mine.view is not None:
            self.views.rendered(mine.view, {rank for rank, packet in packets.items() if packet.count})
            self.owner.changed = True
        me = self.transport.rank
        for rank in sorted(packets, key=lambda r: (r == me, r)):  # the others first: they may be waiting
            if packets[rank].count:
                record.sent += self._shards.send_gradients(rank, packets[rank])
        record.contribute += now() - begin
        self._serve()

    # -- hook 3

    def publish(self, step: int) -> None:
        """Declare that every task of a step of this rank has contributed.

        Raises:
            ValueError: It is not the current step, or tasks of it have not contributed.
        """
        missing = [t for t in self.tasks(step) if (t.step, t.lane) not in self._done]
        if step != self.current or missing or self._open:
            raise ValueError(
                f"publish: step {step} is not the current step {self.current}, or tasks are missing: {missing}"
            )
        self._done.clear()
        self._release(step)
        self.owner.current = step + 1
        self.transport.report(step + 1, Activity.TRAINING)
        self._serve()
        while self.low < step - self.options.lookahead:
            self._await(step, Decision(LOOKAHEAD, self._missing()))

    # -- structural steps and drains

    def drain(self, reason: str = DRAIN) -> None:
        """Wait until every gradient of the steps so far is applied to this rank's rows.

        Raises:
            RankFailure: A rank failed or stalled.
            ValueError: The step just published is no fence.
            RuntimeError: Not every staged row was applied exactly once.
        """
        if self._open or self._done:
            raise ValueError(f"drain: step {self.current} is not published")
        if self.current > self._released and not self.is_fence(self.current - 1):
            raise ValueError(f"drain: step {self.current - 1} is no fence; owners may be beyond it")
        self._serve()
        while self.low < self.current:
            self._await(self.current - 1, Decision(reason, self._missing()))
        ahead, staged, applied = self.owner.waiting_rows(), self.owner.staged_rows, self.publisher.applied_rows
        if staged != applied + ahead:
            raise RuntimeError(
                f"drained at step {self.current} with {staged} rows staged, {applied} applied and {ahead} left"
            )

    def structural(self, step: int, surgery: Callable[[], None], state: MutableMapping[str, Any]) -> None:
        """Drain, change this rank's primitives, and agree with the others on the numbers of all rows. Collective.

        Args:
            step: The step just published, for which `is_structural` holds.
            surgery: Changes the table's parameters, optimizers and `state` as gsplat's strategies do, so that all ranks
                together do what one would do to the whole model (`surgery.ShardStrategy`).
            state: The strategy's state; tensors in it take part in surgery.

        Raises:
            ValueError: The step is not structural.
        """
        if step != self.current - 1 or not self.is_structural(step):
            raise ValueError(f"structural: step {step} is not the step just published, or not structural")
        self.drain(STRUCTURAL)
        begin = now()
        self.changing = True
        change_rows(self, step, surgery, state)
        self.changing = False
        self._exchange.release()
        self.telemetry.structural(step, begin, now())

    def use_policy(self, policy: GatePolicy) -> None:
        """Change the mode between two steps, on all ranks at the same one, a fence. For measurements within one run.

        Raises:
            ValueError: Not drained.
        """
        if self.low != self.current or self.owner.outstanding:
            raise ValueError(f"use_policy: step {self.low} is not published; drain at a fence first")
        self.policy = policy
        self.owner.use_policy(policy)

    # -- work for others

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Messages are taken in while the training thread does something that has nothing to do with them."""
        self._service.start()
        try:
            yield
        finally:
            self._service.stop()

    def _missing(self) -> tuple[Awaited, ...]:
        """Lanes that the steps before this rank's wait for."""
        return self.owner.awaited(self.current) or (() if self.views is None else self.views.missing(self.current))

    def _serve(self) -> None:
        """Take in what has arrived, and do all that may be done with it."""
        self._exchange.poll()
        self._advance()

    def _take_and_advance(self, received: Received) -> None:
        """In the service's thread, while the training thread renders."""
        self._shards.take(received)
        self.owner.advance()

    def _advance(self) -> None:
        self.owner.advance()
        while self._recorded < min(self.low, self.current):  # this rank's views and rows of the step are through
            record = self.telemetry.finish(self._recorded)
            self._recorded += 1
            if record is not None and self._on_step is not None:
                self._on_step(record)

    def _await(self, step: int, decision: Decision) -> None:
        """Block until a message arrives, count the wait, and do all that may be done now."""
        begin, awaited = now(), tuple((a.step, a.lane) for a in decision.awaited)
        self.telemetry.enter("waiting", step, decision.hazard or BARRIER, awaited)
        peer = self._exchange.wait(step, decision)
        self.telemetry.waited(step, decision.hazard or BARRIER, peer, begin, now())
        self.telemetry.enter("updating", step)
        self._advance()
