"""Rows change hands when shards have grown unevenly, with their moments and statistics.

All ranks look at the same sample of positions and come to the same planes, so nobody decides for the others. The order
of the rows in the whole model, and with it the result, does not depend on who owns them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.planning.shards import assign, divide, imbalance
from odin_nerfstudio.runtime import rows
from odin_nerfstudio.runtime.evidence import EvidenceStore
from odin_nerfstudio.runtime.gate import Decision
from odin_nerfstudio.runtime.messages import FRAME_WORDS
from odin_nerfstudio.runtime.sharded.exchange import header
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.transport import Kind, Received, empty_message

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.sharded.engine import ShardedEngine

SAMPLE = 4096
"""Most positions that a rank shows to the others."""
CHUNK = 16 << 20
"""Most bytes of rows in one message."""


class Balance:
    """Keeps the shards of all ranks about equal. Make it right after the engine, on every rank."""

    def __init__(self, engine: ShardedEngine, limit: float) -> None:
        """limit: By how much the largest shard may exceed the mean."""
        self._engine, self.limit = engine, limit
        self.moved_rows = 0
        """Rows that this rank has sent away since the start."""
        self._pieces: dict[int, list[Tensor]] = {}
        self._complete: set[int] = set()
        engine.exchange_of_shards.handle(Kind.MOVED, self._take)

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
        shown = engine.exchange(means[::step].contiguous().numpy().tobytes())
        samples = [np.frombuffer(part, np.float32).reshape(-1, 3) for part in shown]
        weights = [np.full(len(s), n / max(1, len(s))) for s, n in zip(samples, counts)]
        points = np.concatenate(samples)
        if len(points) < ranks:
            return False
        tree = divide(points, ranks, np.concatenate(weights))
        part = tree.owner(points)
        held = np.zeros((ranks, ranks))
        parts = np.split(part, np.cumsum([len(s) for s in samples])[:-1])
        for rank, (mine, weight) in enumerate(zip(parts, weights)):
            held[:, rank] = np.bincount(mine, weights=weight, minlength=ranks)
        target = torch.from_numpy(tree.for_ranks(assign(held)).owner(means.numpy()))
        tensors = row_tensors(engine.table)
        self._send(target, [owner.ids, *tensors.values()])
        stay = (target == engine.transport.rank).nonzero().flatten()
        self._receive()
        self._adopt(stay, tensors, state, version)
        return True

    def _send(self, target: Tensor, tensors: list[Tensor]) -> None:
        exchange, me = self._engine.exchange_of_shards, self._engine.transport.rank
        size = max(1, CHUNK // (4 * sum(rows.flat(t[:1]).shape[1] for t in tensors)))
        for rank in range(self._engine.transport.world_size):
            if rank == me:
                continue
            leaving = (target == rank).nonzero().flatten()
            self.moved_rows += int(leaving.shape[0])
            pieces = leaving.split(size) if leaving.shape[0] else [leaving]
            for k, piece in enumerate(pieces):
                head = torch.tensor([piece.shape[0], int(k == len(pieces) - 1)], dtype=torch.int32)
                values = [t.detach()[piece].reshape(-1).view(torch.int32) for t in tensors]
                exchange.send_words([rank], Kind.MOVED, empty_message(torch.cat([head, *values])))

    def _receive(self) -> None:
        others = self._engine.transport.world_size - 1
        while len(self._complete) < others:
            self._engine.exchange_of_shards.wait(self._engine.current, Decision("rows"))
        self._complete.clear()

    def _take(self, received: Received) -> None:
        count, last = header(received.words, 2)
        if count:
            self._pieces.setdefault(received.peer, []).append(received.words[FRAME_WORDS:])
        if last:
            self._complete.add(received.peer)

    def _adopt(
        self, stay: Tensor, tensors: dict[str, Tensor], state: MutableMapping[str, Any], version: int
    ) -> None:
        """Own the rows that stay and those that came, in the order of the whole model."""
        engine, owner = self._engine, self._engine.owner
        parts = [[owner.ids[stay]], *([t.detach()[stay]] for t in tensors.values())]
        for rank in sorted(self._pieces):
            for words in self._pieces[rank]:
                count, at = int(words[0]), 2
                for part in parts:
                    like = part[0]
                    width = rows.flat(like[:1]).shape[1]
                    part.append(words[at : at + count * width].view(like.dtype).view(count, *like.shape[1:]))
                    at += count * width
        self._pieces.clear()
        ids = torch.cat(parts[0])
        order = torch.argsort(ids)
        for name, part in zip(list(tensors), parts[1:]):
            put_rows(engine.table, state, name, torch.cat(part)[order])
            part.clear()
        engine.table.resize(torch.zeros(ids.shape[0], dtype=torch.int64), version)
        owner.take_rows(ids[order], owner.total, version)
        if owner.evidence is not None:  # other rows, other shares: views wait as at a first visit
            known = owner.evidence
            owner.evidence = EvidenceStore(known.tail, known.largest, known.limit)
            engine.policy.evidence = owner.evidence  # type: ignore[attr-defined]


def row_tensors(table: RowTable) -> dict[str, Tensor]:
    """Everything that a row takes along, by name: parameters, moments, statistics."""
    out: dict[str, Tensor] = {f"parameter {name}": p for name, p in table.parameters.items() if p.numel()}
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
