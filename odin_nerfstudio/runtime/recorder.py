"""The recorder: what an engine notes of its tasks while it trains, for a `recording.Recording`.

Attach with ``Recorder(engine)``; take the part of each rank with ``part`` at the end, and join the parts with
`recording.merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import messages, rows
from odin_nerfstudio.runtime.messages import Contribution, Section
from odin_nerfstudio.runtime.recording import (
    Overheads,
    Recording,
    ViewSets,
    mean_without_pauses,
    seconds_between,
)
from odin_nerfstudio.runtime.shadow import Shadow, Task
from odin_nerfstudio.runtime.store import RowLayout, RowTable
from odin_nerfstudio.runtime.telemetry import StepRecord, now

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.engine import Engine

MASS_NAMES = ("opacities", "features_dc")
"""Parameters whose gradients are the mass: what says that a row matters to a view, at the least cost."""
_REPEATS = 5
_AHEAD = 1000
"""Steps after the last in which structural steps are counted."""


def gradient_mass(section: Section, layout: RowLayout, names: Sequence[str] = MASS_NAMES) -> tuple[Tensor, Tensor]:
    """Share of a contribution's gradient (L1 over the named columns) that falls on each row.

    Args:
        section: The contribution to the first table.
        layout: Its columns.
        names: Parameters that count; those without a column are left out, and all columns count if none is left.

    Returns:
        Rows, ascending [m] int32; shares that sum to 1 (equal ones if the gradient is zero) [m] float32.
    """
    values = torch.cat((section.first_rows, section.rest_rows))
    spans = [(offset, width) for name, offset, width in layout.columns() if name in names and width]
    spans = spans or [(0, layout.total)]
    size = torch.zeros(values.shape[0], dtype=torch.float64, device=values.device)
    for offset, width in spans:
        size += values[:, offset : offset + width].abs().sum(1, dtype=torch.float64)
    total = float(size.sum())
    share = size / total if total > 0 else torch.full_like(size, 1.0 / max(1, size.shape[0]))
    order = torch.argsort(section.ids)
    return section.ids[order], share[order].float()


def sets_of(candidates: Tensor, message: Contribution, layout: RowLayout) -> ViewSets:
    """The sets of a task. candidates: rows of its shadow, ascending [n] int32; layout: of the first table."""
    ids, mass = gradient_mass(message.tables[0], layout)
    visible = int(message.statistics[0].shape[0]) if message.statistics is not None else 0
    return ViewSets(
        candidates.cpu().numpy().astype(np.int32),
        ids.cpu().numpy().astype(np.int32),
        np.ones(ids.shape[0], np.int32),
        mass.cpu().numpy(),
        visible,
    )


class Recorder:
    """Notes this rank's tasks, steps and sets. What `Engine.on_step` was given before is called as before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sets: dict[int, ViewSets] = {}
        """By view, of its last visit, in today's rows."""
        self.tasks: list[tuple[float, ...]] = []
        self.steps: list[tuple[float, ...]] = []
        self._structural = 0
        self._spent = 0.0
        self._structural_before = engine.telemetry.totals["structural"]
        engine.recorder = self
        before = engine.frontier.on_step

        def on_step(record: StepRecord) -> None:
            if before is not None:
                before(record)
            self.step(record)

        engine.on_step(on_step)

    def task(self, task: Task, shadow: Shadow, message: Contribution, sent: int, seconds: float) -> None:
        """Note a task that has contributed. sent: bytes to all peers; seconds: render and backward pass."""
        entered = now()
        table = self._engine.tables[0]
        sets = sets_of(shadow[table.name].ids, message, table.layout(task.step))
        self.sets[task.view] = sets
        self.tasks.append(
            (task.step, task.lane, task.view, self._engine.transport.rank, len(sets.candidates), len(sets.active),
             sets.visible, sent, table.count, seconds, entered - self._spent)
        )  # fmt: skip
        self._spent += now() - entered

    def step(self, record: StepRecord) -> None:
        """Note the record of a published step."""
        self.steps.append(
            (record.step, self._engine.transport.rank, record.tasks, record.acquire, record.contribute, record.publish,
             record.waited, record.received)
        )  # fmt: skip

    def resized(self, parents: Tensor) -> None:
        """Carry the sets through a structural step. parents: old row of each new row. [N] int64"""
        self._structural += 1
        origin = parents.cpu().numpy()
        if not len(origin):
            self.sets.clear()
            return
        before = int(origin.max()) + 1
        children = np.bincount(origin)
        for view, sets in self.sets.items():
            size = max([before, *(int(ids[-1]) + 1 for ids in (sets.candidates, sets.active) if len(ids))])
            candidate, active = np.zeros(size, bool), np.zeros(size, bool)
            candidate[sets.candidates] = active[sets.active] = True
            mass = np.zeros(size)
            mass[sets.active] = sets.mass
            mass[:before] /= np.maximum(children, 1)
            ids = np.flatnonzero(active[origin]).astype(np.int32)
            share = mass[origin[ids]]
            self.sets[view] = ViewSets(
                np.flatnonzero(candidate[origin]).astype(np.int32), ids, np.ones(len(ids), np.int32),
                (share / max(share.sum(), 1e-30)).astype(np.float32), sets.visible,
            )  # fmt: skip

    def part(self) -> Recording:
        """This rank's recording. Its rows are primitives."""
        engine = self._engine
        table, step = engine.tables[0], max(0, engine.current - 1)
        due = [s for s in range(step, step + _AHEAD) if engine.is_structural(s)]
        spent = engine.telemetry.totals["structural"] - self._structural_before
        views = getattr(engine.plan, "views", None) or 1 + max(self.sets, default=0)
        tasks = np.array(self.tasks, np.float64).reshape(len(self.tasks), 11)
        return Recording(
            primitives=table.count,
            row_sizes=np.ones(table.count, np.int32),
            columns=table.layout(step).total,
            views=int(views),
            sets=dict(self.sets),
            tasks=tasks,
            steps=np.array(self.steps, np.float64).reshape(len(self.steps), 8),
            overheads=self._overheads(table, step, spent / max(1, self._structural), tasks),
            structural_every=(due[-1] - due[0]) // (len(due) - 1) if len(due) > 1 else 0,
            statistics=table.statistics is not None and table.statistics.wanted(step),
            ranks=engine.transport.world_size,
            views_per_step=engine.plan.views_per_step,
            text={"mode": engine.policy.name, "how": "training run"},
        )

    def _overheads(self, table: RowTable, step: int, structural: float, tasks: np.ndarray) -> Overheads:
        """From the last steps' records, and measurements of their own, none of which changes anything."""
        engine = self._engine
        view = next(iter(self.sets), 0)
        mask = table.arrays["mask"]
        mark = _seconds(lambda: table.reads.mark(step, view, table.versions, 0, mask), table.device)
        steps = iter(range(step + 2, step + 100))
        first = _seconds(lambda: table.reads.mark(next(steps), view, table.versions, 0, mask), table.device)
        bound = max(0.0, first - mark)
        pending = torch.zeros_like(mask)
        table.reads.mark(step, view, table.versions, 0, mask)
        defer = self._defer(table, step, rows.ids_of_mask(mask))
        scan = _seconds(lambda: rows.publishable(table.versions, -1, pending, mask), table.device)
        recent = np.array(self.steps[-100:], np.float64).reshape(-1, 8)
        per_task = np.maximum(recent[:, 2], 1)
        acquire, contribute, publish = (
            mean_without_pauses(column) if len(recent) else 0.0
            for column in (recent[:, 3] / per_task, recent[:, 4] / per_task, recent[:, 5])
        )
        others = 0
        if engine.policy.partial and engine.transport.world_size > 1:
            others = engine.plan.views_per_step - round(float(np.median(per_task)) if len(recent) else 1)
        return Overheads(
            mark=mark,
            bound=bound,
            acquire=max(0.0, acquire - mark - bound),
            contribute=max(0.0, contribute - (others * mark + bound + defer if others else 0.0)),
            publish=publish,
            scan=scan,
            sweep=self._sweep(table, step),
            defer=defer,
            structural=structural,
            between=seconds_between(tasks[-100:], recent),
            react=engine.telemetry.timeline.reaction,
        )

    def _sweep(self, table: RowTable, step: int) -> float:
        """Publishing next to nothing the way in which some rows are published. [s]"""
        publisher, nothing = self._engine.publisher, torch.zeros_like(table.arrays["mask"])
        if table.device.type == "cpu":
            ids = rows.ids_of_mask(nothing)
            return _seconds(lambda: publisher._step_parts(table, step, [], ids, 0), table.device)
        return _seconds(lambda: publisher._step_some(table, step, [], nothing, 0), table.device)

    def _defer(self, table: RowTable, step: int, ids: Tensor) -> float:
        """Packing and encoding the gradients of some rows as two messages rather than one. [s]"""
        layout = table.layout(step)
        gradients = [torch.ones(ids.shape[0], width, device=table.device) for width in layout.widths]
        half = (torch.arange(table.count, device=table.device) % 2).to(torch.uint8)

        def pack(first: Tensor | None) -> None:
            packed, front, values, _ = rows.pack_active(gradients, layout.widths, ids, first)
            section = Section(packed, front, values[:front], values[front:], table.count)
            message = Contribution(step, 0, [section], None)
            messages.encode(message, first=True, rest=first is None)
            if first is not None:
                messages.encode(message, first=False, rest=True)

        return max(0.0, _seconds(lambda: pack(half), table.device) - _seconds(lambda: pack(None), table.device))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(_REPEATS):
        begin = now()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(now() - begin)
    return float(np.median(times))
