"""Publication: applying a step's staged update to rows and raising their version.

The gradient of a row is the sum of its contributions in lane order, then the dense terms. A row is stepped by Adam
exactly once per step, with the learning rates of the step being published, whether anyone saw it or not: Adam stays
dense. On the CPU the gradient exists only chunk by chunk, in the cache (`adam_parts`); elsewhere it is accumulated in
a dense tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from odin_nerfstudio.runtime import hazards, rows
from odin_nerfstudio.runtime.adam import OdinAdam, plain_options, publish_rows
from odin_nerfstudio.runtime.adam_parts import AdamTarget, GradientPart, LiveColumns, step_parts, steps_parts
from odin_nerfstudio.runtime.staging import StepStaging
from odin_nerfstudio.runtime.store import DenseTerm, RowTable

_TERM_MULTIPLE = 64
"""Rows of a dense term are padded to a multiple of this, so that torch's kernels see no tail."""

Part = tuple[Tensor, Tensor]


class Publisher:
    """Applies staged steps to the tables of a store."""

    def __init__(self, tables: Sequence[RowTable], debug: bool = False) -> None:
        self.tables = tables
        self.debug = debug
        self.applied_rows = 0
        """Gradient rows applied since the start, over all tables."""
        self.whole_steps = 0
        """Steps published in one go."""
        self.partial_passes = 0
        """Publications of some rows of a step."""
        self._live: dict[tuple[str, str], LiveColumns] = {}

    def whole(self, staged: StepStaging) -> None:
        """Publish a complete step, none of whose rows is published, over rows that are all at its version."""
        for k, table in enumerate(self.tables):
            if self.debug:
                hazards.check_publication(table, staged.step)
            parts = staged.parts(k)
            if all(_takes_parts(table, name) for name in table.names):
                self._step_parts(table, staged.step, parts, None, 0)
                for name in table.names:
                    table.adam_state(name)["step"] += 1
                    # what a scheduler looks at, lest it warn that the optimizer was never stepped
                    setattr(table.optimizers[name], "_opt_called", True)  # noqa: B010
            else:
                self._step_whole(table, staged.step, parts)
            if table.noise is not None:
                table.noise.add(staged.step, None)
            table.versions.fill_(staged.step + 1)
            self.applied_rows += sum(int(ids.shape[0]) for ids, _ in parts)
        staged.started = True
        self.whole_steps += 1

    def some(self, staged: StepStaging, ahead: int) -> int:
        """Publish the rows of a step that are at its version and that no lane is pending on; returns how many.

        ahead: complete steps still to be finished before this one, which Adam's own counters do not include yet.
        """
        assert staged.pending is not None
        published = 0
        for k, table in enumerate(self.tables):
            mask = table.arrays["mask"]
            if not rows.publishable(table.versions, staged.step, staged.pending[k], mask):
                continue
            ids, parts = rows.ids_of_mask(mask), staged.parts(k)
            if all(_takes_parts(table, name) for name in table.names):
                self._step_parts(table, staged.step, parts, ids, ahead)
            else:
                self._step_some(table, staged.step, parts, mask, ahead)
            if table.noise is not None:
                table.noise.add(staged.step, mask)
            rows.fill_at(table.versions, ids, staged.step + 1)
            self.applied_rows += sum(rows.count_inside(mask, touched) for touched, _ in parts)
            published += int(ids.shape[0])
        staged.started = staged.started or published > 0
        self.partial_passes += 1
        return published

    def finish(self, staged: StepStaging) -> None:
        """Count a step that was published in parts in Adam's own counters, as stock Adam does."""
        for table in self.tables:
            for name in table.names:
                table.adam_state(name)["step"] += 1

    def statistics(self, staged: StepStaging) -> None:
        """Apply the densification statistics of a complete step, in lane order."""
        primitives = self.tables[0]
        if primitives.statistics is None or not primitives.statistics.wanted(staged.step):
            return
        for number, lane in enumerate(staged.lanes):
            if lane.statistics is not None:
                primitives.statistics.apply(primitives.count, *lane.statistics)
            elif staged.views[number] >= 0:
                raise RuntimeError(f"step {staged.step} lane {number}: no densification statistics arrived")

    def _step_parts(self, table: RowTable, step: int, parts: Sequence[Part], ids: Tensor | None, ahead: int) -> None:
        """Step all rows, or some (ascending), without a dense gradient."""
        layout = table.layout(step)
        given = {
            name: [GradientPart(ids, values, offset, width) for ids, values in parts]
            for name, offset, width in layout.columns()
        }
        for term in table.dense_terms:
            if term.due(step):
                for name, touched, values in _rows_of_term(table, term, step, ids):
                    given[name].append(GradientPart(touched, values, 0, values.shape[1]))
        rates = table.schedule(step)
        targets = []
        for name in table.names:
            state = table.adam_state(name)
            group = table.optimizers[name].param_groups[0]
            targets.append(
                AdamTarget(
                    table.parameters[name],
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    given[name],
                    step=int(state["step"]) + ahead + 1,
                    lr=rates[name],
                    betas=group["betas"],
                    eps=group["eps"],
                    live=self._live.setdefault((table.name, name), LiveColumns()),
                )
            )
        step_parts(targets, ids, torch.get_num_threads())

    def _step_whole(self, table: RowTable, step: int, parts: Sequence[Part]) -> None:
        """Step all rows with a dense gradient and the user's optimizers."""
        self._accumulate(table, step, parts, None)
        rates = table.schedule(step)
        for name in table.names:
            optimizer, parameter = table.optimizers[name], table.parameters[name]
            group = optimizer.param_groups[0]
            before = group["lr"]
            group["lr"] = rates[name]
            parameter.grad = table.gradient(name)
            optimizer.step()
            parameter.grad = None
            group["lr"] = before
        self._clear(table, step, parts, None)

    def _step_some(self, table: RowTable, step: int, parts: Sequence[Part], mask: Tensor, ahead: int) -> None:
        """Step the rows of a mask with a dense gradient."""
        self._accumulate(table, step, parts, mask)
        rates = table.schedule(step)
        for name in table.names:
            state = table.adam_state(name)
            group = table.optimizers[name].param_groups[0]
            publish_rows(
                table.parameters[name].detach(),
                state["exp_avg"],
                state["exp_avg_sq"],
                table.gradient(name),
                mask,
                step=int(state["step"]) + ahead + 1,
                lr=rates[name],
                betas=group["betas"],
                eps=group["eps"],
            )
        self._clear(table, step, parts, mask)

    def _accumulate(self, table: RowTable, step: int, parts: Iterable[Part], mask: Tensor | None) -> None:
        layout = table.layout(step)
        for ids, values in parts:
            for name, offset, width in layout.columns():
                rows.scatter_add(table.gradient(name), ids, values, offset, width, mask)
        for term in table.dense_terms:
            if term.due(step):
                chosen = None if mask is None else rows.ids_of_mask(mask)
                for name, ids, values in _rows_of_term(table, term, step, chosen):
                    rows.scatter_add(table.gradient(name), ids, values, 0, values.shape[1], None)

    def _clear(self, table: RowTable, step: int, parts: Sequence[Part], mask: Tensor | None) -> None:
        if any(term.due(step) for term in table.dense_terms):
            for name in table.names:  # a dense term may have touched every row
                gradient = table.gradient(name)
                gradient.zero_() if mask is None else gradient.masked_fill_(_like(mask, gradient), 0)
            return
        layout = table.layout(step)
        for ids, _ in parts:
            for name, _, width in layout.columns():
                rows.clear(table.gradient(name), ids, width, mask)


def _takes_parts(table: RowTable, name: str) -> bool:
    """Whether a parameter and its Adam are what `step_parts` steps; hooks and subclasses of Adam want the real step."""
    optimizer, state = table.optimizers[name], table.adam_state(name)
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    group = optimizer.param_groups[0]
    return (
        type(optimizer) in (OdinAdam, torch.optim.Adam)
        and not hooked
        and plain_options(group)
        and steps_parts(table.parameters[name], state["exp_avg"], state["exp_avg_sq"], betas=group["betas"])
    )


def _rows_of_term(
    table: RowTable, term: DenseTerm, step: int, ids: Tensor | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The gradient of a dense term on all rows, or some: name, ids [n] int32, rows [n, C]."""
    if ids is None:
        ids = torch.arange(table.count, dtype=torch.int32, device=table.device)
    n = int(ids.shape[0])
    padded = -(-n // _TERM_MULTIPLE) * _TERM_MULTIPLE
    values = {}
    for name in term.needs or table.parameters:
        parameter = table.parameters[name]
        values[name] = torch.zeros((padded, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        rows.gather(parameter, ids, values[name])
    for name, gradient in term.gradient(step, table.count, values).items():
        yield name, ids, rows.flat(gradient.contiguous())[:n]


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    return (mask != 0).view(-1, *[1] * (tensor.dim() - 1))
