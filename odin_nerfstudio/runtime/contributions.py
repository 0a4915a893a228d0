"""From the gradients of a shadow's leaves to a contribution: active rows, their order, finiteness, statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.runtime import rows
from odin_nerfstudio.runtime.faults import NonFiniteGradient
from odin_nerfstudio.runtime.messages import Contribution, Section
from odin_nerfstudio.runtime.shadow import Shadow, TableShadow, Task
from odin_nerfstudio.runtime.store import RowTable

_NAMED_ROWS = 8


def collect(
    task: Task,
    shadow: Shadow,
    tables: Sequence[RowTable],
    first: Sequence[Tensor] | None,
    info: Mapping[str, Any] | None,
    debug: bool = False,
) -> Contribution:
    """The contribution of a task whose backward pass is done.

    Args:
        first: Per table the rows to send in message 1. [N] uint8. None: all, and nothing is deferred.
        info: gsplat's ``meta``; needed where the first table keeps statistics.
        debug: Check that no gradient hides in columns that are not sent.

    Raises:
        NonFiniteGradient: Rows are not finite.
        ValueError: A gradient has values in columns declared inactive, or info is missing.
    """
    sections = []
    for k, table in enumerate(tables):
        mask = None if first is None else first[k]
        sections.append(_section(task, table, shadow[table.name], mask, debug))
    statistics = None
    keeper = tables[0].statistics
    if keeper is not None and keeper.wanted(task.step):
        if info is None:
            raise ValueError(f"contribute: info of view {task.view} is needed for the densification statistics")
        mine = shadow[tables[0].name]
        visible, norms, radii = keeper.collect(info, mine.count)
        statistics = (mine.ids[visible], norms.contiguous(), radii.contiguous())
    return Contribution(task.step, task.lane, sections, statistics)


def _section(task: Task, table: RowTable, shadow: TableShadow, first: Tensor | None, debug: bool) -> Section:
    layout = table.layout(task.step)
    gradients = {name: leaf.grad.contiguous() for name, leaf in shadow.leaves.items() if leaf.grad is not None}
    if debug:
        for name, _, width in layout.columns():
            if name in gradients and rows.any_beyond(gradients[name], width, shadow.count):
                raise ValueError(
                    f"table {table.name}: {name} has a gradient in columns declared inactive at step {task.step}"
                )
    ordered = [gradients.get(name) for name in layout.names]
    ids, front, values, bad = rows.pack_active(ordered, layout.widths, shadow.ids, first)
    if bad:
        _refuse(task, table, shadow, {name: gradients[name] for name in layout.names if name in gradients})
    return Section(ids, front, values[:front], values[front:], table.count)


def _refuse(task: Task, table: RowTable, shadow: TableShadow, gradients: Mapping[str, Tensor]) -> None:
    layout = table.layout(task.step)
    flags = torch.zeros(shadow.count, dtype=torch.uint8, device=table.device)
    for name, _, width in layout.columns():
        if name in gradients:
            rows.flag_rows(gradients[name], width, flags)
    bad = (flags >= 2).nonzero().flatten()
    ids = shadow.ids[bad].tolist()
    names = [n for n, g in gradients.items() if not bool(torch.isfinite(rows.flat(g)[: shadow.count][bad]).all())]
    shown = ", ".join(str(i) for i in ids[:_NAMED_ROWS]) + (", ..." if len(ids) > _NAMED_ROWS else "")
    raise NonFiniteGradient(
        f"step {task.step}: view {task.view} gave gradients that are not finite in {len(ids)} rows of table"
        f" {table.name} (rows {shown}; {', '.join(names)}). Nothing was applied. Look at these primitives and at the"
        " view's image and camera; a lower learning rate or a stricter prune often helps"
    )
