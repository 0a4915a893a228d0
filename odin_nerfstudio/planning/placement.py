"""Which placement a model wants: what fits into a device, and what travels, from a plan and the views' footprints.

Footprints come from the tracks. SfM observes a fraction of what a view sees (a half on caliterra, a tenth on
flowerpot), so a view counts as seeing every block of neighbouring points of which it observes one, or which lies among
the points that it observes, hidden or not, as seen from its camera.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from odin_nerfstudio.planning import memory
from odin_nerfstudio.planning.memory import Footprint, LinkBytes, Placement, RankMemory, RunShape, Splats, Strategy
from odin_nerfstudio.planning.shards import assign, divide, parts_for
from odin_nerfstudio.planning.tracks import FRUSTA, Tracks

if TYPE_CHECKING:
    from odin_nerfstudio.planning.schedule import Order, Plan

GROWTH = 24
"""Primitives for each seed point, unless told. Measured after 2,000 steps (docs/results.md): 14 on caliterra, from
23,354 to 328,000, and 41 on banana, from 5,800 to 240,000; this is the geometric mean. Longer runs grow further."""
RANDOM_SEEDS = 50_000
"""Random points that splatfacto starts from where a dataset has none."""
BLOCK = 16
"""Points of a block, unless there would be more than `_MOST_BLOCKS`."""
_MOST_BLOCKS = 1 << 12
_LEAST, _MOST_OBSERVED = 8, 512
"""Observed points that tell where an image is: at least, and at most as many are looked at."""
_TRIM = 0.005
"""Share of them on each side that does not count: wrong matches."""
_SAMPLE = 1 << 18
"""Most points that the planes are made from."""
_TASKS = 2048
"""Views that are looked at, those of the plan's first steps: all, for most datasets."""


@dataclass(frozen=True)
class Footprints:
    """What views see of the points, in blocks.

    Attributes:
        views: Views that were looked at, ascending. (n,) int64
        seen: ``seen[v, b]``: view v sees block b; empty for other views. (V, B) CSR, ones
        weight: Share of all points in each block. (B,) float64
        middle: Mean of its points. (B, 3) float32
    """

    views: np.ndarray
    seen: sparse.csr_matrix
    weight: np.ndarray
    middle: np.ndarray

    @staticmethod
    def of(tracks: Tracks, views: np.ndarray | None = None) -> Footprints:
        """Footprints from tracks, of some views or all. Views without an observation count as seeing everything."""
        chosen = np.arange(tracks.views) if views is None else np.unique(views)
        points = max(1, tracks.points)
        count = int(np.clip(points // BLOCK, 1, _MOST_BLOCKS))
        xyz = tracks.xyz if tracks.points else np.zeros((1, 3), np.float32)
        block = divide(xyz[:: max(1, points // _SAMPLE)], count).owner(xyz)
        inside = np.bincount(block, minlength=count)
        middle = np.stack([np.bincount(block, xyz[:, k], count) for k in range(3)], 1) / np.maximum(inside, 1)[:, None]
        middle = middle.astype(np.float32)
        indptr, indices = tracks.incidence.indptr, tracks.incidence.indices
        rows = [np.empty(0, np.int64)] * tracks.views
        for view in chosen:
            observed = indices[indptr[view] : indptr[view + 1]]
            seen = np.zeros(count, bool)
            seen[block[observed]] = True
            if len(observed) >= _LEAST and np.isfinite(tracks.centers[view]).all():
                sample = xyz[observed[:: max(1, len(observed) // _MOST_OBSERVED)]]
                seen |= _in_image(sample, middle, tracks.centers[view])
            rows[view] = np.flatnonzero(seen) if len(observed) else np.arange(count)
        starts = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
        found = np.concatenate(rows)
        matrix = sparse.csr_matrix((np.ones(len(found), np.float32), found, starts), shape=(tracks.views, count))
        return Footprints(chosen, matrix, inside / points, middle)

    def visible(self) -> float:
        """Mean share of the model that a view sees."""
        return float(np.mean((self.seen @ self.weight)[self.views]))

    def far(self, plan: Plan) -> float:
        """Share of what views see that ranks other than theirs own, if primitives are sharded for the plan's ranks."""
        if plan.ranks == 1:
            return 0.0
        if len(self.weight) < plan.ranks:
            return 1 - 1 / plan.ranks
        count = parts_for(plan.ranks, len(self.weight), plan.local)
        part = divide(self.middle, count, self.weight).owner(self.middle)
        parts = sparse.csr_matrix((self.weight, (np.arange(len(part)), part)), shape=(len(part), count))
        by_view = sparse.csr_matrix(self.seen @ parts).toarray()
        held = np.stack([by_view[plan.views_of_rank(rank)].sum(0) for rank in range(plan.ranks)], 1)
        rank_of_part = assign(held)
        near = sum(held[part, rank] for part, rank in enumerate(rank_of_part))
        return float(1 - near / held.sum()) if held.sum() else 0.0

    def touched(self, steps: Sequence[np.ndarray]) -> float:
        """Mean share of the model that the views of one step see together. steps: views of each."""
        return float(np.mean([self.weight[np.unique(self.seen[views].indices)].sum() for views in steps]))


def _in_image(observed: np.ndarray, others: np.ndarray, center: np.ndarray) -> np.ndarray:
    """Which points lie in a view's image, as far as the points that it observes show where that is.

    The image is taken for the rectangle around them, along their principal axes. observed [n, 3], others [m, 3],
    center [3] -> [m] bool.
    """
    rays = observed - center
    depth = (rays / np.maximum(np.linalg.norm(rays, axis=1, keepdims=True), 1e-12)).mean(0)
    depth /= max(float(np.linalg.norm(depth)), 1e-12)
    across = np.cross(depth, np.eye(3)[np.argmin(np.abs(depth))])
    across /= np.linalg.norm(across)
    axes = np.stack([across, np.cross(depth, across)], 1)

    def image(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        far = points @ depth
        return points @ axes / np.where(far > 0, far, np.inf)[:, None], far > 0

    flat, _ = image(rays)
    _, turn = np.linalg.eigh(np.cov(flat.T))
    low, high = np.quantile(flat @ turn, (_TRIM, 1 - _TRIM), axis=0)
    found, before = image(others - center)
    found = found @ turn
    return before & (found >= low).all(1) & (found <= high).all(1)


@dataclass(frozen=True)
class Wish:
    """What a user says of the run; None: estimated.

    Attributes:
        memory: Bytes of a device.
        memory_of: Where that number is from, in words.
        primitives: Expected primitives.
        primitives_of: Where that number is from.
        degree: Of the spherical harmonics.
        strategy: See `memory.RunShape`.
        cuda: Rows live on a CUDA device.
        splats: See `memory.RunShape`.
        visible: Share of the primitives that a view sees, from a recording; None: from footprints.
        visible_of: Where that number is from.
    """

    memory: float
    memory_of: str = "--device-memory-gb"
    primitives: int | None = None
    primitives_of: str = "--primitives"
    degree: int = 3
    strategy: Strategy = "default"
    cuda: bool = False
    splats: Splats = "gaussians"
    visible: float | None = None
    visible_of: str = "the recording"


@dataclass(frozen=True)
class PlacementAdvice:
    """Which placement to take.

    Attributes:
        wish: What was given.
        ranks: Ranks of the plan.
        primitives: Expected primitives.
        primitives_of: Where that number is from, in words.
        footprint: What views see.
        memory: By placement, for the plan's ranks.
        link: What a step sends.
        order: Of the views, where primitives are sharded.
    """

    wish: Wish
    ranks: int
    primitives: int
    primitives_of: str
    footprint: Footprint
    memory: dict[Placement, RankMemory]
    link: LinkBytes
    order: Order

    def most(self, placement: Placement) -> int:
        """Primitives of the largest model that fits, with the plan's ranks."""
        return self.memory[placement].most(self.wish.memory)

    @property
    def placement(self) -> Placement | None:
        """The placement to take; None: the model fits in neither."""
        fits: list[Placement] = [p for p in self.memory if self.primitives <= self.most(p)]
        if len(fits) == 2 and self.link.sharded < self.link.replicated and self.ranks >= FROM_RANKS:
            return "sharded"
        return fits[0] if fits else None

    def advice(self) -> str:
        """One sentence or two."""
        replicated, sharded = self.most("replicated"), self.most("sharded")
        limits = (
            f"fits on one device up to {about(replicated)} primitives; sharded from there, up to {about(sharded)} on"
            f" {self.ranks} devices"
        )
        if self.ranks == 1:
            return f"{about(self.primitives)} primitives: fits on one device up to {about(replicated)}." + (
                "" if self.primitives <= replicated else " It does not: plan for more --ranks, with placement sharded."
            )
        if self.placement is None:
            return (
                f"{about(self.primitives)} primitives fit in neither placement ({limits}): take more devices, or fewer"
                " primitives."
            )
        if self.placement == "sharded" and self.primitives <= replicated:
            return (
                f"Placement sharded: {about(self.primitives)} primitives fit either way ({limits}), and"
                f" {self.link.replicated / max(self.link.sharded, 1e-9):.1f} times fewer bytes travel."
            )
        return f"Placement {self.placement} for {about(self.primitives)} primitives: {limits}."

    def numbers(self) -> dict[str, Any]:
        """As plain types; bytes."""
        out: dict[str, Any] = {
            "placement": self.placement,
            "advice": self.advice(),
            "device_memory": self.wish.memory,
            "device_memory_of": self.wish.memory_of,
            "reserve": memory.RESERVE,
            "primitives": self.primitives,
            "primitives_of": self.primitives_of,
            "degree": self.wish.degree,
            "strategy": self.wish.strategy,
            "splats": self.wish.splats,
            "visible_share": self.footprint.visible,
            "owned_elsewhere": self.footprint.far,
            "dense_bytes_per_step": self.link.dense * self.primitives,
        }
        for placement, each in self.memory.items():
            out[placement] = {
                "state_bytes_per_primitive": each.state,
                "work_bytes_per_primitive": each.work,
                "memory_per_rank": each.total(self.primitives),
                "most_primitives": self.most(placement),
                "bytes_per_step": getattr(self.link, placement) * self.primitives,
            }
        return out

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values of a table."""
        n = self.numbers()

        def both(key: str, unit: float, name: str) -> str:
            return ", ".join(f"{p} {n[p][key] / unit:,.2f} {name}" for p in self.memory)

        return [
            (f"expected {self.wish.splats}", f"{self.primitives:,} ({self.primitives_of}), harmonics to degree "
                                    f"{self.wish.degree}, strategy {self.wish.strategy}"),
            ("memory per device", f"{both('memory_per_rank', 1e9, 'GB')} of {self.wish.memory / 1e9:,.1f} GB "
                                  f"({self.wish.memory_of}; {memory.RESERVE:.0%} left to rendering)"),
            ("fits up to", ", ".join(f"{p} {about(self.most(p))}" for p in self.memory)
                           + f" primitives on {self.ranks} devices"),
            ("a view sees", f"{self.footprint.visible:.1%} of the primitives ({self._seen_by()}), "
                            f"{self.footprint.far:.0%} of that owned elsewhere if sharded ({self.order} order)"),
            ("sent per step, all devices", both("bytes_per_step", 1e6, "MB")
                                           + f", dense all-reduce {n['dense_bytes_per_step'] / 1e6:,.2f} MB"),
        ]  # fmt: skip

    def _seen_by(self) -> str:
        return "blocks of observed points" if self.wish.visible is None else self.wish.visible_of


FROM_RANKS = 8
"""Where both placements fit, sharded is advised from so many ranks on, if fewer bytes travel: below, what a view has to
wait for at its owners, one way there and back, outweighs bytes (an expectation, see docs/scaling.md)."""


def about(count: int) -> str:
    """A number of primitives in words of two digits: 940, 72 thousand, 3.1 million."""
    for unit, name in ((10**6, " million"), (10**3, " thousand")):
        if count >= unit:
            value = count / unit
            return f"{value:,.1f}{name}" if value < 10 else f"{value:,.0f}{name}"
    return f"{count}"


def seed_points(tracks: Tracks) -> tuple[int, str]:
    """Seed points that training starts from, and where the number is from."""
    if tracks.source == FRUSTA:
        return RANDOM_SEEDS, f"{RANDOM_SEEDS:,} random seeds"
    return tracks.points, f"{tracks.points:,} seed points"


def advise(tracks: Tracks, plan: Plan, wish: Wish, sharded: Plan | None = None) -> PlacementAdvice:
    """What fits and what travels, for a plan.

    Args:
        tracks: The observations that the plan was made from.
        plan: The plan.
        sharded: The plan where primitives are sharded, if it is another one.
        wish: Memory, and what else is known of the run.

    Raises:
        ValueError: A number is out of range.
    """
    if wish.memory <= 0 or (wish.primitives is not None and wish.primitives < 1):
        raise ValueError(f"device memory and primitives must be positive, got {wish.memory} bytes, {wish.primitives}")
    if wish.primitives is None:
        seeds, name = seed_points(tracks)
        primitives, source = max(1, seeds * GROWTH), f"estimated: {name} x {GROWTH}"
    else:
        primitives, source = wish.primitives, wish.primitives_of
    steps = min(-(-plan.views // plan.views_per_step), -(-_TASKS // plan.views_per_step))
    steps = max(1, steps if plan.steps is None else min(steps, plan.steps))
    views = [plan.views_of_step(step) for step in range(steps)]
    found = Footprints.of(tracks, np.concatenate(views))
    seen = found.visible() if wish.visible is None else wish.visible
    footprint = Footprint(seen, found.far(sharded or plan))
    touched = min(1.0, max(seen, found.touched(views)))
    shapes: dict[Placement, RunShape] = {
        placement: RunShape(
            placement, plan.ranks, plan.views_per_step, wish.degree, wish.strategy, cuda=wish.cuda,
            splats=wish.splats,
        )
        for placement in ("replicated", "sharded")
    }  # fmt: skip
    return PlacementAdvice(
        wish, plan.ranks, primitives, source, footprint,
        {placement: memory.rank_memory(shape, footprint, plan.views) for placement, shape in shapes.items()},
        memory.link_bytes(shapes["sharded"], footprint, touched), (sharded or plan).order,
    )  # fmt: skip
