"""Shards of a recorded scene: who owns which rows, and what each owner has of each view."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from odin_nerfstudio.planning.shards import assign, divide, parts_for
from odin_nerfstudio.runtime.frontier import TaskPlan
from odin_nerfstudio.runtime.recording import Overheads, Recording, ViewSets
from odin_nerfstudio.runtime.stage_costs import StageCosts
from odin_nerfstudio.simulation.scene import Scene, scene_of

_SAMPLE_VIEWS = 64
"""About how many views of each rank decide who gets which part."""
_OF_ALL_ROWS = ("mark", "bound", "publish", "scan", "sweep")
"""Overheads that grow with the rows that a rank holds."""


@dataclass(eq=False)
class ShardedScene:
    """Input of a simulation with placement sharded.

    Attributes:
        scene: Sets and times of the views.
        means: Position of each row. [rows, 3] float32
        stages: Times of the parts of a view.
    """

    scene: Scene
    means: np.ndarray
    stages: StageCosts

    def faster(self, speed: float, overhead_speed: float | None = None) -> ShardedScene:
        """As `Scene.faster`; projections are rendering, what a call of a stage costs is an overhead."""
        others = speed if overhead_speed is None else overhead_speed
        return replace(self, scene=self.scene.faster(speed, others), stages=self.stages.faster(speed, others))


def sharded_scene_of(recording: Recording) -> ShardedScene:
    """A scene from a recording.

    Raises:
        ValueError: Views, graph, positions or times of stages are missing.
    """
    scene = scene_of(recording)
    if recording.stages is None or len(recording.means) != scene.rows:
        raise ValueError(
            "the recording does not say where primitives are and what the stages of a view take: record a checkpoint "
            "with 'odin-simulate record'"
        )
    return ShardedScene(scene, recording.means, recording.stages)


@dataclass(frozen=True, eq=False)
class _ByOwner:
    """One view's sets, sorted by owner; those of owner r lie between starts[r] and starts[r + 1]."""

    candidates: np.ndarray
    candidate_starts: np.ndarray
    active: np.ndarray
    counts: np.ndarray
    mass: np.ndarray
    starts: np.ndarray


class Cut:
    """A scene cut into the shards of some ranks."""

    def __init__(self, sharded: ShardedScene, plan: TaskPlan, ranks: int, steps: int) -> None:
        """As `glue.shard_rows.shard_tree`: compact parts of equal size, each for the rank whose views see most of it.

        steps: Those of the plan by which ranks are chosen, where the plan does not know the views of a rank.
        """
        self.scene, self.ranks = sharded.scene, ranks
        parts = parts_for(ranks, len(sharded.means), getattr(plan, "local", False))
        tree = divide(sharded.means, parts, self.scene.row_sizes)
        part = tree.owner(sharded.means)
        affinity = np.zeros((parts, ranks))
        for rank, views in enumerate(_views_of_ranks(plan, ranks, steps)):
            for view in views[:: max(1, len(views) // _SAMPLE_VIEWS)]:
                sets = self.scene.sets[view]
                affinity[:, rank] += np.bincount(part[sets.active], weights=sets.counts, minlength=parts)
        self.owner = tree.for_ranks(assign(affinity)).owner(sharded.means)
        """Rank that owns each row. [rows]"""
        self._local = np.empty(self.scene.rows, np.int32)
        self._rows = []
        for rank in range(ranks):
            mine = np.flatnonzero(self.owner == rank)
            self._local[mine] = np.arange(len(mine), dtype=np.int32)
            self._rows.append(mine)
        self._views: dict[int, _ByOwner] = {}
        self._sets: dict[tuple[int, int], ViewSets] = {}

    def primitives(self) -> np.ndarray:
        """Primitives of each shard. [ranks]"""
        return np.array([self.scene.row_sizes[mine].sum() for mine in self._rows])

    def row_sizes(self, rank: int) -> np.ndarray:
        """Primitives of each row of a shard."""
        return self.scene.row_sizes[self._rows[rank]]

    def shard(self, rank: int) -> Scene:
        """What one rank knows and does: its rows of every view, and overheads for as many."""
        share = float(self.row_sizes(rank).sum()) / max(1.0, float(self.scene.row_sizes.sum()))
        costs = {n: c * share if n in _OF_ALL_ROWS else c for n, c in vars(self.scene.overheads).items()}
        return replace(
            self.scene, sets=ShardSets(self, rank), row_sizes=self.row_sizes(rank), overheads=Overheads(**costs)
        )

    def sets(self, view: int, rank: int) -> ViewSets:
        """A view's sets among the rows of one rank, in that rank's numbers; its mass is a share of theirs."""
        if (view, rank) not in self._sets:
            self._sets[view, rank] = self._cut_sets(view, rank)
        return self._sets[view, rank]

    def _cut_sets(self, view: int, rank: int) -> ViewSets:
        by, whole = self._by_owner(view), self.scene.sets[view]
        a, b = by.candidate_starts[rank : rank + 2]
        c, d = by.starts[rank : rank + 2]
        mass, counts = by.mass[c:d], by.counts[c:d]
        total = float(mass.sum())
        visible = whole.visible * float(counts.sum()) / max(1.0, float(whole.counts.sum()))
        return ViewSets(by.candidates[a:b], by.active[c:d], counts, mass / total if total > 0 else mass, round(visible))

    def active(self, view: int) -> np.ndarray:
        """Active primitives of a view by owner. [ranks] float64"""
        by = self._by_owner(view)
        total = np.concatenate([[0.0], np.cumsum(by.counts, dtype=np.float64)])
        return np.diff(total[by.starts])

    def visible(self, view: int) -> np.ndarray:
        """Splats of a view by owner: its visible primitives, where it has active ones. [ranks] float64"""
        active = self.active(view)
        return active * max(1.0, self.scene.sets[view].visible / max(1.0, active.sum()))

    def _by_owner(self, view: int) -> _ByOwner:
        found = self._views.get(view)
        if found is None:
            sets, edges = self.scene.sets[view], np.arange(self.ranks + 1)
            first, second = self.owner[sets.candidates], self.owner[sets.active]
            ahead, order = np.argsort(first, kind="stable"), np.argsort(second, kind="stable")
            found = self._views[view] = _ByOwner(
                self._local[sets.candidates[ahead]],
                np.searchsorted(first[ahead], edges),
                self._local[sets.active[order]],
                sets.counts[order],
                sets.mass[order],
                np.searchsorted(second[order], edges),
            )
        return found


class ShardSets(Mapping[int, ViewSets]):
    """The sets of all views among the rows of one rank."""

    def __init__(self, cut: Cut, rank: int) -> None:
        self._cut, self._rank = cut, rank

    def __getitem__(self, view: int) -> ViewSets:
        return self._cut.sets(view, self._rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._cut.scene.sets)

    def __len__(self) -> int:
        return len(self._cut.scene.sets)


def _views_of_ranks(plan: TaskPlan, ranks: int, steps: int) -> list[list[int]]:
    known = getattr(plan, "views_of_rank", None)
    if known is not None:
        return [known(rank).tolist() for rank in range(ranks)]
    views: list[list[int]] = [[] for _ in range(ranks)]
    for step in range(steps):
        for lane in range(plan.views_per_step):
            view = plan.view(step, lane)
            if view >= 0:
                views[plan.rank(step, lane)].append(view)
    return views
