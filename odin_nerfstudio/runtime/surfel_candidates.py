"""Candidate sets of surfels: which rows can a view make visible under gsplat's 2DGS projection.

gsplat (1.4.0) shows a surfel with half axes a, b and centre p = (x, y, z) in the camera's frame if z lies between the
planes, its radius exceeds radius_clip, and the square of that radius around its projected centre meets the image.
With P = a a^T + b b^T, q = P_zz and slopes u = x / z, the centre lies at ``m = f (u z^2 - P_xz) / (z^2 - q)`` pixels
from the principal point, and the radius is ``ceil(3 sqrt(max(1e-4, h_x, h_y)))`` with

    h_x = (f^2 P_xx - 2 f m P_xz + m^2 P_zz - (f x - m z)^2) / (z^2 - q).

Let s be the larger half axis. Whatever the rotation, the largest eigenvalue of P is s^2, so ``q <= s^2``,
``|P_xz| <= s^2 / 2`` and ``h_x <= s^2 (f^2 + m^2) / (z^2 - s^2)``. With the share ``r = s^2 / z^2`` and ``g = 1 / (1 -
r)`` the centre lies between ``f (u or g u) -+ f r g / 2``. All of it grows with r, so over a box of positions and a
range of scales the least depth and the largest scale bound it; u is extreme in the box's corners. Surfels with r >=
1/16 may reach behind the camera soon after, where nothing of this holds: they are candidates wherever they lie between
the planes.

Rounding: that of positions and pixels as in `candidates.ViewTest`, whose constants this test uses; half axes are off by
a relative 1e-6, which the factor 1.001 on s^2 covers. gsplat's kernels subtract squares of pixel coordinates in
float32: with B the largest of these (principal point included), u = 2^-24 and r < 1/16, entries of the ray transform
are off by 2 u z B, f by 16 u, products by another 4 u, so a centre by 22 u B and a squared extent by ``2 * 22 u B^2 +
26 u B^2 + 4 u B^2``: 80 u B^2 covers it. The package's CPU kernels compute it in float64, without that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import surfel_candidate_kernels as kernels
from odin_nerfstudio.runtime.candidates import MotionBound, ViewTest, camera_box, refuse_lag
from odin_nerfstudio.runtime.reads import VisibilityReads

GSPLAT_ROUNDING = np.float32(80 * 2.0**-24)
"""Of squared extents, relative to squared pixel coordinates, in gsplat's CUDA kernels."""


def surfel_mask(
    means: Tensor,
    log_scales: Tensor,
    view: ViewTest,
    motion: MotionBound,
    *,
    versions: Tensor | None = None,
    step: int = 0,
    least_lag: int = 0,
    exact: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Surfels that the view can make visible (radii > 0) at `step`, though the state given may lack updates before it.

    Args:
        means: Positions. [N, 3] float32.
        log_scales: Logarithms of the scales; the third is not looked at. [N, 3] float32.
        view: The camera.
        motion: How far rows can move, for every lag that occurs.
        versions: Row i lacks the updates of steps versions[i] .. step - 1; None: least_lag of them. [N] int32.
        step: Step of the task.
        least_lag: Treat every row as lacking at least that many updates.
        exact: The renderer computes extents without cancellation, as the package's CPU kernels do.
        out: Where to write the mask. [N] uint8.

    Returns:
        The mask and the number of ones in it. [N] uint8.

    Raises:
        ValueError: A shape or dtype does not fit, or a row lags by more than `motion` covers.
    """
    n = means.shape[0]
    if means.shape != (n, 3) or log_scales.shape != (n, 3) or not means.dtype == torch.float32 == log_scales.dtype:
        raise ValueError(
            f"means, log_scales: {means.dtype} {tuple(means.shape)}, {tuple(log_scales.shape)}, not float32 [N, 3]"
        )
    if versions is not None and (versions.shape != (n,) or versions.dtype != torch.int32):
        raise ValueError(f"versions: {versions.dtype} {tuple(versions.shape)}, expected int32 [{n}]")
    if out is None:
        out = torch.empty(n, dtype=torch.uint8, device=means.device)
    elif out.shape != (n,) or out.dtype != torch.uint8:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}, expected uint8 [{n}]")
    if means.device.type != "cpu":
        out.copy_(
            surfel_mask_torch(
                means, log_scales, view, motion, versions=versions, step=step, least_lag=least_lag, exact=exact
            )
        )
        return out, int(out.sum())
    count = kernels.mark(
        means.detach().numpy(), log_scales.detach().numpy(),
        np.empty(0, np.int32) if versions is None else versions.numpy(), step, least_lag,
        motion.means, motion.log_scales, view.packed, np.float32(0) if exact else GSPLAT_ROUNDING, out.numpy(),
    )  # fmt: skip
    if count < 0:
        refuse_lag(int(-1 - count), motion)
    return out, int(count)


def surfel_mask_torch(
    means: Tensor,
    log_scales: Tensor,
    view: ViewTest,
    motion: MotionBound,
    *,
    versions: Tensor | None = None,
    step: int = 0,
    least_lag: int = 0,
    exact: bool = False,
) -> Tensor:
    """`surfel_mask` in torch's operations, for any device: the same test, with other roundings. [N] bool.

    Raises:
        ValueError: A row lags by more than `motion` covers.
    """
    means, log_scales = means.detach(), log_scales.detach()
    c = view.packed.tolist()
    box = camera_box(means, view, motion, versions, step, least_lag)
    low, high, inverse_near, inverse_far = box.low, box.high, box.inverse_near, box.inverse_far
    largest = log_scales[:, :2].amax(1) + box.grow
    share = torch.exp(2 * largest) * (c[27] / max(c[17], c[18]) ** 2) * inverse_near**2
    steep = ~(share < float(kernels.STEEP))
    share = share.clamp(max=float(kernels.STEEP))
    more = 1 / (1 - share)
    turn = 0.5 * share * more
    bounds, variances, sizes = [], [], []
    for axis, focal, center in ((0, c[17], c[19]), (1, c[18], c[20])):
        u0 = low[:, axis] * torch.where(low[:, axis] > 0, inverse_far, inverse_near)
        u1 = high[:, axis] * torch.where(high[:, axis] > 0, inverse_near, inverse_far)
        u0, u1 = torch.minimum(u0, u0 * more) - turn, torch.maximum(u1, u1 * more) + turn
        farthest = focal * torch.maximum(u0.abs(), u1.abs())
        bounds.append((focal * u0 + center, focal * u1 + center))
        variances.append(focal**2 + farthest**2)
        sizes.append((farthest + abs(center)) ** 2)
    noise = (0.0 if exact else float(GSPLAT_ROUNDING)) * torch.maximum(*sizes) + float(kernels.LEAST_VARIANCE)
    radius = torch.ceil(3 * torch.sqrt(share * more * torch.maximum(*variances) + noise))
    beside = radius <= c[31]
    for (p0, p1), size, offset in zip(bounds, c[21:23], c[33:35]):
        extent = radius + c[32] * (radius + torch.maximum(p0.abs(), p1.abs())) + offset
        beside |= (p1 + extent <= 0) | (p0 - extent >= size)
    return ~((high[:, 2] < c[29]) | (low[:, 2] > c[30])) & (~beside | steep)


@dataclass(eq=False)
class SurfelReads(VisibilityReads):
    """Marks the primitives that gsplat's 2DGS rasterization, or the package's own on the CPU, can make visible.

    Raises:
        ValueError: (mark) A row lags by more than `MAX_LAG` steps.
    """

    def _mark(self, test: ViewTest, motion: MotionBound, out: Tensor, **known: Any) -> int:
        if known.pop("extra", None) is not None:
            raise ValueError("noise: surfels have no noise on their positions")
        means, scales = self.parameters[self.means].detach(), self.parameters[self.scales].detach()
        return surfel_mask(means, scales, test, motion, exact=means.device.type == "cpu", out=out, **known)[1]


def warm_up() -> None:
    """Compiles or loads the kernel, with the types that training uses."""
    view = ViewTest.of(torch.eye(4), torch.diag(torch.tensor([32.0, 32.0, 1.0])), 32, 32)
    motion = MotionBound.steady(1e-4, 5e-3, (0.9, 0.999), max_lag=1)
    surfel_mask(torch.zeros(8, 3), torch.zeros(8, 3), view, motion, versions=torch.zeros(8, dtype=torch.int32), step=1)
