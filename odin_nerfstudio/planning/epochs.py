"""Making the epochs of a plan: affinity of views to ranks once, then an order per epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from odin_nerfstudio.planning.ordering import Occurrences, improve_order, occurrences
from odin_nerfstudio.planning.partition import partition_views
from odin_nerfstudio.planning.shuffle import keyed_permutation
from odin_nerfstudio.planning.slots import EpochSlots, fixed_capacity

if TYPE_CHECKING:
    from odin_nerfstudio.planning.schedule import Plan

LAG_DECAY = 4
"""A conflict counts this much less per step of distance: the older an update, the likelier it has arrived."""


def lag_weights(max_delay: int, diversity: float) -> np.ndarray:
    """Integer weight of a conflict by distance in steps, 0 to ``max_delay`` + 1. int64"""
    lags = min(max_delay + 1, 3)
    weight = [LAG_DECAY ** (lags - d) for d in range(1, lags + 1)] + [1] * (max_delay + 1 - lags)
    return np.array([round(diversity * weight[0]), *weight], dtype=np.int64)


def assign_ranks(plan: Plan) -> None:
    """Set the plan's affinity and phases."""
    if plan.order == "random" or plan.plan_ranks == 1:
        return
    capacity = fixed_capacity(plan.views, plan.views_per_step, plan.plan_ranks)
    plan.affinity = partition_views(plan._graph, capacity, plan.load, plan.seed)


def make_epoch(plan: Plan, epoch: int, neighbours: dict[int, np.ndarray]) -> np.ndarray:
    """View of each of an epoch's slots. (V,) int64

    Args:
        plan: The plan.
        epoch: Number of the epoch.
        neighbours: Orders of the epochs before and after, where they are settled.
    """
    slots = plan.slots(epoch)
    if plan.order == "random" or plan.plan_ranks == 1:
        start = keyed_permutation(plan.views, plan.seed, epoch, 1)
        return _spread(plan, epoch, start, slots, neighbours, by_rank=False)
    start = _start(plan, epoch, slots)
    around = [
        occurrences(neighbours[e], plan.slots(e)) if e in neighbours else Occurrences.none(plan.views)
        for e in (epoch - 1, epoch + 1)
    ]
    order = improve_order(
        plan._graph, slots, start, plan.load, lag_weights(plan.max_delay, plan.diversity),
        (plan.seed, epoch, 3), *around,
    )  # fmt: skip
    return _spread(plan, epoch, order, slots, neighbours, by_rank=True)


def _start(plan: Plan, epoch: int, slots: EpochSlots) -> np.ndarray:
    """A shuffle in which every view is on its rank, and the views of no rank fill what is left."""
    order = np.full(plan.views, -1, np.int64)
    shuffled = keyed_permutation(plan.views, plan.seed, epoch, 1)
    for rank in range(plan.plan_ranks):
        members = shuffled[plan.affinity[shuffled] == rank]
        places = np.flatnonzero(slots.rank == rank)
        chosen = np.sort(places[keyed_permutation(len(places), plan.seed, epoch, 2, rank)][: len(members)])
        order[chosen] = members
    order[order < 0] = shuffled[plan.affinity[shuffled] < 0]
    return order


def _spread(
    plan: Plan, epoch: int, order: np.ndarray, slots: EpochSlots, neighbours: dict[int, np.ndarray], by_rank: bool
) -> np.ndarray:
    """Where two epochs meet in one step, exchange views that would come twice in it for others of the same rank."""
    taken: dict[int, set[int]] = {}
    for other, other_order in neighbours.items():
        other_step = plan.slots(other).step
        edge = slots.step[0] if other < epoch else slots.step[-1]
        taken.setdefault(int(edge), set()).update(other_order[other_step == edge].tolist())
    order = order.copy()
    for at in range(plan.views):
        if int(order[at]) not in taken.get(int(slots.step[at]), ()):
            continue
        here = taken[int(slots.step[at])]
        for k in range(1, plan.views):
            swap = (at + k) % plan.views if 2 * at < plan.views else (at - k) % plan.views
            if by_rank and slots.rank[swap] != slots.rank[at]:
                continue
            if int(order[swap]) not in here and int(order[at]) not in taken.get(int(slots.step[swap]), ()):
                order[at], order[swap] = order[swap], order[at]
                break
    return order
