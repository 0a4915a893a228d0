"""Candidate sets: which rows can a view make visible, computed on a copy of the state that lags some Adam steps behind.

The set must never miss a row that gsplat's rasterization would give ``radii > 0`` once the missing steps are applied,
and should exceed the visible rows by little. Two facts give it: how far Adam can move a parameter (`adam_motion`), and
gsplat's visibility test evaluated over everything within that reach (`ViewTest`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import candidate_kernels as kernels
from odin_nerfstudio.runtime.adam_motion import MotionBound, adam_motion_bound

__all__ = [
    "MotionBound",
    "ViewTest",
    "adam_motion_bound",
    "candidate_ids",
    "candidate_mask",
    "candidate_mask_torch",
]

_UNIT = 2.0**-24
"""Largest relative rounding error of float32."""


@dataclass(frozen=True)
class ViewTest:
    """gsplat's visibility test for one pinhole camera, made conservative over a box of positions and a range of scales.

    gsplat (1.4.0) shows a row if its depth lies between the planes, its radius exceeds radius_clip, and the square of
    that radius around the projected mean meets the image. ``radius = ceil(3 sqrt(b + sqrt(max(0.01, b^2 - det))))``,
    where b is half the trace of the 2D covariance and det its determinant, blur included.

    - Position: every coordinate within d, so camera coordinate a within ``d sum_k |R_ak|``. Over that box, x / z is
      extreme in a corner; only the part in front of the near plane counts.
    - Radius: the outer root's argument is at most the largest eigenvalue of the covariance plus 0.1 (the root of 0.01).
      That eigenvalue is at most ``s^2 |R|^2 |J|^2 + eps2d`` with the largest scale s, whatever the rotation, and
      ``|J|^2 <= f^2 / z^2 (1 + u^2 + v^2)``, with the longer focal length f and gsplat's clamped direction (u, v).
    - Rounding, gsplat's and this code's, u = 2^-24: camera coordinates are sums of four products, off by at most
      ``4 u (|R| |p|_1 + |t|)`` on each side, and a lagging position is rounded once per missing step. Entries of the 2D
      covariance are off by less than 400 u of its norm, and ``b^2 - det`` by 6 u b^2, which the root turns into
      6e-4 b: a factor of 1.001 on the variance covers both. Sums of pixels get 32 u of their terms.
    """

    packed: np.ndarray
    """Constants in the order that the kernel reads them. [35] float32."""

    @staticmethod
    def of(
        viewmat: Tensor,
        K: Tensor,
        width: int,
        height: int,
        *,
        near: float = 0.01,
        far: float = 1e10,
        eps2d: float = 0.3,
        radius_clip: float = 0.0,
        max_lag: int = 16,
    ) -> ViewTest:
        """Constants of one view.

        Args:
            viewmat: World to camera. [4, 4] or [1, 4, 4].
            K: Pinhole intrinsics without skew, in pixels. [3, 3] or [1, 3, 3].
            width, height: Image size in pixels.
            near, far: Planes, as given to gsplat's rasterization.
            eps2d: Blur added to the 2D covariance, in pixels^2.
            radius_clip: Radii up to this one are invisible, in pixels.
            max_lag: Most updates that a row can lack (enters the rounding slack only).

        Raises:
            ValueError: A matrix of another shape, with skew, without focal lengths, or not finite.
        """
        V = viewmat.detach().reshape(-1, 4, 4)[0].double().cpu().numpy() if viewmat.numel() == 16 else None
        C = K.detach().reshape(-1, 3, 3)[0].double().cpu().numpy() if K.numel() == 9 else None
        if V is None or C is None:
            raise ValueError(
                f"viewmat, K: shapes {tuple(viewmat.shape)}, {tuple(K.shape)}, expected one [4, 4] and one [3, 3]"
            )
        fx, fy, cx, cy = C[0, 0], C[1, 1], C[0, 2], C[1, 2]
        if not (np.isfinite(V).all() and np.isfinite(C).all() and fx > 0 and fy > 0 and C[0, 1] == 0 and C[1, 0] == 0):
            raise ValueError(
                "viewmat, K: not finite, or K with skew or without positive focal lengths; undistort the camera"
            )
        if not (0 < near < far and eps2d >= 0 and width > 0 and height > 0):
            raise ValueError(
                f"near, far, eps2d, width, height: {near}, {far}, {eps2d}, {width}, {height} are no camera"
            )
        R, t = V[:3, :3], V[:3, 3]
        up = 1 + 8 * _UNIT
        norms = np.abs(R).sum(1) * up
        slack = (16 + 2 * max_lag) * _UNIT
        margin_x, margin_y = 0.15 * width / fx, 0.15 * height / fy
        spread = 1.001 * (np.linalg.norm(R, 2) * max(fx, fy)) ** 2
        pixel = 32 * _UNIT
        values = [
            *np.concatenate([R, t[:, None]], 1).ravel(), *norms, slack * np.abs(R).max(), slack * np.abs(t).max(),
            fx, fy, cx, cy, width, height,
            -(cx / fx + margin_x), (width - cx) / fx + margin_x, -(cy / fy + margin_y), (height - cy) / fy + margin_y,
            spread, 1.001 * (eps2d + 0.1), near * (1 - 4 * _UNIT), far * up, radius_clip,
            pixel, pixel * (abs(cx) + width), pixel * (abs(cy) + height),
        ]  # fmt: skip
        return ViewTest(np.array(values, np.float64).astype(np.float32))


def candidate_mask(
    means: Tensor,
    log_scales: Tensor,
    view: ViewTest,
    motion: MotionBound,
    *,
    versions: Tensor | None = None,
    step: int = 0,
    least_lag: int = 0,
    extra: Tensor | None = None,
    variance: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Rows that the view can make visible (radii > 0) at `step`, though the state given may lack updates before it.

    Args:
        means: Positions. [N, 3] float32.
        log_scales: Logarithms of the scales, as splatfacto stores them. [N, 3] float32.
        view: The camera.
        motion: How far rows can move, for every lag that occurs.
        versions: Row i lacks the updates of steps versions[i] .. step - 1; None: least_lag of them. [N] int32.
        step: Step of the task.
        least_lag: Treat every row as lacking at least that many updates.
        extra: How far each row's position can move beyond `motion` (noise, see `noise.PositionNoise`). [N] float32.
        variance: What is added to each row's variance in 3D (a smoothing filter), squared scene units. [N] float32.
        out: Where to write the mask. [N] uint8.

    Returns:
        The mask and the number of ones in it. [N] uint8.

    Raises:
        ValueError: A shape or dtype does not fit, or a row lags by more than `motion` covers.
    """
    n = means.shape[0]
    if means.shape != (n, 3) or log_scales.shape != (n, 3) or means.dtype != torch.float32 != log_scales.dtype:
        raise ValueError(
            f"means, log_scales: {means.dtype} {tuple(means.shape)}, {tuple(log_scales.shape)}, not float32 [N, 3]"
        )
    if versions is not None and (versions.shape != (n,) or versions.dtype != torch.int32):
        raise ValueError(f"versions: {versions.dtype} {tuple(versions.shape)}, expected int32 [{n}]")
    for name, given in (("extra", extra), ("variance", variance)):
        if given is not None and (given.shape != (n,) or given.dtype != torch.float32):
            raise ValueError(f"{name}: {given.dtype} {tuple(given.shape)}, expected float32 [{n}]")
    if out is None:
        out = torch.empty(n, dtype=torch.uint8, device=means.device)
    elif out.shape != (n,) or out.dtype != torch.uint8:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}, expected uint8 [{n}]")
    if means.device.type != "cpu":
        out.copy_(
            candidate_mask_torch(
                means,
                log_scales,
                view,
                motion,
                versions=versions,
                step=step,
                least_lag=least_lag,
                extra=extra,
                variance=variance,
            )
        )
        return out, int(out.sum())
    count = kernels.mark(
        means.detach().numpy(), log_scales.detach().numpy(),
        np.empty(0, np.int32) if versions is None else versions.numpy(), step, least_lag,
        motion.means, motion.log_scales, _per_row(extra), _per_row(variance), view.packed, out.numpy(),
    )  # fmt: skip
    if count < 0:
        refuse_lag(int(-1 - count), motion)
    return out, int(count)


def _per_row(values: Tensor | None) -> np.ndarray:
    return np.empty(0, np.float32) if values is None else values.numpy()


def candidate_ids(
    means: Tensor,
    log_scales: Tensor,
    view: ViewTest,
    motion: MotionBound,
    *,
    versions: Tensor | None = None,
    step: int = 0,
    least_lag: int = 0,
) -> Tensor:
    """The rows that `candidate_mask` marks, ascending. [K] int32, on the device of means."""
    mask, count = candidate_mask(means, log_scales, view, motion, versions=versions, step=step, least_lag=least_lag)
    if mask.device.type != "cpu":
        return mask.nonzero().flatten().to(torch.int32)
    ids = torch.empty(count, dtype=torch.int32)
    kernels.mask_to_ids(mask.numpy(), ids.numpy())
    return ids


def refuse_lag(lag: int, motion: MotionBound) -> None:
    raise ValueError(f"versions, least_lag: a row lags by {lag} steps, motion covers {len(motion.means) - 1}")


@dataclass(frozen=True)
class CameraBox:
    """Where the centres of rows can be in a view's camera frame, and by how much log-scales can have grown."""

    low: Tensor
    """[N, 3]"""
    high: Tensor
    """[N, 3]"""
    inverse_near: Tensor
    """One over the least and the largest depth, neither nearer than the near plane. [N]"""
    inverse_far: Tensor
    grow: Tensor
    """[N]"""


def camera_box(
    means: Tensor,
    view: ViewTest,
    motion: MotionBound,
    versions: Tensor | None,
    step: int,
    least_lag: int,
    extra: Tensor | None = None,
) -> CameraBox:
    """What the updates that a copy lacks leave possible, in torch's operations. means [N, 3], extra: more motion [N].

    Raises:
        ValueError: A row lags by more than `motion` covers.
    """
    device = means.device
    c = view.packed.tolist()
    matrix = torch.from_numpy(view.packed[:12]).to(device).reshape(3, 4)
    lag = torch.full(means.shape[:1], least_lag, dtype=torch.long, device=device)
    if versions is not None:
        lag = torch.clamp(step - versions.long(), min=least_lag)
    if means.shape[0] and int(lag.max()) >= len(motion.means):
        refuse_lag(int(lag.max()), motion)
    d = torch.from_numpy(motion.means).to(device)[lag]
    if extra is not None:
        d = d + extra
    grow = torch.from_numpy(motion.log_scales).to(device)[lag]
    e = c[15] * (means.abs().sum(1) + d) + c[16]
    # not a matrix product, which may round to TF32
    camera = (means[:, None, :] * matrix[None, :, :3]).sum(-1) + matrix[:, 3]
    reach = d[:, None] * torch.tensor(c[12:15], device=device) + e[:, None]
    low, high = camera - reach, camera + reach
    return CameraBox(low, high, 1 / low[:, 2].clamp(min=c[29]), 1 / high[:, 2].clamp(min=c[29]), grow)


def candidate_mask_torch(
    means: Tensor,
    log_scales: Tensor,
    view: ViewTest,
    motion: MotionBound,
    *,
    versions: Tensor | None = None,
    step: int = 0,
    least_lag: int = 0,
    extra: Tensor | None = None,
    variance: Tensor | None = None,
) -> Tensor:
    """`candidate_mask` in torch's operations, for any device: the same test, with other roundings. [N] bool.

    Raises:
        ValueError: A row lags by more than `motion` covers.
    """
    means, log_scales = means.detach(), log_scales.detach()
    c = view.packed.tolist()
    box = camera_box(means, view, motion, versions, step, least_lag, extra)
    low, high, inverse_near, inverse_far = box.low, box.high, box.inverse_near, box.inverse_far
    bounds, clamped = [], []
    for axis, first, last in ((0, c[23], c[24]), (1, c[25], c[26])):
        u0 = low[:, axis] * torch.where(low[:, axis] > 0, inverse_far, inverse_near)
        u1 = high[:, axis] * torch.where(high[:, axis] > 0, inverse_near, inverse_far)
        bounds.append((u0, u1))
        clamped.append(torch.maximum(u0.clamp(first, last).abs(), u1.clamp(first, last).abs()))
    largest = log_scales.amax(1) + box.grow
    size = torch.exp(2 * largest) if variance is None else torch.exp(2 * largest) + variance
    spread = size * c[27] * inverse_near**2 * (1 + clamped[0] ** 2 + clamped[1] ** 2)
    radius = torch.ceil(3 * torch.sqrt(spread + c[28]))
    outside = (high[:, 2] < c[29]) | (low[:, 2] > c[30]) | (radius <= c[31])
    for (u0, u1), focal, center, size, offset in zip(bounds, c[17:19], c[19:21], c[21:23], c[33:35]):
        p0, p1 = focal * u0 + center, focal * u1 + center
        extent = radius + c[32] * (radius + torch.maximum(p0.abs(), p1.abs())) + offset
        outside |= (p1 + extent <= 0) | (p0 - extent >= size)
    return ~outside
