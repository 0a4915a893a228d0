"""The fused photometric loss equals pytorch_msssim's SSIM mixed with L1, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from pytorch_msssim import SSIM
from torch import Tensor

from odin_nerfstudio.rendering.losses import photometric_loss, photometric_terms, ssim

SIZES = [(11, 11), (11, 40), (37, 11), (12, 13), (64, 48), (131, 77), (200, 150)]


def images(height: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A noisy image with a part equal to gt (no slope there) and a black part, and a smooth gt. [H, W, 3] each."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, height // 8 + 2, width // 8 + 2, generator=generator)
    gt = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0].permute(1, 2, 0).contiguous()
    pred = (gt + 0.1 * torch.randn(gt.shape, generator=generator)).clamp(0, 1)
    pred[: height // 4] = gt[: height // 4]
    pred[:, : width // 5] = 0
    gt[:, : width // 6] = 0
    return pred, gt


def reference(pred: Tensor, gt: Tensor, ssim_lambda: float) -> Tensor:
    """Splatfacto's main loss."""
    similarity = SSIM(data_range=1.0, size_average=True, channel=3)
    a, b = gt.permute(2, 0, 1)[None], pred.permute(2, 0, 1)[None]
    return (1 - ssim_lambda) * torch.abs(gt - pred).mean() + ssim_lambda * (1 - similarity(a, b))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ssim_lambda", [0.0, 0.2, 1.0])
def test_value_and_gradient(size: tuple[int, int], ssim_lambda: float) -> None:
    pred, gt = images(*size)
    exact, fused = pred.double().requires_grad_(), pred.clone().requires_grad_()
    expected, loss = reference(exact, gt.double(), ssim_lambda), photometric_loss(fused, gt, ssim_lambda)
    (3 * expected).backward()
    (3 * loss).backward()
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=2e-6)
    assert exact.grad is not None and fused.grad is not None
    scale = float(exact.grad.abs().max())
    assert float((fused.grad - exact.grad).abs().max()) < 1e-4 * scale


def test_no_worse_than_the_float32_reference() -> None:
    pred, gt = images(300, 260, seed=1)
    grads = []
    for loss, dtype in ((reference, torch.float64), (reference, torch.float32), (photometric_loss, torch.float32)):
        leaf = pred.to(dtype, copy=True).requires_grad_()
        loss(leaf, gt.to(dtype), 0.2).backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.double())
    library, fused = (float((g - grads[0]).abs().max()) for g in grads[1:])
    assert fused <= 2 * library


@pytest.mark.parametrize("size", [(11, 20), (131, 77), (400, 50)])
def test_threads_do_not_change_bits(size: tuple[int, int]) -> None:
    pred, gt = images(*size)
    results = [photometric_terms(pred, gt, 0.8, -0.2, True, threads) for threads in (1, 2, 3, 5)]
    for l1, similarity, gradient in results[1:]:
        assert (l1, similarity) == results[0][:2]
        assert gradient is not None and results[0][2] is not None and torch.equal(gradient, results[0][2])


def test_ssim_alone() -> None:
    pred, gt = images(90, 70)
    library = SSIM(data_range=1.0, size_average=True, channel=3)
    expected = library(pred.permute(2, 0, 1)[None], gt.permute(2, 0, 1)[None])
    torch.testing.assert_close(ssim(pred, gt), expected, rtol=0, atol=2e-6)
    assert float(ssim(gt, gt)) == pytest.approx(1.0, abs=1e-6)
    leaf = pred.clone().requires_grad_()
    ssim(leaf, gt).backward()
    assert leaf.grad is not None and float((leaf.grad * (gt - pred)).sum()) > 0  # towards the reference
    with torch.no_grad():
        assert not ssim(leaf, gt).requires_grad
        assert not photometric_loss(leaf, gt, 0.2).requires_grad


@pytest.mark.parametrize("size", [(9, 30), (30, 10), (8, 8)])
def test_images_smaller_than_the_window(size: tuple[int, int]) -> None:
    pred, gt = images(*size)
    pred.requires_grad_()
    with pytest.warns(UserWarning, match="Skipping Gaussian Smoothing"):
        loss = photometric_loss(pred, gt, 0.2)
    with pytest.warns(UserWarning):
        assert torch.equal(loss, reference(pred, gt, 0.2))
    loss.backward()
    assert pred.grad is not None and bool(torch.isfinite(pred.grad).all())


def test_strided_images_and_other_dtypes() -> None:
    pred, gt = images(40, 50)
    flipped = pred.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert torch.equal(photometric_loss(flipped, gt, 0.2), photometric_loss(pred, gt, 0.2))
    photometric_loss(flipped, gt, 0.2).backward()
    assert flipped.grad is not None and flipped.grad.shape == pred.shape
    double = photometric_loss(pred.double(), gt.double(), 0.2)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double, reference(pred.double(), gt.double(), 0.2))


@pytest.mark.parametrize(
    ("argument", "pred", "gt"),
    [
        ("pred", torch.zeros(3, 20, 20), torch.zeros(3, 20, 20)),
        ("pred", torch.zeros(1, 20, 20, 3), torch.zeros(1, 20, 20, 3)),
        ("gt", torch.zeros(20, 20, 3), torch.zeros(20, 21, 3)),
        ("gt", torch.zeros(20, 20, 3), torch.zeros(20, 20, 3, dtype=torch.float64)),
    ],
)
def test_wrong_images_are_named(argument: str, pred: Tensor, gt: Tensor) -> None:
    for loss in (lambda: photometric_loss(pred, gt, 0.2), lambda: ssim(pred, gt)):
        with pytest.raises(ValueError, match=f"^{argument}: "):
            loss()
