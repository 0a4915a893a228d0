"""Rows change hands when shards have grown unevenly, with their moments and statistics.

All ranks look at the same sample of positions and come to the same planes, so nobody decides for the others. The order
of the rows in the whole model, and with it the result, does not depend on who owns them.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.planning.shards import assign, divide, imbalance, parts_for
from odin_nerfstudio.runtime.evidence import EvidenceStore
from odin_nerfstudio.runtime.sharded.moves import RowMoves
from odin_nerfstudio.runtime.store import RowTable

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.sharded.engine import ShardedEngine

SAMPLE = 4096
"""Most positions that a rank shows to the others."""


class Balance:
    """Keeps the shards of all ranks about equal. Make it right after the engine, on every rank."""

    def __init__(self, engine: ShardedEngine, limit: float, local: bool = False) -> None:
        """
        Args:
            limit: By how much the largest shard may exceed the mean.
            local: See `planning.shards.parts_for`.
        """
        self._engine, self.limit, self._local = engine, limit, local
        self.moves = RowMoves(engine)

    def keep(self, state: MutableMapping[str, Any], version: int) -> bool:
        """Move rows if the shards are too uneven; whether it was so. Collective, at a drain.

        state: The strategy's. version: Version of all rows.
        """
        engine, owner = self._engine, self._engine.owner
        ranks = engine.transport.world_size
        counts = [int.from_bytes(c, "little") for c in engine.exchange(engine.table.count.to_bytes(8, "little"))]
        if ranks == 1 or imbalance(counts) <= self.limit:
            return False
        means = engine.table.parameters["means"].detach()
        step = max(1, -(-means.shape[0] // SAMPLE))
        shown = engine.exchange(means[::step].contiguous().cpu().numpy().tobytes())
        samples = [np.frombuffer(part, np.float32).reshape(-1, 3) for part in shown]
        weights = [np.full(len(s), n / max(1, len(s))) for s, n in zip(samples, counts)]
        points = np.concatenate(samples)
        if len(points) < ranks:
            return False
        count = parts_for(ranks, len(points), self._local)
        tree = divide(points, count, np.concatenate(weights))
        part = tree.owner(points)
        held = np.zeros((count, ranks))
        parts = np.split(part, np.cumsum([len(s) for s in samples])[:-1])
        for rank, (mine, weight) in enumerate(zip(parts, weights)):
            held[:, rank] = np.bincount(mine, weights=weight, minlength=count)
        target = torch.from_numpy(tree.for_ranks(assign(held)).owner(means.cpu().numpy())).to(means.device)
        tensors = row_tensors(engine.table)
        parts = self.moves.exchange(target, [owner.ids, *tensors.values()])
        self._adopt(parts, list(tensors), state, version)
        return True

    def _adopt(
        self, parts: list[list[Tensor]], names: Sequence[str], state: MutableMapping[str, Any], version: int
    ) -> None:
        """Own the rows that stay and those that came, in the order of the whole model. parts: ids, then by name."""
        engine, owner = self._engine, self._engine.owner
        ids = torch.cat(parts[0])
        order = torch.argsort(ids)
        for name, part in zip(names, parts[1:]):
            put_rows(engine.table, state, name, torch.cat(part)[order])
            part.clear()
        for parameter in engine.table.parameters.values():  # without columns there was nothing to send
            if not parameter.shape[1:].numel():
                parameter.data = parameter.data.new_empty((ids.shape[0], *parameter.shape[1:]))
        owner.watch.restart()
        engine.table.resize(torch.zeros_like(order), version)
        owner.take_rows(ids[order], owner.total, version)
        if owner.evidence is not None:  # other rows, other shares: views wait as at a first visit
            known = owner.evidence
            owner.evidence = EvidenceStore(known.tail, known.largest, known.limit)
            engine.policy.evidence = owner.evidence  # type: ignore[attr-defined]


def row_tensors(table: RowTable) -> dict[str, Tensor]:
    """Everything that a row takes along, by name: parameters, moments, statistics."""
    out: dict[str, Tensor] = {f"parameter {name}": p for name, p in table.parameters.items() if p.shape[1:].numel()}
    for name in table.names:
        state = table.adam_state(name)
        out |= {f"{key} {name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    if table.statistics is not None:
        out |= {f"statistic {k}": v for k, v in table.statistics.arrays().items() if v.dim() > 0}
    return out


def put_rows(table: RowTable, state: MutableMapping[str, Any], name: str, value: Tensor) -> None:
    """Replace one of the tensors of `row_tensors`; parameters keep their identity. state: The strategy's."""
    kind, rest = name.split(" ", 1)
    if kind == "parameter":
        table.parameters[rest].data = value
    elif kind == "statistic":
        state[rest] = value
    else:
        table.adam_state(rest)[kind] = value
