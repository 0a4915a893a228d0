"""The order of an epoch's views: local search that lowers predicted conflicts between ranks.

Tasks of one rank never conflict with each other. So with the other ranks' orders held fixed, the cost of running view v
in step s does not depend on where the rank's own other views go, and the best order of one rank is a linear assignment
problem, solved exactly. Ranks take turns until nothing improves. Starting from a fresh shuffle each epoch keeps epochs
different; many orders are about equally good.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from odin_nerfstudio.planning.graph import ONE, PairGraph
from odin_nerfstudio.planning.shuffle import keyed_permutation
from odin_nerfstudio.planning.slots import EpochSlots

CHUNK = 160
"""Views whose slots are exchanged at once. An assignment takes time cubic in this."""
MAX_ROUNDS = 12
BALANCE = 0.05
"""Conflict weight that one step's cost deviation of 100 % is worth."""
REPEAT = 8 * ONE
"""Cost of a view twice in one step, which happens only where two epochs meet."""


@dataclass(frozen=True)
class Occurrences:
    """Where each view runs in one epoch.

    Attributes:
        step: (V,) int64
        rank: Planned rank. (V,) int32, -1 for views that do not matter here
    """

    step: np.ndarray
    rank: np.ndarray

    @staticmethod
    def none(views: int) -> Occurrences:
        """An epoch in which nothing runs."""
        return Occurrences(np.zeros(views, np.int64), np.full(views, -1, np.int32))


def occurrences(order: np.ndarray, slots: EpochSlots) -> Occurrences:
    """Step and rank of each view, given the view of each slot. order: (V,)"""
    step, rank = np.empty(len(order), np.int64), np.empty(len(order), np.int32)
    step[order], rank[order] = slots.step, slots.rank
    return Occurrences(step, rank)


def improve_order(
    graph: PairGraph,
    slots: EpochSlots,
    order: np.ndarray,
    load: np.ndarray,
    lag_weight: np.ndarray,
    key: tuple[int, ...],
    before: Occurrences | None = None,
    after: Occurrences | None = None,
) -> np.ndarray:
    """Rearrange each rank's views among the rank's own slots.

    Args:
        graph: Edges between the views.
        slots: The epoch's slots.
        order: View of each slot to start from. (V,) int64
        load: Cost of each view, mean about 1,000. (V,) int64
        lag_weight: Integer weight of a conflict by distance in steps; entry 0 unused. (max_delay + 2,) int64
        key: Keys the choice of chunks.
        before: The previous epoch, if it is settled already.
        after: The next epoch, if it is settled already.

    Returns:
        View of each slot. (V,) int64
    """
    from odin_nerfstudio.planning import kernels

    order = order.copy()
    views = graph.views
    first_step = int(slots.step[0])
    steps = int(slots.step[-1]) - first_step + 1
    now = occurrences(order, slots)
    fixed = [before or Occurrences.none(views), after or Occurrences.none(views)]
    step_of = np.stack([fixed[0].step, now.step, fixed[1].step])
    rank_of = np.stack([fixed[0].rank, now.rank, fixed[1].rank])
    step_load = np.bincount(slots.step - first_step, weights=load[order], minlength=steps)
    step_count = np.bincount(slots.step - first_step, minlength=steps)
    unit = BALANCE * float(lag_weight[1]) * ONE / float(max(load.mean(), 1.0)) ** 2
    own_slots = [np.flatnonzero(slots.rank == r) for r in range(int(slots.rank.max()) + 1)]

    for turn in range(MAX_ROUNDS):
        gained = False
        for rank, all_places in enumerate(own_slots):
            places_of_rank = all_places[keyed_permutation(len(all_places), *key, turn, rank)]
            for start in range(0, len(places_of_rank), CHUNK):
                places = np.sort(places_of_rank[start : start + CHUNK])
                if len(places) < 2:
                    continue
                members = order[places]
                profile = np.zeros((len(members), steps), np.int64)
                kernels.add_conflict(
                    members, rank, first_step, graph.indptr, graph.neighbours, graph.written, graph.read,
                    step_of, rank_of, lag_weight, profile,
                )  # fmt: skip
                _add_repeats(profile, members, first_step, step_of, rank_of, lag_weight)
                column = slots.step[places] - first_step
                cost = profile[:, column]
                cost = cost + _balance_cost(load, members, slots.step, order, rank, slots.rank, places, first_step,
                                            step_load, step_count, unit)  # fmt: skip
                _, chosen = linear_sum_assignment(cost)
                identity = np.arange(len(members))
                if int(cost[identity, identity].sum()) <= int(cost[identity, chosen].sum()):
                    continue
                gained = True
                step_load -= np.bincount(column, weights=load[members], minlength=steps)
                moved = places[chosen]
                order[moved] = members
                step_of[1, members] = slots.step[moved]
                step_load += np.bincount(slots.step[moved] - first_step, weights=load[members], minlength=steps)
        if not gained:
            break
    return order


def _balance_cost(load, members, slot_step, order, rank, slot_rank, places, first_step, step_load, step_count, unit):
    """Squared deviation of each member's load from the mean load per lane of the others in the step. (n, n) int64"""
    column = slot_step[places] - first_step
    others_load = step_load[column] - load[order[places]]
    others = np.maximum(step_count[column] - 1, 1)
    mean = others_load / others
    return np.rint(unit * (load[members][:, None] - mean[None, :]) ** 2).astype(np.int64)


def _add_repeats(profile, members, first_step, step_of, rank_of, lag_weight):
    """A view should not come back within a few steps of its place in a neighbouring epoch, least of all in one step."""
    steps = profile.shape[1]
    for epoch in (0, 2):
        for i in np.flatnonzero(rank_of[epoch, members] >= 0):
            at = int(step_of[epoch, members[i]]) - first_step
            for distance in range(len(lag_weight)):
                value = REPEAT * int(lag_weight[1]) if distance == 0 else ONE * int(lag_weight[distance])
                for s in {at - distance, at + distance}:
                    if 0 <= s < steps:
                        profile[i, s] += value
