"""The engine: a replica's side of primitive-level synchronization. Its hooks are all that a trainer sees of Odin.

Public API, in the order of use::

    transport = GlooTransport(FaultLimits(stall=120))      # after init_process_group; LocalTransport() for one rank
    table = RowTable("gaussians", model.gauss_params, {name: adam}, reads=VisibilityReads(...),
                     schedule=lambda step: {name: lr}, padding=lambda view: {name: row}, multiple=64,
                     active_columns=lambda step: {"features_rest": 3 * bands}, dense_terms=[DenseTerm(...)],
                     statistics=DensificationStatistics(strategy_state, absgrad=True))
    cameras = RowTable("cameras", {"pose": p}, {"pose": adam}, ViewRow(), schedule, defer=False)
    engine = Engine(plan, [table, cameras], transport, QualityPolicy(), EngineOptions(lookahead=2, seed=42),
                    is_structural=strategy_acts_at, start_step=first)
    for step in range(first, last):
        for word in engine.due(step): ...                  # announced words ("stop", "pause"), at one step on all ranks
        for task in engine.tasks(step):                    # this rank's lanes: task.step, task.lane, task.view
            shadow = engine.acquire(task)                  # hook 1: waits for what the task reads
            mine = shadow["gaussians"]                     # .leaves {name: leaf [n_padded, ...]}, .ids [n], .count = n
            ...                                            # forward, backward on these and shadow["cameras"].leaves
            engine.contribute(task, shadow, info)          # hook 2: gradients and gsplat's meta leave for the peers
        engine.publish(step)                               # hook 3: updates become visible, as soon as they may
        if strategy_acts_at(step):                         # surgery() changes parameters, optimizers and state
            engine.structural(step, surgery, strategy_state)
        if due_for_checkpoint_or_evaluation:
            with engine.busy():                            # peers wait without limit for a rank that is busy on purpose
                engine.drain()                             # now the state is parameters, Adam, statistics and the step
    engine.drain(); totals = engine.collect(); engine.close()

`plan` is a `frontier.TaskPlan`. On an exception call ``engine.abort(error)``: the peers end within seconds with a
`RankFailure` that names this rank. Losses are scaled by the caller (``/ lanes`` to equal gradient accumulation).
``engine.announce("stop")`` may be called on any rank between hooks; ``due`` returns the word at the same step on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from odin_nerfstudio.runtime import contributions, hazards, rows
from odin_nerfstudio.runtime.drains import Drains
from odin_nerfstudio.runtime.engine_options import EngineOptions
from odin_nerfstudio.runtime.exchange import Exchange
from odin_nerfstudio.runtime.frontier import Frontier, TaskPlan
from odin_nerfstudio.runtime.gate import LOOKAHEAD, Decision, Gate, GatePolicy, QualityPolicy
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.recorder import Recorder
from odin_nerfstudio.runtime.reduction import Traffic
from odin_nerfstudio.runtime.row_watch import RowWatch
from odin_nerfstudio.runtime.shadow import Shadow, ShadowPool, Task
from odin_nerfstudio.runtime.store import PublishedStore, RowTable
from odin_nerfstudio.runtime.telemetry import StepRecord, Telemetry, now
from odin_nerfstudio.runtime.transport import Activity, LocalTransport, Transport


class Engine(Drains):
    """Drives the replica of this rank; see the module's text."""

    def __init__(
        self,
        plan: TaskPlan,
        tables: Sequence[RowTable],
        transport: Transport | None = None,
        policy: GatePolicy | None = None,
        options: EngineOptions | None = None,
        is_structural: Callable[[int], bool] = lambda step: False,
        start_step: int = 0,
    ) -> None:
        if not 1 <= plan.views_per_step <= 255:
            raise ValueError(f"views per step: {plan.views_per_step} lanes are not within 1 to 255")
        self.plan = plan
        self.store = PublishedStore(tables)
        self.transport: Transport = transport or LocalTransport()
        self.policy: GatePolicy = policy or QualityPolicy()
        self.options = options or EngineOptions()
        self.lookahead = self.options.lookahead
        self.is_structural = is_structural
        self.telemetry = Telemetry(self.transport.rank, self.options.trace)
        self.publisher = Publisher(tables, self.options.debug)
        self.frontier = Frontier(
            plan,
            tables,
            self.policy,
            self.publisher,
            self.telemetry,
            self.transport.rank,
            self.transport.world_size,
            start_step,
        )
        self.on_read: Callable[[Task, Sequence[Tensor], Decision], None] | None = None
        """Called before every read, with the rows of each table; their versions are those that will be read."""
        self.row_watch = self.frontier.row_watch = RowWatch(tables[0])
        self._pools = {t.name: ShadowPool(t) for t in tables}
        self._surgery_done = start_step - 1
        self.recorder: Recorder | None = None
        """Notes what tasks read, wrote and took; None: nothing is recorded."""
        self._open: set[tuple[int, int]] = set()
        self._done: set[tuple[int, int]] = set()
        self._exchange = Exchange(self)
        self.frontier.on_retire = self._exchange.reducer.forget
        self.frontier.linger(self.options.linger)
        several = self.transport.world_size > 1
        self.frontier.reduced = several and self.options.reduce == "always"
        if self.transport.world_size > 2 and self.options.reduce == "auto" and not self.policy.max_delay:
            self.frontier.traffic = Traffic(self.transport.world_size)
        self.store.start(start_step)
        for table in tables:
            for name in table.names:
                table.adam_state(name)
        self.transport.follow(plan, start_step)
        self.transport.report(start_step, Activity.TRAINING)

    @property
    def current(self) -> int:
        """The step that this rank works on: it has contributed to all older ones."""
        return self.frontier.current

    @property
    def low(self) -> int:
        """The oldest step that is not published entirely."""
        return self.frontier.low

    def tasks(self, step: int) -> list[Task]:
        """This rank's tasks of a step, in lane order."""
        mine = [n for n in range(self.plan.views_per_step) if self.plan.rank(step, n) == self.transport.rank]
        return [Task(step, n, v) for n in mine if (v := self.plan.view(step, n)) >= 0]

    @property
    def lingers(self) -> bool:
        """Whether tasks of this rank wait for whole steps at the moment, because that is faster (`patience`)."""
        patience = self.frontier.patience
        return self.policy.partial and self.transport.world_size > 1 and patience.waits() and (patience.price or 0) > 0

    def on_step(self, call: Callable[[StepRecord], None]) -> None:
        """Have a function called with the record of every step that is published entirely."""
        self.frontier.on_step = call

    # -- hook 1

    def acquire(self, task: Task) -> Shadow:
        """Wait until the task may start, and hand out its copy of the rows that it can read.

        Raises:
            RankFailure: A rank failed or stalled.
            ValueError: The task is not one of the current step's.
        """
        if task.step != self.frontier.current or (task.step, task.lane) in self._open | self._done:
            raise ValueError(f"acquire: {task} is out of order; this rank works on step {self.frontier.current}")
        begin = now()
        record, timeline = self.telemetry.record(task.step), self.telemetry.timeline
        timeline.begin(begin)
        self.row_watch.begin()
        waited = record.waited + record.publish
        self.frontier.patience.begin(task.step, begin)
        self._exchange.poll()
        self.frontier.publish_ready(task.step)
        ids = [self._read_ids(table, task) for table in self.tables]
        gate = Gate(
            task.step,
            task.view,
            ids,
            self.tables,
            self.frontier.outstanding,
            self.frontier.track,
            self.lookahead,
        )
        reads, inside, met, refused = now(), timeline.inside(), False, None
        if self.policy.partial:
            self._linger(task.step)
        while not (decision := self.policy.decide(gate)).open:
            if self.policy.partial:
                self.frontier.publish_some(task.step)
            if not met and decision.rows:
                met = True
                record.conflicts += 1
                record.conflict_rows += decision.rows
                refused = self.row_watch.behind(ids[0], task.step) if self.row_watch.active else None
            self._await(task.step, decision)
            self.frontier.publish_ready(task.step)
        if self.policy.partial and self.frontier.low < task.step:
            self.frontier.publish_some(task.step)
        if self.row_watch.active:
            self.row_watch.read(ids[0], task.step, refused)
        opened = now()
        timeline.spend("gating" if self.policy.partial else "after", opened - reads - (timeline.inside() - inside))
        if self.policy.partial:
            for k, (table, read) in enumerate(zip(self.tables, ids)):
                hazards.check_read(table, read, task.step, 0 if k else self.policy.max_delay)
            if self.policy.max_delay:
                admitted = decision.delayed.rows if decision.delayed is not None else 0
                hazards.check_delayed(self.tables[0], ids[0], task.step, admitted)
        if decision.delayed is not None:
            record.delayed.append(decision.delayed)
        if self.on_read is not None:
            self.on_read(task, ids, decision)
        step = None if self.options.debug else task.step  # debug mode looks for gradients in inactive columns
        copies = {t.name: self._pools[t.name].take(i, task.view, step) for t, i in zip(self.tables, ids)}
        shadow = Shadow(task, copies)
        if self.options.debug:
            for table in self.tables:
                hazards.check_shadow(table, shadow[table.name].leaves)
        shadow.delayed = decision.delayed
        self._open.add((task.step, task.lane))
        end = now()
        record.acquire += end - begin - (record.waited + record.publish - waited)
        record.candidate_rows += int(ids[0].shape[0])
        record.tasks += 1
        shadow.started = end
        timeline.spend("after", end - opened)
        self.telemetry.enter("computing", task.step)
        return shadow

    def _read_ids(self, table: RowTable, task: Task) -> Tensor:
        """Rows that a task of this rank can read; it is this very copy that it reads, by then perhaps newer."""
        mask = table.arrays["mask"]
        table.reads.mark(task.step, task.view, table.versions, 0, mask)
        return rows.ids_of_mask(mask)

    # -- hook 2

    def contribute(self, task: Task, shadow: Shadow, info: Mapping[str, Any] | None = None) -> None:
        """Stage what the task's backward pass left in the shadow's leaves, and send it to the peers.

        info: gsplat's ``meta`` of the view, for the statistics of the first table.

        Raises:
            NonFiniteGradient: The gradient has rows that are not finite; nothing was sent.
            ValueError: The task was not acquired.
        """
        if (task.step, task.lane) not in self._open:
            raise ValueError(f"contribute: {task} was not acquired")
        begin = now()
        record, timeline = self.telemetry.record(task.step), self.telemetry.timeline
        record.compute += begin - shadow.started
        self.telemetry.enter("updating", task.step)
        facts: dict[str, int | float] = {"step": task.step, "lane_number": task.lane, "view": task.view}
        if (late := shadow.delayed) is not None:
            facts |= {"delayed_rows": late.rows, "delay": late.delay, "delayed_mass": late.mass}
        self.telemetry.span("task", shadow.started, begin, "main", **facts)
        first = self._read_next(task.step)
        foreseen = now()
        message = contributions.collect(task, shadow, self.tables, first, info, self.options.debug)
        sent = self._exchange.contribute(message, self.frontier.reduced)
        record.sent += sent
        record.active_rows += int(message.tables[0].ids.shape[0])
        record.deferred_rows += message.deferred
        for table in self.tables:
            self._pools[table.name].give_back(shadow[table.name])
        self._open.discard((task.step, task.lane))
        self._done.add((task.step, task.lane))
        end = now()
        record.contribute += end - begin
        timeline.spend("gating", foreseen - begin)
        timeline.spend("after", end - foreseen + begin - shadow.started)
        timeline.task(task.step, task.lane, end)
        self.telemetry.span("contribute", begin, end, step=task.step)
        if self.recorder is not None:
            self.recorder.task(task, shadow, message, sent, begin - shadow.started)
            timeline.spend("paused", now() - end)

    def _read_next(self, step: int) -> Sequence[Tensor] | None:
        """Per table the rows that other ranks' tasks of the next step may read, to be sent first; None: send all at
        once."""
        following, end = step + 1, self.plan.steps
        alone = self.transport.world_size == 1 or not self.policy.partial or self.frontier.reduced
        if alone or self.is_structural(step) or (end is not None and following >= end):
            return None
        if self.frontier.patience.waits(1):
            return None  # peers probably wait for the whole, too
        return self.frontier.read_by_others(following)

    # -- hook 3

    def publish(self, step: int) -> None:
        """Declare that every task of a step has contributed, and publish what may be published.

        Raises:
            ValueError: It is not the current step, or tasks of it have not contributed.
        """
        missing = [t for t in self.tasks(step) if (t.step, t.lane) not in self._done]
        if step != self.frontier.current or missing or self._open:
            raise ValueError(
                f"publish: step {step} is not the current step {self.frontier.current}, or tasks are missing: {missing}"
            )
        self._done.clear()
        self.frontier.current = step + 1
        self.transport.report(self.frontier.current, Activity.TRAINING)
        if not self.tasks(step):
            self._exchange.send_progress(step)
            self.frontier.staging(step).settle(self.transport.rank)
            while self.frontier.low < step - self.lookahead:
                self._await(step, Decision(LOOKAHEAD, self.frontier.missing()))
                self.frontier.publish_ready(step)
        self._exchange.poll()
        self.frontier.publish_ready(step)
