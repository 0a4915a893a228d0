"""How finely cameras sample the places of primitives: the 3D smoothing filter of Mip-Splatting (Yu et al. 2024).

A camera at depth z with focal length f pixels samples the scene every z / f units. What is finer than the finest
sampling of any training view was never observed; convolved with a Gaussian of that size, a primitive cannot show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

FILTER_VARIANCE = 0.2
"""Variance of the filter in units of the sampling interval squared, as in Mip-Splatting."""

MARGIN = 1.15
"""A primitive counts as seen up to this factor beyond the image's border."""

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


def sampling_intervals(
    means: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Tensor,
    near: float = 0.01,
    largest: Callable[[float], float] = float,
) -> Tensor:
    """Smallest distance between neighbouring samples at each position, over the views that see it.

    Args:
        means: positions. ``[N, 3]`` float32.
        viewmats: world to camera. ``[V, 4, 4]``
        Ks: intrinsics in pixels. ``[V, 3, 3]``
        sizes: width and height in pixels. ``[V, 2]``
        near: positions nearer to a camera than this are not seen by it.
        largest: where these are some positions of a model, its largest value from theirs.

    Returns:
        Scene units, ``[N]`` float32; positions that no view sees get the largest value of the others (0 without any).
    """
    views = packed_views(viewmats, Ks, sizes)
    if means.device.type == "cpu":
        out = np.empty(means.shape[0], np.float32)
        _intervals(means.detach().numpy(), views.cpu().numpy(), np.float32(near), out)
        found = torch.from_numpy(out)
    else:
        found = _intervals_torch(means.detach(), views.to(means.device), near)
    seen = torch.isfinite(found)
    return torch.where(seen, found, largest(float(found[seen].max()) if bool(seen.any()) else 0.0))


def packed_views(viewmats: Tensor, Ks: Tensor, sizes: Tensor) -> Tensor:
    """Per view the upper rows of its matrix, largest |x / z| and |y / z|, and 1 over the focal length. ``[V, 15]``"""
    f, centre = Ks[:, [0, 1], [0, 1]], Ks[:, :2, 2]
    # a direction counts by how far the image and its margin reach from the axis on the farther side
    reach = MARGIN * torch.maximum(centre, sizes.to(centre) - centre) / f
    return torch.cat((viewmats[:, :3].reshape(-1, 12), reach, 1 / f.amax(1, keepdim=True)), 1).float()


@numba.njit(**_OPTIONS)
def _intervals(means, views, near, out):  # type: ignore[no-untyped-def]
    for i in range(means.shape[0]):
        x, y, z = means[i, 0], means[i, 1], means[i, 2]
        best = np.float32(np.inf)
        for v in range(views.shape[0]):
            c = views[v]
            depth = ((c[8] * x + c[9] * y) + c[10] * z) + c[11]
            if depth > near and depth * c[14] < best:
                across = abs(((c[0] * x + c[1] * y) + c[2] * z) + c[3])
                along = abs(((c[4] * x + c[5] * y) + c[6] * z) + c[7])
                if across <= depth * c[12] and along <= depth * c[13]:
                    best = depth * c[14]
        out[i] = best


def _intervals_torch(means: Tensor, views: Tensor, near: float) -> Tensor:
    """The kernel in torch's operations, with its bits."""
    x, y, z = means.unbind(1)
    best = torch.full_like(x, float("inf"))
    for c in views.tolist():
        depth = ((c[8] * x + c[9] * y) + c[10] * z) + c[11]
        across = (((c[0] * x + c[1] * y) + c[2] * z) + c[3]).abs()
        along = (((c[4] * x + c[5] * y) + c[6] * z) + c[7]).abs()
        seen = (depth > near) & (across <= depth * c[12]) & (along <= depth * c[13])
        best = torch.where(seen, torch.minimum(best, depth * c[14]), best)
    return best


def smoothed(log_scales: Tensor, logits: Tensor, intervals: Tensor) -> tuple[Tensor, Tensor]:
    """Primitives convolved with the filter: larger, and fainter by as much, so that their integral stays.

    Args:
        log_scales: ``[N, 3]``.
        logits: of opacities. ``[N, 1]``
        intervals: see :func:`sampling_intervals`. ``[N, 1]``

    Returns:
        Scales ``[N, 3]`` and opacities ``[N, 1]``. Differentiable.
    """
    variance = torch.exp(2 * log_scales)
    wider = variance + FILTER_VARIANCE * intervals**2
    kept = torch.sqrt((variance / wider).prod(dim=1, keepdim=True))
    return torch.sqrt(wider), torch.sigmoid(logits) * kept
