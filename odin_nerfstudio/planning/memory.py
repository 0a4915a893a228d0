"""What a rank holds per primitive, in bytes, by placement: the one place that knows.

`tests/test_memory.py` compares these numbers with the tensors of real tables, owners, shadows and staging. Not counted:
images, the rasterizer's own buffers and the framework; `RESERVE` is kept for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Placement = Literal["replicated", "sharded"]
Strategy = Literal["default", "mcmc"]
Splats = Literal["gaussians", "surfels"]

WORD = 4
"""Bytes of a float32 or int32."""
RESERVE = 0.2
"""Share of a device's memory that is left to images, the rasterizer and the framework."""
UNEVEN = 0.2
"""By how much the largest shard may exceed the mean before rows change hands."""
SLACK = 1.2
"""Buffers of shadows are made longer by this factor, to serve the next view, too."""
EVIDENCE = 6
"""Per kept share of a view's gradient: id and bfloat16 (mode throughput)."""
EVIDENCE_LIMIT = 1 << 30
"""Most bytes of evidence on a rank."""
STATISTICS_ROW = 3 * WORD
"""Statistics of a visible row on the wire: id, norm of the 2D gradient, radius."""
GATHERED = 25
"""About what rank 0 holds in host memory for each primitive of a sharded model while MCMC draws in proportion to all
opacities."""
RESTS_ON = (
    "(An estimate: bytes per primitive and row are exact, steps under way count with a full look-ahead, and every"
    " visible primitive with a gradient.)"
)
"""What the advice rests on, in words."""
_BASE = 14
"""Columns without harmonics: mean 3, scale 3, rotation 4, opacity 1, base colour 3."""
_CUDA_TEST = 100
"""About what the candidate test of a view takes per row in torch's operations, which run on CUDA only."""


def columns(degree: int) -> int:
    """Parameters of a primitive with harmonics up to a degree: 14, 23, 38, 59 for 0 to 3.

    Raises:
        ValueError: There are no harmonics of this degree.
    """
    if not 0 <= degree <= 4:
        raise ValueError(f"harmonics: degree {degree} is not within 0 to 4")
    return _BASE + 3 * ((degree + 1) ** 2 - 1)


def splat_bytes(splats: Splats, cuda: bool) -> tuple[int, int]:
    """A splat on the wire, without its id, and its gradient, with its norm for the statistics where that travels."""
    if splats == "gaussians":
        return 11 * WORD, 11 * WORD
    return (20 * WORD, 20 * WORD) if cuda else (23 * WORD, 20 * WORD)


@dataclass(frozen=True)
class Footprint:
    """What the views of a step touch, as shares of the model's primitives.

    Attributes:
        visible: Mean share that a view sees.
        far: Share of what a view sees that other ranks own, where primitives are sharded.
    """

    visible: float
    far: float


@dataclass(frozen=True)
class RunShape:
    """What decides the memory of a rank, beside the number of primitives.

    Attributes:
        placement: Where primitives live.
        ranks: Ranks R.
        views_per_step: Lanes L.
        degree: Of the spherical harmonics.
        strategy: MCMC keeps no statistics.
        lookahead: Steps that ranks may be ahead of the oldest incomplete one.
        throughput: Mode throughput, which keeps evidence.
        cuda: Rows live on a CUDA device, where gradients are summed in a dense tensor.
        splats: What primitives are; surfels (odin-2dgs) are larger as splats.
    """

    placement: Placement = "replicated"
    ranks: int = 1
    views_per_step: int = 1
    degree: int = 3
    strategy: Strategy = "default"
    lookahead: int = 2
    throughput: bool = False
    cuda: bool = False
    splats: Splats = "gaussians"


@dataclass(frozen=True)
class RowBytes:
    """Bytes per row that a rank holds."""

    parameters: int
    moments: int
    """Both of Adam's."""
    statistics: int
    """The strategy's: norms, counts, largest radii."""
    rows: int
    """Version and mask of each row; sharded, also its place in the whole model."""
    gradients: int
    """Dense accumulators; on the CPU gradients are summed block by block in the cache."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.moments + self.statistics + self.rows + self.gradients


def state_bytes(shape: RunShape) -> RowBytes:
    """What is held per row all the time."""
    width = WORD * columns(shape.degree)
    return RowBytes(
        parameters=width,
        moments=2 * width,
        statistics=3 * WORD if shape.strategy == "default" else 0,
        rows=WORD + 1 + (WORD if shape.placement == "sharded" else 0),
        gradients=width if shape.cuda else 0,
    )


def shadow_bytes(degree: int) -> float:
    """A task's copy of a row, with its id and its gradient."""
    width = WORD * columns(degree)
    return SLACK * width + WORD + width


def contribution_bytes(degree: int) -> int:
    """An active row of a contribution: id, gradient, statistics; as large on the wire as staged."""
    return WORD + WORD * columns(degree) + STATISTICS_ROW


def tracking_bytes(shape: RunShape) -> int:
    """Most that is held per row to know what is pending: in each step within the look-ahead a mask of the candidates
    of every lane and a count; in mode throughput also the buffers of a decision."""
    steps = shape.lookahead + 1
    return steps * (shape.views_per_step + 1) + (2 + 2 * WORD if shape.throughput else 0)


def surgery_bytes(degree: int) -> int:
    """Most that a structural step holds twice per row: the widest of the tensors, which it replaces one by one."""
    return WORD * max(4, columns(degree) - _BASE)


@dataclass(frozen=True)
class RankMemory:
    """Most bytes of a rank for each primitive of the whole model.

    Attributes:
        state: Held all the time.
        work: Held by the steps under way (an upper bound: a full look-ahead of contributions), or by surgery.
        evidence: Mode throughput; limited to `EVIDENCE_LIMIT` whatever the number of primitives.
    """

    state: float
    work: float
    evidence: float = 0.0

    def total(self, primitives: int) -> float:
        """Bytes for a model."""
        return primitives * (self.state + self.work) + min(primitives * self.evidence, EVIDENCE_LIMIT)

    def most(self, memory: float) -> int:
        """Primitives of the largest model that fits."""
        usable = max(0.0, memory * (1 - RESERVE))
        each = self.state + self.work
        return int(max(usable / (each + self.evidence), (usable - EVIDENCE_LIMIT) / each))


def rank_memory(shape: RunShape, footprint: Footprint, views: int) -> RankMemory:
    """Memory of a rank for each primitive of the whole model.

    Args:
        shape: The run.
        footprint: What its views see.
        views: Training views V, all of which leave evidence.
    """
    sharded = shape.placement == "sharded"
    held = min(1.0, (1 + UNEVEN) / shape.ranks) if sharded else 1.0
    own = footprint.visible * -(-shape.views_per_step // shape.ranks)
    all_lanes, steps = footprint.visible * shape.views_per_step, shape.lookahead + 1
    staged = contribution_bytes(shape.degree)
    if sharded:
        # an owner keeps shadow and splats of a lane until gradients are back, then their sum; a renderer all splats
        splat, gradient = splat_bytes(shape.splats, shape.cuda)
        kept = max(shadow_bytes(shape.degree) + 2 * splat, staged)
        work = held * all_lanes * steps * kept + own * (steps * (WORD + splat) + splat + 2 * gradient)
    else:
        work = own * (shadow_bytes(shape.degree) + staged) + all_lanes * steps * staged
    work += held * (tracking_bytes(shape) + (_CUDA_TEST if shape.cuda else 0))
    surgery = held * surgery_bytes(shape.degree)
    if sharded and shape.strategy == "mcmc" and not shape.cuda:
        surgery += GATHERED
    evidence = EVIDENCE * footprint.visible * views * held if shape.throughput else 0.0
    return RankMemory(held * state_bytes(shape).total, max(work, surgery), evidence)


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that all ranks together send in a step, for each primitive of the whole model, at full harmonics.

    Attributes:
        replicated: Contributions to every other rank or, from 3 ranks on, through owners that sum rows, where fewer.
        sharded: Splats to the ranks that render, gradients back.
        dense: For comparison, a ring all-reduce of all gradients.
    """

    replicated: float
    sharded: float
    dense: float


def link_bytes(shape: RunShape, footprint: Footprint, touched: float) -> LinkBytes:
    """What a step sends, if every visible row has a gradient (an upper bound: late in training half of them have).

    touched: Share of the primitives that some view of a step sees.
    """
    ranks, degree = shape.ranks, shape.degree
    seen, others = shape.views_per_step * footprint.visible, ranks - 1
    row = WORD + WORD * columns(degree)
    direct = seen * row * others
    through = seen * WORD * others + seen * WORD * columns(degree) * others / ranks + touched * row * others
    statistics = seen * STATISTICS_ROW * others
    splat = WORD + sum(splat_bytes(shape.splats, shape.cuda)) + 1 / 8  # with a bit in the mask
    return LinkBytes(
        replicated=statistics + (min(direct, through) if ranks > 2 else direct),
        sharded=seen * footprint.far * splat,
        dense=2.0 * others * WORD * columns(degree),
    )
