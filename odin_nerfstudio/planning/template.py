"""The template: one well-searched epoch from which ranks are taken for good and every epoch's order starts.

Two structures make conflicts small. Ranks may keep to their own parts of the scene (a min-cut partition), so that only
views at the borders conflict. Or all ranks may look at one place in one step and at a far one in the next: within a
step nothing conflicts, since all its tasks read the same version, and by the time the place comes up again its updates
have long arrived. Which is better, or what mixture, depends on the scene. So the search starts from each, and from a
shuffle, and the best end is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odin_nerfstudio.planning.ordering import Search
from odin_nerfstudio.planning.partition import partition_views
from odin_nerfstudio.planning.shuffle import keyed_permutation
from odin_nerfstudio.planning.slots import EpochSlots, fixed_capacity
from odin_nerfstudio.planning.turns import Turns, make_turns

LARGE = 1000
"""Views above which starts are fewer, and changes are few enough to begin cold."""


@dataclass(frozen=True)
class Template:
    """Result of the search.

    Attributes:
        rank: Rank of each view; -1 for those of the last, incomplete step, which move between ranks. (V,) int32
        step: Step of each view in the template, below V // L. (V,) int64
        turns: How epochs turn it.
    """

    rank: np.ndarray
    step: np.ndarray
    turns: Turns

    @staticmethod
    def none(views: int, seed: int) -> Template:
        """No ranks: for orders that are not searched."""
        return Template(np.full(views, -1, np.int32), np.zeros(views, np.int64), Turns(1, np.zeros((0, 0)), seed))


def proposals(views: int, per_view: int, least: int) -> int:
    """Exchanges to try: ``per_view`` of them in small sets, fewer in large ones but at least 40 per view."""
    return min(per_view * views, max(least, 40 * views))


def make_template(
    search: Search, slots: EpochSlots, lanes: int, ranks: int, seed: int, local: bool = False
) -> Template:
    """Search ranks and order of one epoch, taken as repeating itself.

    Args:
        search: The objective.
        slots: Slots of epoch 0.
        lanes: Lanes per step.
        ranks: Ranks to plan for.
        seed: Seeds the search.
        local: Ranks keep to the parts that a min-cut partition gives them.
    """
    views = search.graph.views
    step = slots.step - slots.step[0]
    # The template repeats itself after the full steps: the views of an incomplete last one run beside the first.
    steps = views // lanes
    capacity = fixed_capacity(views, lanes, ranks)
    starts = [_by_rank(search, slots, capacity, seed)]
    if not local:
        phases = (2, 3, 4) if views <= LARGE else (4,)
        starts += [_by_phase(search, step % k, seed) for k in phases if steps >= 2 * k]
        if views <= LARGE:
            starts.append(keyed_permutation(views, seed, 4))
    best, best_cost = starts[0], None
    for number, start in enumerate(starts):
        order = search.anneal(
            start, slots, proposals=proposals(views, 10_000, 600_000), heat=0.3 if views <= LARGE else 0.05,
            key=(seed, 5, number), free_ranks=not local, period=0 if local else steps,
        )  # fmt: skip
        cost = search.cost(order, slots, steps)
        if best_cost is None or cost < best_cost:
            best, best_cost = order, cost
    rank_of, step_of = np.empty(views, np.int32), np.empty(views, np.int64)
    rank_of[best] = np.where(step < views // lanes, slots.rank, -1)
    step_of[best] = step % steps
    return Template(rank_of, step_of, make_turns(search, step_of, best, lanes, ranks, steps, seed))


def _by_rank(search: Search, slots: EpochSlots, capacity: np.ndarray, seed: int) -> np.ndarray:
    part = partition_views(search.graph, capacity, seed)
    shuffled = keyed_permutation(len(part), seed, 6)
    order = np.full(len(part), -1, np.int64)
    for rank in range(len(capacity)):
        members = shuffled[part[shuffled] == rank]
        order[np.flatnonzero(slots.rank == rank)[: len(members)]] = members
    order[order < 0] = shuffled[part[shuffled] < 0]
    return order


def _by_phase(search: Search, phase: np.ndarray, seed: int) -> np.ndarray:
    part = partition_views(search.graph, np.bincount(phase), seed)
    shuffled = keyed_permutation(len(part), seed, 7)
    order = np.empty(len(part), np.int64)
    for k in range(int(phase.max()) + 1):
        order[phase == k] = shuffled[part[shuffled] == k]
    return order
