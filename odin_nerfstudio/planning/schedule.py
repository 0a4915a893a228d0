"""The plan: per step and lane the view, its rank, predicted conflicts and overlap windows.

A plan is a deterministic function of its inputs. Epochs are made when asked for and depend on the inputs and their
number alone (an odd epoch is fitted between its two even neighbours, which depend on no other), so any rank gets any
step of the same plan without communication, also after a resume.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from odin_nerfstudio.planning import epochs as epoch_maker
from odin_nerfstudio.planning.graph import pair_graph
from odin_nerfstudio.planning.ordering import Search
from odin_nerfstudio.planning.rlg import Rlg
from odin_nerfstudio.planning.slots import EpochSlots, epoch_slots, rank_of_lanes
from odin_nerfstudio.planning.template import Template

Order = Literal["rlg", "local", "random"]
ORDERS: tuple[Order, ...] = get_args(Order)
KEPT_EPOCHS = 8
WINDOW_CONFLICT = 0.01
"""A task may overlap with earlier steps while other ranks' tasks there share at most this much of what it reads."""


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan.

    Attributes:
        views: View of each lane. (L,) int64
        ranks: Rank that runs each lane. (L,) int32
        conflict: ``conflict[l, d - 1]`` is the mean over tasks of other ranks, d steps ago, of the share of lane l's
            points that they observe too; 0 where there are none. (L, max_delay + 1) float32
        pending: Upper bound of the share of what lane l reads that tasks of other ranks wrote in the last
            ``max_delay`` + 1 steps: the sum of their weights, at most 1. (L,) float32
        window: How many earlier steps lane l is expected to overlap with: the largest number, at most
            ``max_delay`` + 1, of preceding steps whose tasks on other ranks share at most 1 % of what it reads.
            (L,) int32
    """

    views: np.ndarray
    ranks: np.ndarray
    conflict: np.ndarray
    pending: np.ndarray
    window: np.ndarray


@dataclass(eq=False)
class Plan:
    """Which view each lane of each step renders, and on which rank. Made by :func:`make_plan`.

    Methods are safe to call from several threads.

    Attributes:
        rlg: The graph that was planned on.
        ranks: Ranks that run the plan.
        plan_ranks: Ranks that the order was made for; the views of a step do not depend on ``ranks``.
        views_per_step: Lanes L.
        seed: Seed of everything random.
        order: ``"rlg"``, ``"local"`` or ``"random"``, see :func:`make_plan`.
        max_delay: Conflicts are counted over ``max_delay`` + 1 steps.
        steps: Length of the plan in steps, or None for one without end.
        load: Cost of each view, integers with a mean of about 1,000. (V,) int64
        diversity: See :func:`make_plan`.
        template: Ranks of the views, and the epoch that all others start from.
        turn_every: See :func:`make_plan`.
    """

    rlg: Rlg
    ranks: int
    plan_ranks: int
    views_per_step: int
    seed: int
    order: Order
    max_delay: int
    steps: int | None
    load: np.ndarray
    diversity: float
    template: Template = field(repr=False)
    _search: Search = field(repr=False)
    turn_every: int = 0
    _epochs: OrderedDict[int, np.ndarray] = field(default_factory=OrderedDict, repr=False)
    _pinned: dict[int, np.ndarray] = field(default_factory=dict, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def views(self) -> int:
        """Number of views V."""
        return self.rlg.views

    @property
    def local(self) -> bool:
        """Whether every rank keeps to its own part of the scene."""
        return self.order == "local" and epoch_maker.searched(self)

    @property
    def affinity(self) -> np.ndarray:
        """Planned rank of each view, the same in all epochs; -1 for views that move between ranks. (V,) int32"""
        return self.template.rank

    def epoch_of(self, step: int, lane: int = 0) -> int:
        """Epoch that a task belongs to: every view comes once in each."""
        return (step * self.views_per_step + lane) // self.views

    def epoch_order(self, epoch: int) -> np.ndarray:
        """View of each of the epoch's V slots, in the order of slots. (V,) int64, not to be written to"""
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        with self._lock:
            made = self._pinned.get(epoch)
            if made is None:
                made = self._epochs.get(epoch)
            if made is None:
                made = self._make_epoch(epoch)
                made.setflags(write=False)
                self._epochs[epoch] = made
            if epoch in self._epochs:
                self._epochs.move_to_end(epoch)
                while len(self._epochs) > KEPT_EPOCHS:
                    self._epochs.popitem(last=False)
            return made

    def _make_epoch(self, epoch: int) -> np.ndarray:
        neighbours = {}
        if epoch % 2:
            neighbours = {e: self.epoch_order(e) for e in (epoch - 1, epoch + 1)}
        return epoch_maker.make_epoch(self, self._search, epoch, neighbours)

    def slots(self, epoch: int) -> EpochSlots:
        """Steps, lanes and planned ranks of an epoch's slots."""
        return epoch_slots(epoch, self.views, self.views_per_step, self.plan_ranks)

    def prepare(self, step: int) -> None:
        """Make what the step needs, so that a later call does not wait. For a background thread."""
        self.views_of_step(step)

    def views_of_step(self, step: int) -> np.ndarray:
        """View of each lane. (L,) int64"""
        self._check_step(step)
        first = step * self.views_per_step
        epoch, at = divmod(first, self.views)
        parts, left = [], self.views_per_step
        while left > 0:
            part = self.epoch_order(epoch)[at : at + left]
            parts.append(part)
            left -= len(part)
            epoch, at = epoch + 1, 0
        return np.concatenate(parts)

    def view(self, step: int, lane: int) -> int:
        """View that a lane renders in a step."""
        self._check_lane(lane)
        self._check_step(step)
        epoch, at = divmod(step * self.views_per_step + lane, self.views)
        return int(self.epoch_order(epoch)[at])

    def rank(self, step: int, lane: int) -> int:
        """Rank that runs a lane. Without `turn_every` it is the same in every step."""
        self._check_lane(lane)
        self._check_step(step)
        return (lane * self.ranks // self.views_per_step + self._turn(step)) % self.ranks

    def ranks_of_step(self, step: int) -> np.ndarray:
        """Rank that runs each lane in a step. (L,) int32"""
        return (rank_of_lanes(self.views_per_step, self.ranks) + np.int32(self._turn(step))) % np.int32(self.ranks)

    def _turn(self, step: int) -> int:
        """By how many ranks the lanes have gone on."""
        return step // self.turn_every % self.ranks if self.turn_every else 0

    def lanes_of_rank(self, rank: int) -> np.ndarray:
        """Lanes that a rank runs before any turn, ascending. int64"""
        self._check_rank(rank)
        return np.flatnonzero(rank_of_lanes(self.views_per_step, self.ranks) == rank)

    def views_of_rank(self, rank: int) -> np.ndarray:
        """Views that a rank may ever render, ascending: what it needs to cache. int64

        These are the views of the planned ranks whose lanes it runs, and the fewer than L views that move between ranks
        because V is not a multiple of L. In random order, and where lanes change ranks, any rank may render any view.
        """
        if self.turn_every and self.ranks > 1:
            self._check_rank(rank)
            return np.arange(self.views)
        planned = np.unique(rank_of_lanes(self.views_per_step, self.plan_ranks)[self.lanes_of_rank(rank)])
        return np.flatnonzero(np.isin(self.affinity, planned) | (self.affinity < 0))

    def step(self, step: int) -> PlannedStep:
        """Views, ranks, predicted conflicts and overlap windows of a step."""
        from odin_nerfstudio.planning.prediction import predict_step

        return predict_step(self, step)

    def for_ranks(self, ranks: int) -> Plan:
        """The same plan run by another number of ranks: same views in every step and lane.

        Raises:
            ValueError: ``ranks`` is not between 1 and the number of lanes.
        """
        _check_ranks("ranks", ranks, self.views_per_step)
        return replace(self, ranks=ranks, _epochs=OrderedDict(), _lock=threading.RLock())

    def fingerprint(self) -> str:
        """Hash of the plan's inputs, ranks and first epoch. Ranks whose fingerprints agree have the same plan."""
        text = (self.plan_ranks, self.views_per_step, self.seed, self.order, self.max_delay, self.diversity)
        graph = self._search.graph
        parts = (graph.indptr, graph.neighbours, graph.written, graph.read, self.rlg.unknown, self.load,
                 self.template.rank, self.template.step, self.epoch_order(0))  # fmt: skip
        turned = (*text, self.turn_every) if self.turn_every else text
        digest = hashlib.sha256(repr(turned).encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def _check_step(self, step: int) -> None:
        if step < 0 or (self.steps is not None and step >= self.steps):
            raise ValueError(f"step {step} is outside the plan of {self.steps or 'unlimited'} steps")

    def _check_lane(self, lane: int) -> None:
        if not 0 <= lane < self.views_per_step:
            raise ValueError(f"lane {lane} is outside the plan's {self.views_per_step} lanes")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is outside the plan's {self.ranks} ranks")


def make_plan(
    rlg: Rlg,
    *,
    ranks: int,
    views_per_step: int,
    seed: int = 0,
    epochs: int | None = None,
    steps: int | None = None,
    order: Order = "rlg",
    max_delay: int = 2,
    cost: np.ndarray | None = None,
    plan_ranks: int | None = None,
    diversity: float = 0.2,
    turn_every: int = 0,
) -> Plan:
    """Plan which view each lane of each step renders, and on which rank.

    Every view comes once an epoch. An epoch that does not fill its last step is continued there by the next epoch, so
    every step has ``views_per_step`` tasks.

    Args:
        rlg: Graph of the training views.
        ranks: Ranks that run the plan, at most ``views_per_step``.
        views_per_step: Lanes per step.
        seed: Seeds epochs and partition.
        epochs: Length of the plan in epochs (rounded up to whole steps), or
        steps: its length in steps. With neither, the plan has no end.
        order: ``"rlg"`` lowers conflicts between ranks; ``"local"`` does, but lets every rank keep to its own part of
            the scene, which a step then looks at all of: for sharded primitives, whose owners are near the views of
            their ranks; ``"random"`` is a fresh permutation per epoch. With one planned rank there are no conflicts to
            lower, and all shuffle.
        max_delay: Conflicts count over the previous ``max_delay`` + 1 steps.
        cost: Cost of each view in any unit, e.g. measured times. None takes the number of observed points. (V,)
        plan_ranks: Ranks to make the order for, default ``ranks``. Two plans that differ only in ``ranks`` have the
            same views in every step and lane.
        diversity: Weight of overlap between views of one step on different ranks, relative to a conflict between
            neighbouring steps. Such overlap is no hazard (all lanes read the same version); but it makes a
            step look at one place only. The default gives steps about as varied as in random order; smaller values have
            fewer conflicts, and 0.02 only decides between orders that are equally free of them.
        turn_every: After so many steps every lane goes on to the next rank; 0: lanes keep their ranks. Views of a step
            and lane stay what they are, so results of exact modes do too. Where lanes keep their ranks, so do the
            views, and a rank whose views take longer makes the others wait once their look-ahead is used up; where
            lanes go on before that, differences even out. Every rank then needs every image, and views that follow
            each other on a rank conflict at every turn.

    Raises:
        ValueError: An argument is out of range.
    """
    plan_ranks = ranks if plan_ranks is None else plan_ranks
    if rlg.views < 1:
        raise ValueError("rlg has no views: there is nothing to plan")
    if views_per_step < 1:
        raise ValueError(f"views_per_step must be at least 1, got {views_per_step}")
    for name, value in (("ranks", ranks), ("plan_ranks", plan_ranks)):
        _check_ranks(name, value, views_per_step)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if max_delay < 0:
        raise ValueError(f"max_delay must not be negative, got {max_delay}")
    if turn_every < 0:
        raise ValueError(f"turn_every must not be negative, got {turn_every}")
    if diversity < 0:
        raise ValueError(f"diversity must not be negative, got {diversity}")
    if epochs is not None and steps is not None:
        raise ValueError("give epochs or steps, not both")
    if epochs is not None:
        steps = -(-epochs * rlg.views // views_per_step)
    if steps is not None and steps < 0:
        raise ValueError(f"the plan's length must not be negative, got {steps} steps")

    load = _integer_load(rlg.sizes if cost is None else np.asarray(cost), rlg.views)
    settings = {
        "ranks": ranks, "plan_ranks": plan_ranks, "views_per_step": views_per_step, "seed": seed, "order": order,
        "max_delay": max_delay, "steps": steps, "diversity": float(diversity),
        "turn_every": turn_every,
    }  # fmt: skip
    plan = restore_plan(rlg, settings, load, Template.none(rlg.views, seed), {})
    plan.template = epoch_maker.template_of(plan, plan._search)
    return plan


def restore_plan(
    rlg: Rlg, settings: dict[str, Any], load: np.ndarray, template: Template, orders: dict[int, np.ndarray]
) -> Plan:
    """A plan from its parts, as read from a file.

    Args:
        rlg: The graph.
        settings: Attributes of :class:`Plan` by name, those of plain type.
        load: See :class:`Plan`.
        template: See :class:`Plan`.
        orders: Orders of epochs that are not to be made anew.
    """
    weights = epoch_maker.lag_weights(settings["max_delay"], settings["diversity"])
    search = Search.make(pair_graph(rlg), load, weights, settings["views_per_step"])
    return Plan(rlg=rlg, load=load, template=template, _search=search, _pinned=orders, **settings)


def _integer_load(cost: np.ndarray, views: int) -> np.ndarray:
    if cost.shape != (views,) or not np.all(np.isfinite(cost)) or (views and float(cost.min()) < 0):
        raise ValueError(f"cost must hold {views} finite values >= 0, one per view; got shape {cost.shape}")
    cost = cost.astype(np.float64)
    mean = cost.mean()
    return np.rint(cost / mean * 1000.0).astype(np.int64) if mean > 0 else np.full(views, 1000, np.int64)


def _check_ranks(name: str, value: int, views_per_step: int) -> None:
    if not 1 <= value <= views_per_step:
        raise ValueError(
            f"{name} must be between 1 and views_per_step ({views_per_step}), got {value}: "
            "a rank without a lane would idle; raise views_per_step"
        )
