"""Structural steps of shards: surgery on each, then all ranks agree on the numbers of all rows."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odin_nerfstudio.runtime.keyed import keyed_randomness
from odin_nerfstudio.runtime.sharded.numbering import PARENTS, PLACES, SEGMENT, SEGMENTS, Masks, new_ids

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.sharded.engine import ShardedEngine


def change_rows(engine: ShardedEngine, step: int, surgery: Callable[[], None], state: MutableMapping[str, Any]) -> None:
    """Change this rank's primitives after a step, and its rows' places in the whole model. Collective, at a drain.

    See `ShardedEngine.structural` for the arguments.
    """
    table, owner = engine.table, engine.owner
    before = table.count
    state[PARENTS] = torch.arange(before, device=table.device)
    state[SEGMENT] = torch.zeros(before, dtype=torch.uint8, device=table.device)
    try:
        with keyed_randomness(engine.options.seed, step, table.device):
            surgery()
    finally:
        parents, segments = state.pop(PARENTS), state.pop(SEGMENT)
        places: tuple[Tensor, int] | None = state.pop(PLACES, None)
    table.resize(parents, step + 1)
    ids, total = _numbered(engine, parents, segments) if places is None else places
    owner.take_rows(ids, total, step + 1)
    if owner.evidence is not None:
        owner.evidence.resize(parents, before)
    engine.balance.keep(state, step + 1)


def _numbered(engine: ShardedEngine, parents: Tensor, segments: Tensor) -> tuple[Tensor, int]:
    """Places of this rank's rows in the whole model, and how many that has, after a strategy in gsplat's order."""
    masks = Masks(SEGMENTS, engine.owner.total)
    old = engine.owner.ids[parents]
    for segment in range(SEGMENTS):
        masks.set(segment, old[segments == segment])
    masks.words = engine.exchange_of_shards.union(masks.words)
    return new_ids(masks, segments, old)
