"""Shadows: a task's own compact copy of the rows that it can read, as leaf tensors.

Publishing under a running task is safe because the task reads its copy (no WAR hazard). Leaves are contiguous and
padded to a multiple of 64 rows with dummies that the view's camera cannot see, because torch's elementwise kernels
treat the tail of a tensor differently, which would let the size of the candidate set show in the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from odin_nerfstudio.runtime import rows
from odin_nerfstudio.runtime.gate import DelayedRead
from odin_nerfstudio.runtime.store import RowTable


@dataclass(frozen=True)
class Task:
    """One view, rendered forward and backward once."""

    step: int
    lane: int
    view: int


@dataclass(eq=False)
class TableShadow:
    """The rows of one table that a task reads."""

    ids: Tensor
    """Rows of the table, ascending. [n] int32."""
    leaves: dict[str, Tensor]
    """Parameters: leaf tensors of at least n rows, the first n copied from the table, the others padding. A leaf
    can end before columns that are inactive at the task's step ([n, bands, 3])."""
    index: int
    """Number of the reused buffer behind the leaves."""

    @property
    def count(self) -> int:
        """Rows that are no padding, n."""
        return int(self.ids.shape[0])


@dataclass(eq=False)
class Shadow:
    """What a task reads, by table."""

    task: Task
    tables: dict[str, TableShadow]
    started: float = 0.0
    """Time at which the task could start (monotonic clock, seconds)."""
    delayed: DelayedRead | None = None
    """What of it is read late; None: nothing."""

    def __getitem__(self, table: str) -> TableShadow:
        return self.tables[table]


class ShadowPool:
    """Makes a table's shadows in buffers that are reused from task to task."""

    def __init__(self, table: RowTable) -> None:
        self.table = table
        self._buffers: list[dict[str, Tensor]] = []
        self._free: list[int] = []

    def take(self, ids: Tensor, view: int, step: int | None = None) -> TableShadow:
        """Copy rows `ids` ([n] int32) of the table as a task of `view` sees them.

        step: Leave out the columns that are inactive at this step. None: all columns.
        """
        table = self.table
        if not self._free:
            self._free.append(len(self._buffers))
            self._buffers.append({})
        index = self._free.pop()
        n = int(ids.shape[0])
        padded = max(-(-n // table.multiple), 1 if table.multiple > 1 else 0) * table.multiple
        filler: Mapping[str, Tensor] = table.padding(view) if table.padding is not None and padded > n else {}
        active = table.active_columns(step) if table.active_columns and step is not None else {}
        leaves = {}
        for name, parameter in table.parameters.items():
            shape = _active_shape(parameter, active.get(name))
            leaf = self._buffer(index, name, parameter, (padded, *shape))
            rows.gather(parameter, ids, leaf)
            if padded > n:
                leaf[n:] = (filler[name][: shape[0]] if shape else filler[name]).to(leaf.device)
            leaves[name] = leaf.requires_grad_(name in table.optimizers)
        return TableShadow(ids, leaves, index)

    def _buffer(self, index: int, name: str, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = shape[0]
        held = self._buffers[index].get(name)
        if held is None or held.shape[0] < count or held.shape[1:] != shape[1:]:
            held = torch.empty((int(count * 1.2) + 1, *shape[1:]), dtype=parameter.dtype, device=parameter.device)
            self._buffers[index][name] = held
        return held[:count].detach()

    def give_back(self, shadow: TableShadow) -> None:
        """Let the buffers behind a shadow be reused."""
        self._free.append(shadow.index)


def _active_shape(parameter: Tensor, columns: int | None) -> tuple[int, ...]:
    """Shape of a row of which only so many leading columns of its flattened form are active (None: all), if these make
    up whole entries of its first dimension; else all of it."""
    shape = tuple(parameter.shape[1:])
    inner = math.prod(shape[1:])
    if columns is None or not shape or inner == 0 or columns % inner or columns // inner >= shape[0]:
        return shape
    return (columns // inner, *shape[1:])
