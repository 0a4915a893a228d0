"""The photometric loss of splat training: L1 mixed with SSIM, fused with its gradient on the CPU.

The meaning is splatfacto's: ``pytorch_msssim.SSIM(data_range=1, size_average=True, channel=3)``, an 11 x 11 Gaussian
window of sigma 1.5 over the valid part of the image. That package runs where the fused kernel does not: on other
devices, other dtypes and images smaller than the window, whose short side it leaves unfiltered, with a warning.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.rendering import losses_kernels as kernels

_SIGMA = 1.5
_ROWS_PER_THREAD = 64
"""Least rows for a thread: the ten rows on its border are filtered twice."""


def photometric_loss(pred: Tensor, gt: Tensor, ssim_lambda: float) -> Tensor:
    """``(1 - ssim_lambda) mean |pred - gt| + ssim_lambda (1 - SSIM(pred, gt))``.

    On the CPU in float32 the gradient is computed along with the value, and the result has the same bits for any number
    of threads. To ignore pixels, multiply both images by a mask.

    Args:
        pred: Rendered image, values 0 to 1. [H, W, 3].
        gt: Training image; gets no gradient. [H, W, 3].
        ssim_lambda: Weight of the SSIM term, 0 to 1.

    Returns:
        The loss. Scalar.

    Raises:
        ValueError: The images are not both [H, W, 3] of one dtype and device.
    """
    _check(pred, gt)
    gt = gt.detach()
    if ssim_lambda == 0:
        return torch.nn.functional.l1_loss(pred, gt)
    if _fusable(pred):
        return _weighted(pred, gt, ssim_lambda, 1 - ssim_lambda, -ssim_lambda)
    return (1 - ssim_lambda) * (gt - pred).abs().mean() + ssim_lambda * (1 - _library_ssim(pred, gt))


def ssim(pred: Tensor, gt: Tensor) -> Tensor:
    """Mean structural similarity of two images; differentiable by `pred`.

    Args:
        pred: Rendered image, values 0 to 1. [H, W, 3].
        gt: Reference image; gets no gradient. [H, W, 3].

    Returns:
        The mean of the SSIM map, at most 1. Scalar.

    Raises:
        ValueError: The images are not both [H, W, 3] of one dtype and device.
    """
    _check(pred, gt)
    if _fusable(pred):
        return _weighted(pred, gt.detach(), 0.0, 0.0, 1.0)
    return _library_ssim(pred, gt.detach())


def _check(pred: Tensor, gt: Tensor) -> None:
    if pred.dim() != 3 or pred.shape[-1] != 3 or pred.numel() == 0:
        raise ValueError(f"pred: shape {tuple(pred.shape)}, expected [H, W, 3]")
    if gt.shape != pred.shape or gt.dtype != pred.dtype or gt.device != pred.device:
        raise ValueError(
            f"gt: {gt.dtype} {tuple(gt.shape)} on {gt.device} does not match"
            f" pred: {pred.dtype} {tuple(pred.shape)} on {pred.device}"
        )


def _fusable(image: Tensor) -> bool:
    return image.device.type == "cpu" and image.dtype == torch.float32 and min(image.shape[:2]) >= kernels.WINDOW


def _library_ssim(pred: Tensor, gt: Tensor) -> Tensor:
    from pytorch_msssim import ssim as library  # slow to import and rarely needed

    a, b = (image.permute(2, 0, 1)[None] for image in (pred, gt))
    return library(a, b, data_range=1.0, size_average=True, win_size=kernels.WINDOW, win_sigma=_SIGMA)


@functools.lru_cache(maxsize=1)
def _window() -> np.ndarray:
    """The Gaussian window, made as pytorch_msssim makes it. [11] float32."""
    x = torch.arange(kernels.WINDOW, dtype=torch.float32) - kernels.WINDOW // 2
    g = torch.exp(-(x**2) / (2 * _SIGMA**2))
    return (g / g.sum()).numpy()


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="photometric")


def photometric_terms(
    pred: Tensor, gt: Tensor, l1_weight: float, ssim_weight: float, with_gradient: bool, threads: int | None = None
) -> tuple[float, float, Tensor | None]:
    """Mean |pred - gt|, mean SSIM, and the gradient of ``l1_weight L1 + ssim_weight SSIM`` by pred.

    Args:
        pred, gt: Images. [H, W, 3] float32 on the CPU, contiguous, at least 11 x 11.
        l1_weight, ssim_weight: Weights of the two means in the gradient.
        with_gradient: Whether to compute the gradient. [H, W, 3], else None.
        threads: Threads to use; torch's number if None. The result does not depend on it.
    """
    height, width, _ = pred.shape
    x, y = (image.detach().numpy().reshape(height, -1) for image in (pred, gt))
    gradient = torch.empty(pred.shape) if with_gradient else torch.empty(0, 0)
    out = gradient.numpy().reshape(height, -1) if with_gradient else gradient.numpy()
    l1_sums = np.zeros(height)
    ssim_sums = np.zeros(height - kernels.WINDOW + 1)
    l1_scale = np.float32(l1_weight / x.size)
    ssim_scale = np.float32(ssim_weight / (ssim_sums.size * (width - kernels.WINDOW + 1) * 3))
    w = _window()

    def work(first: int, last: int) -> None:
        kernels.photometric_rows(x, y, w, first, last, l1_scale, ssim_scale, with_gradient, out, l1_sums, ssim_sums)

    parts = min(torch.get_num_threads() if threads is None else threads, max(1, height // _ROWS_PER_THREAD))
    if parts == 1:
        work(0, height)
    else:
        cuts = [height * k // parts for k in range(parts + 1)]
        list(_pool(parts).map(work, cuts[:-1], cuts[1:]))
    count = ssim_sums.size * (width - kernels.WINDOW + 1) * 3
    return float(l1_sums.sum()) / x.size, float(ssim_sums.sum()) / count, gradient if with_gradient else None


def _weighted(pred: Tensor, gt: Tensor, bias: float, l1_weight: float, ssim_weight: float) -> Tensor:
    """``bias + l1_weight mean |pred - gt| + ssim_weight SSIM`` with its gradient by pred. Scalar."""
    with_gradient = pred.requires_grad and torch.is_grad_enabled()
    l1, similarity, gradient = photometric_terms(
        pred.contiguous(), gt.contiguous(), l1_weight, ssim_weight, with_gradient
    )
    value = torch.tensor(bias + l1_weight * l1 + ssim_weight * similarity, dtype=torch.float32)
    if gradient is None:
        return value
    return _Attach.apply(pred, value, gradient)  # type: ignore[return-value]


class _Attach(torch.autograd.Function):
    """A value whose gradient by `pred` is known already."""

    @staticmethod
    def forward(ctx: Any, pred: Tensor, value: Tensor, gradient: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None, None
