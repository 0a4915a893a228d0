"""Structural steps of shards: surgery on each, then all ranks agree on the numbers of all rows."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from odin_nerfstudio.runtime.keyed import keyed_randomness
from odin_nerfstudio.runtime.sharded.numbering import PARENTS, SEGMENT, SEGMENTS, Masks, new_ids

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.sharded.engine import ShardedEngine


def change_rows(
    engine: ShardedEngine, step: int, surgery: Callable[[], None], state: MutableMapping[str, Any]
) -> None:
    """Change this rank's primitives after a step, and its rows' places in the whole model. Collective, at a drain.

    See `ShardedEngine.structural` for the arguments.
    """
    table, owner = engine.table, engine.owner
    before = table.count
    state[PARENTS] = torch.arange(before)
    state[SEGMENT] = torch.zeros(before, dtype=torch.uint8)
    try:
        with keyed_randomness(engine.options.seed, step, table.device):
            surgery()
    finally:
        parents, segments = state.pop(PARENTS), state.pop(SEGMENT)
    masks = Masks(SEGMENTS, owner.total)
    old = owner.ids[parents]
    for segment in range(SEGMENTS):
        masks.set(segment, old[segments == segment])
    masks.words = engine.exchange_of_shards.union(masks.words)
    table.resize(parents, step + 1)
    ids, total = new_ids(masks, segments, old)
    owner.take_rows(ids, total, step + 1)
    if owner.evidence is not None:
        owner.evidence.resize(parents, before)
    engine.balance.keep(state, step + 1)
