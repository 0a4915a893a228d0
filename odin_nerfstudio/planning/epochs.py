"""Making the epochs of a plan: ranks of views once, then an order per epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from odin_nerfstudio.planning.ordering import Search, Settled
from odin_nerfstudio.planning.shuffle import keyed_permutation
from odin_nerfstudio.planning.slots import EpochSlots
from odin_nerfstudio.planning.template import Template, make_template, proposals

if TYPE_CHECKING:
    from odin_nerfstudio.planning.schedule import Plan

LAG_DECAY = 4
"""A conflict counts this much less per step of distance: the older an update, the likelier it has arrived."""


def lag_weights(max_delay: int, diversity: float) -> np.ndarray:
    """Integer weight of a conflict by distance in steps, 0 to ``max_delay`` + 1. int64"""
    lags = min(max_delay + 1, 4)
    weight = [LAG_DECAY ** (3 - d) for d in range(lags)] + [1] * (max_delay + 1 - lags)
    return np.array([round(diversity * weight[0]), *weight], dtype=np.int64)


def searched(plan: Plan) -> bool:
    """Whether the plan's order is searched, and not simply shuffled: there are conflicts to lower, and views enough
    for every lane to have one of its own in a step."""
    return plan.order != "random" and plan.plan_ranks > 1 and plan.views >= plan.views_per_step


def template_of(plan: Plan, search: Search) -> Template:
    """Ranks and template of a searched plan; of any other, no ranks."""
    if not searched(plan):
        return Template.none(plan.views, plan.seed)
    return make_template(search, plan.slots(0), plan.views_per_step, plan.plan_ranks, plan.seed, plan.order == "local")


def make_epoch(plan: Plan, search: Search, epoch: int, neighbours: dict[int, np.ndarray]) -> np.ndarray:
    """View of each of an epoch's slots. (V,) int64

    Args:
        plan: The plan.
        search: Its objective.
        epoch: Number of the epoch.
        neighbours: Orders of the epochs before and after, where they are settled.
    """
    slots = plan.slots(epoch)
    if not searched(plan):
        order = keyed_permutation(plan.views, plan.seed, epoch, 1)
        return _part_twins(plan, epoch, order, slots, neighbours, by_rank=False)
    # An even epoch is made before its neighbours are: it is fitted to the turned templates that they start from.
    around = {
        e: Settled(neighbours[e] if e in neighbours else _turned_template(plan, e, plan.slots(e)), plan.slots(e))
        for e in (epoch - 1, epoch + 1)
        if e >= 0
    }
    order = search.anneal(
        _turned_template(plan, epoch, slots), slots,
        proposals=proposals(plan.views, 3000, 200_000), heat=0.05, key=(plan.seed, epoch, 3),
        before=around.get(epoch - 1), after=around.get(epoch + 1),
    )  # fmt: skip
    return _part_twins(plan, epoch, order, slots, neighbours, by_rank=True)


def _turned_template(plan: Plan, epoch: int, slots: EpochSlots) -> np.ndarray:
    """The template turned for an epoch. Views of no rank fill the slots that the ranks have beyond their own views.

    An epoch that begins within a step gives some ranks their first slot a step later than others. Slots are therefore
    matched by their step modulo the template's length, not by their number, so that ranks stay in step.
    """
    template = plan.template
    steps = template.turns.steps
    shift, backwards = template.turns.of_epoch(epoch)
    turned = (template.step + shift) % steps
    if backwards:
        turned = steps - 1 - turned
    place_step = (slots.step - slots.step[0]) % steps
    shuffled = keyed_permutation(plan.views, plan.seed, epoch, 1)
    movable = shuffled[template.rank[shuffled] < 0]
    order = np.empty(plan.views, np.int64)
    for rank in range(plan.plan_ranks):
        places = np.flatnonzero(slots.rank == rank)
        own = shuffled[template.rank[shuffled] == rank]
        extra, movable = np.split(movable, [len(places) - len(own)])
        spare = np.bincount(place_step[places], minlength=steps) - np.bincount(turned[own], minlength=steps)
        extra_step = np.repeat(np.arange(steps), np.maximum(spare, 0))[: len(extra)]
        members, step = np.concatenate([own, extra]), np.concatenate([turned[own], extra_step])
        order[places[np.argsort(place_step[places], kind="stable")]] = members[np.argsort(step, kind="stable")]
    return order


def _part_twins(
    plan: Plan, epoch: int, order: np.ndarray, slots: EpochSlots, neighbours: dict[int, np.ndarray], by_rank: bool
) -> np.ndarray:
    """Where two epochs meet in one step, exchange views that would come twice in it for others of the same rank."""
    taken: dict[int, set[int]] = {}
    for other, other_order in neighbours.items():
        other_step = plan.slots(other).step
        edge = slots.step[0] if other < epoch else slots.step[-1]
        taken.setdefault(int(edge), set()).update(other_order[other_step == edge].tolist())
    twins = [at for at in range(len(order)) if int(order[at]) in taken.get(int(slots.step[at]), ())]
    order = order.copy()
    for at in twins:
        here = taken[int(slots.step[at])]
        away = range(at + 1, len(order)) if 2 * at < len(order) else range(at - 1, -1, -1)
        for swap in away:
            if by_rank and slots.rank[swap] != slots.rank[at]:
                continue
            if int(order[swap]) not in here and int(order[at]) not in taken.get(int(slots.step[swap]), ()):
                order[at], order[swap] = order[swap], order[at]
                break
    return order
