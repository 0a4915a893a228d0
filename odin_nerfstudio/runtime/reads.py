"""Read rule of the primitives: what a view's camera can see, whatever the updates that this rank's copy still lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.runtime.candidate_blocks import BlockBoxes, takes
from odin_nerfstudio.runtime.candidates import MotionBound, ViewTest, adam_motion_bound, candidate_mask
from odin_nerfstudio.runtime.noise import PositionNoise
from odin_nerfstudio.runtime.store import RowTable

MAX_LAG = 16
"""Most updates that a row of a copy may lack; far above any look-ahead."""
_STILL = MotionBound.steady(0.0, 0.0, (0.9, 0.999), max_lag=0)


@dataclass(frozen=True)
class PoseMotion:
    """How far the camera of a view can turn and move while its row of a per-view table lacks updates.

    The row holds a translation and a rotation vector, applied in the camera's frame (nerfstudio's SO3xR3): a change of
    the rotation vector by w turns the camera by at most |w|.
    """

    table: RowTable
    name: str
    """Parameter of the table. [V, 6]: translation, rotation."""
    betas: tuple[float, float] = (0.9, 0.999)

    def reach(self, step: int, view: int, least_lag: int) -> float:
        """Largest change of each half of the row, Euclidean norm. [scene units or rad]"""
        lag = max(step - int(self.table.versions[view]), least_lag)
        rates = [self.table.schedule(s)[self.name] for s in range(max(0, step - lag), step)]
        return math.sqrt(3.0) * adam_motion_bound(self.betas) * sum(rates) * (1 + 1e-5)


def loosened(test: ViewTest, reach: float) -> ViewTest:
    """A view's test that also holds for every camera turned by at most `reach` rad and moved by at most `reach`.

    A point at distance r from the camera then moves by at most ``reach (r + 1)`` in the camera's frame, and
    ``r <= |p|_1 + |t|_1``; the test has a slack of just that form (values 15, per unit of |p|_1, and 16, constant).
    """
    packed = test.packed.copy()
    shift = abs(packed[3]) + abs(packed[7]) + abs(packed[11])
    packed[15] += reach * (1 + 1e-6)
    packed[16] += reach * (shift + 1) * (1 + 1e-6)
    return ViewTest(packed)


@dataclass(eq=False)
class VisibilityReads:
    """Marks the primitives that gsplat's rasterization can make visible in a view.

    Raises:
        ValueError: (mark) A row lags by more than `MAX_LAG` steps.
    """

    parameters: Mapping[str, Any] | torch.nn.ParameterDict
    """Live mapping with ``means`` [N, 3] and ``scales`` [N, 3] (logarithms)."""
    schedule: Callable[[int], Mapping[str, float]]
    """Learning rates of a step."""
    view_test: Callable[[int, int], ViewTest]
    """(step, view) -> test of the view's camera, by this rank's copy of its pose."""
    betas: tuple[float, float] = (0.9, 0.999)
    pose: PoseMotion | None = None
    """Where camera poses are trained: how far they can move."""
    means: str = "means"
    scales: str = "scales"
    noise: PositionNoise | None = None
    """Where positions get noise: how far it can move them."""
    variance: Callable[[], Tensor] | None = None
    """What a 3D filter adds to each primitive's variance. [N] float32."""
    _motion: tuple[int, MotionBound] | None = field(default=None, init=False)
    _blocks: BlockBoxes = field(default_factory=BlockBoxes, init=False)

    def mark(self, step: int, view: int, versions: Tensor, least_lag: int, out: Tensor) -> int:
        test = self.view_test(step, view)
        if self.pose is not None:
            test = loosened(test, self.pose.reach(step, view, least_lag))
        motion = self.motion(step)
        extra = None if self.noise is None else self.noise.reach(step, versions, least_lag, motion)
        return self._mark(test, motion, versions=versions, step=step, least_lag=least_lag, extra=extra, out=out)

    def mark_now(self, test: ViewTest) -> Tensor:
        """Rows that a camera can see in the state as it is, which need not be a training view's. [N] uint8."""
        means = self.parameters[self.means]
        out = torch.empty(means.shape[0], dtype=torch.uint8, device=means.device)
        self._mark(test, _STILL, out=out)
        return out

    def _mark(self, test: ViewTest, motion: MotionBound, out: Tensor, **known: Any) -> int:
        """`candidate_mask` of the parameters. known: versions, step, least_lag, extra."""
        variance = None if self.variance is None else self.variance()
        means, scales = self.parameters[self.means], self.parameters[self.scales]
        if takes(means, scales, known.get("versions"), known.get("extra"), variance):
            kept = (known["versions"], known["step"], known["least_lag"])
            return self._blocks.mark(means, scales, test, motion, *kept, out)
        return candidate_mask(means.detach(), scales.detach(), test, motion, variance=variance, out=out, **known)[1]

    def motion(self, step: int) -> MotionBound:
        """Bound of the motion of rows that lack up to `MAX_LAG` updates before a step."""
        if self._motion is None or self._motion[0] != step:
            missing = [self.schedule(max(0, s)) for s in range(step - 1, step - 1 - MAX_LAG, -1)]
            means, scales = [r[self.means] for r in missing], [r[self.scales] for r in missing]
            self._motion = (step, MotionBound.of(means, scales, self.betas))
        return self._motion[1]


def behind_camera(viewmat: Tensor) -> Tensor:
    """A point one unit behind a camera, which no camera near this one sees. viewmat [4, 4] world to camera -> [3]."""
    rotation, translation = viewmat[:3, :3], viewmat[:3, 3]
    return torch.linalg.solve(rotation, torch.tensor([0.0, 0.0, -1.0]).to(viewmat) - translation)
