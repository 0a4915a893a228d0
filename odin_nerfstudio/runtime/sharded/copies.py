"""Rows that become copies of rows of any owner, with the bits of one model: relocation and growth.

A copy belongs to the owner of what it is a copy of, so parameters never travel. A row that is relocated thus changes
hands; what it keeps of its own, Adam's moments, goes with it. Who owns a row, ranks find out from what each of them
says of its own.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odin_nerfstudio.runtime.sharded.numbering import PLACES

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.sharded.engine import ShardedEngine

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardRows:
    """This rank's rows during one structural step. Rows are named by their places in the whole model, on its device."""

    def __init__(self, engine: ShardedEngine, state: MutableMapping[str, Any]) -> None:
        """state: The strategy's; its tensors are one value per row."""
        self._engine, self._state, self.table = engine, state, engine.table
        self.ids, self.total = engine.owner.ids, engine.owner.total
        """Places of this rank's rows, ascending [n] int32, and rows of the whole model."""

    def mine(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some rows are this rank's. rows [m] int64 -> indices into `rows` and into the table, [k] each."""
        if not len(self.ids):
            return rows[:0], rows[:0]
        at = torch.searchsorted(self.ids, rows.to(self.ids.dtype)).clamp(max=len(self.ids) - 1)
        found = (self.ids[at] == rows).nonzero().flatten()
        return found, at[found]

    def relocate(self, targets: Tensor, sources: Tensor) -> None:
        """Make rows copies of others, whose moments become zero. Collective.

        Args:
            targets: Ascending, no sources. [m] int64. sources: [m] int64.
        """
        table, me = self.table, self._engine.transport.rank
        owner = self._owners(sources)
        leaving, at = self.mine(targets)
        names = [(name, key) for name in table.names for key in MOMENTS]
        moments = [table.adam_state(name)[key] for name, key in names]
        came = self._engine.balance.moves.exchange(owner[leaving], [self.ids[at], *(m[at] for m in moments)])
        _, held = self.mine(sources)
        stays = torch.ones_like(self.ids, dtype=torch.bool)
        stays[at] = False
        stay, coming = stays.nonzero().flatten(), owner == me
        for moment in moments:
            moment[held] = 0
        ids = torch.cat((self.ids[stay], targets[coming].to(self.ids.dtype)))
        order = torch.argsort(ids)
        arrived = torch.argsort(torch.cat(came[0]))  # the order of `targets`
        for (name, key), moment, parts in zip(names, moments, came[1:]):
            table.adam_state(name)[key] = torch.cat((moment[stay], torch.cat(parts)[arrived]))[order]
            parts.clear()
        self._follow(torch.cat((stay, held))[order], ids[order], self.total)

    def append(self, sources: Tensor) -> None:
        """Add copies of rows at the end of the model, with moments of zero. sources [m] int64."""
        added, held = self.mine(sources)
        for name in self.table.names:
            adam = self.table.adam_state(name)
            for key in MOMENTS:
                adam[key] = torch.cat((adam[key], adam[key].new_zeros((len(held), *adam[key].shape[1:]))))
        ids = torch.cat((self.ids, (self.total + added).to(self.ids.dtype)))
        kept = torch.arange(len(self.ids), device=held.device)
        self._follow(torch.cat((kept, held)), ids, self.total + len(sources))

    def _follow(self, parents: Tensor, ids: Tensor, total: int) -> None:
        """Every row takes the parameters and the strategy's state of a row of this rank. parents [n_new] int64."""
        for parameter in self.table.parameters.values():
            parameter.data = parameter.data[parents]
        for name, value in self._state.items():
            if isinstance(value, Tensor):
                self._state[name] = value[parents]
        self.ids, self.total = ids, total
        self._state[PLACES] = (ids, total)

    def _owners(self, rows: Tensor) -> Tensor:
        """Ranks that own rows. Collective. [m] int64 -> [m] int64."""
        marks = torch.zeros(-(-len(rows) // 4) * 4, dtype=torch.int16)
        marks[self.mine(rows)[0].cpu()] = self._engine.transport.rank + 1
        found = self._engine.exchange_of_shards.union(marks.view(torch.int64))
        return found.view(torch.int16)[: len(rows)].to(rows.device).long() - 1
