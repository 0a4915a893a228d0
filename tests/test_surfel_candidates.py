"""Candidate sets of surfels never miss a row that becomes visible, whatever Adam does in the steps that are missing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_candidates import BETAS, aerial_scene, camera
from torch import Tensor

from odin_nerfstudio.rendering import rasterization_2dgs
from odin_nerfstudio.rendering.dense_surfels import project_surfels
from odin_nerfstudio.runtime.adam_motion import MotionBound, adam_motion_bound
from odin_nerfstudio.runtime.candidates import ViewTest
from odin_nerfstudio.runtime.surfel_candidates import surfel_mask, surfel_mask_torch

ROWS = 1500
Scene = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # means, log_scales, quats, viewmat, K


def visible(scene: Scene, size: tuple[int, int]) -> Tensor:
    """gsplat's test in the arithmetic of its kernels, at the dtype of the scene. [N] bool."""
    means, log_scales, quats, viewmat, K = scene
    means2d, depths, _, radii, _ = project_surfels(means, quats, torch.exp(log_scales), viewmat, K)
    x, y = means2d.unbind(-1)
    seen = (depths >= 0.01) & (depths <= 1e10) & (radii > 0) & (x + radii > 0) & (x - radii < size[0])
    return seen & (y + radii > 0) & (y - radii < size[1])


def surfels_at_the_border(
    rng: np.random.Generator, viewmat: Tensor, K: Tensor, size: tuple[int, int], n: int = ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose box just about meets the image, at all depths and tilts, as means, log_scales, quats."""
    depth = 10.0 ** rng.uniform(-2.1, 2, n)
    depth[: n // 10] = 0.01 * (1 + 1e-3 * rng.standard_normal(n // 10))
    pose, focal = viewmat.double().numpy(), K.double().numpy()
    radius = 10.0 ** rng.uniform(-1, 3.5, n)
    scale = radius / 3 * depth / math.sqrt(focal[0, 0] * focal[1, 1])
    thinness = rng.standard_normal((n, 3)) * rng.choice([0.0, 0.1, 2.0], n)[:, None]
    logs = np.log(scale)[:, None] + thinness - thinness[:, :2].max(1, keepdims=True)
    log_scales, quats = (torch.tensor(x, dtype=torch.float32) for x in (logs, rng.standard_normal((n, 4))))
    side, along = rng.integers(0, 4, n), rng.uniform(-0.5, 1.5, n)
    jitter = 1 + rng.standard_normal(n) * 10.0 ** rng.uniform(-7, 0, n)
    means = torch.empty(0)
    for _ in range(5):  # the box depends on the position, and the position on the box
        gap = radius * jitter
        u = np.select([side == 0, side == 1], [-gap, size[0] + gap], along * size[0])
        v = np.select([side == 2, side == 3], [-gap, size[1] + gap], along * size[1])
        local = [(u - focal[0, 2]) / focal[0, 0] * depth, (v - focal[1, 2]) / focal[1, 1] * depth, depth]
        means = torch.tensor((np.stack(local, 1) - pose[:3, 3]) @ pose[:3, :3], dtype=torch.float32)
        scene = [t.double() for t in (means, quats, torch.exp(log_scales), viewmat, K)]
        radius = project_surfels(*scene)[3].numpy().clip(1, 1e6)
    return means, log_scales, quats


@given(
    seed=st.integers(0, 2**32 - 1),
    lag=st.integers(0, 6),
    means_lr=st.sampled_from([0.0, 1.6e-6, 1.6e-4, 1e-2, 1.0]),
    scales_lr=st.sampled_from([0.0, 5e-3, 0.1]),
)
@settings(max_examples=25, deadline=None)
def test_everything_within_reach_is_covered(seed: int, lag: int, means_lr: float, scales_lr: float) -> None:
    """Rows moved to corners and other points of the box that Adam can reach: seen by the renderer, so candidates."""
    rng = np.random.default_rng(seed)
    viewmat, K, size = camera(rng)
    means, log_scales, quats = surfels_at_the_border(rng, viewmat, K, size)
    lags = torch.from_numpy(rng.integers(0, lag + 1, ROWS).astype(np.int32))
    motion = MotionBound.steady(means_lr, scales_lr, BETAS, lag)
    view = ViewTest.of(viewmat, K, *size)
    known: dict[str, Any] = {"versions": 100 - lags, "step": 100}
    masks = {}
    for exact in (False, True):
        mask, count = surfel_mask(means, log_scales, view, motion, **known, exact=exact)
        assert count == int(mask.sum())
        masks[exact] = mask.bool() & surfel_mask_torch(means, log_scales, view, motion, **known, exact=exact)
    assert bool((masks[False] | ~masks[True]).all())
    reach = adam_motion_bound(BETAS) * lags[:, None].double()
    local = means.double() @ viewmat[:3, :3].double().T + viewmat[:3, 3].double()
    right, down, forward = viewmat[:3, :3].double()
    x, y = (-torch.sign(local[:, k : k + 1]) * axis for k, axis in ((0, right), (1, down)))  # towards the optical axis
    directions = [0 * x, x, y, x + y, x - forward, x + forward, y - forward, y + forward, x + y - forward]
    shares = [torch.sign(d) for d in directions] + [torch.from_numpy(rng.uniform(-1, 1, (ROWS, 3)))]
    for push, share in enumerate(shares):
        moved = (means.double() + means_lr * reach * share).float()
        grown = (log_scales.double() + scales_lr * reach * (push > 0)).float()
        for exact, dtype in ((False, torch.float32), (True, torch.float64)):  # gsplat's kernels, and the package's
            seen = visible((moved.to(dtype), grown.to(dtype), quats.to(dtype), viewmat.to(dtype), K.to(dtype)), size)
            missed = (seen & ~masks[exact]).nonzero().flatten().tolist()
            assert not missed, f"push {push}, exact {exact}: missed {missed[:5]}"


def test_the_renderer_is_covered() -> None:
    """The rasterizer's own radii, and how many rows too many there are."""
    means, log_scales, quats, viewmat, K, size = aerial_scene()
    *_, meta = rasterization_2dgs(
        means, quats, torch.exp(log_scales), torch.zeros(len(means)), torch.zeros(len(means), 1, 3), viewmat[None],
        K[None], *size, sh_degree=0,
    )  # fmt: skip
    seen = meta["radii"][0] > 0
    view = ViewTest.of(viewmat, K, *size)
    for exact, most in ((True, 0.05), (False, 0.06)):
        mask, count = surfel_mask(means, log_scales, view, MotionBound.steady(0.0, 0.0, BETAS, 0), exact=exact)
        assert bool((mask.bool() | ~seen).all())
        assert count <= (1 + most) * int(seen.sum())


def test_lags_and_broken_rows() -> None:
    means, log_scales, _, viewmat, K, size = aerial_scene(3000)
    view, motion = ViewTest.of(viewmat, K, *size), MotionBound.steady(0.01, 0.01, BETAS, 3)
    by_lag = [surfel_mask(means, log_scales, view, motion, least_lag=lag)[0] for lag in range(4)]
    versions = (10 - torch.arange(3000) % 4).to(torch.int32)
    mixed, _ = surfel_mask(means, log_scales, view, motion, versions=versions, step=10, least_lag=1)
    assert torch.equal(mixed, torch.stack([by_lag[max(1, k % 4)][k] for k in range(3000)]))
    for function in (surfel_mask, surfel_mask_torch):
        with pytest.raises(ValueError, match="lags by 4 steps, motion covers 3"):
            function(means, log_scales, view, motion, versions=versions, step=11)
    still = MotionBound.steady(0.0, 0.0, BETAS, 0)
    before = surfel_mask(means, log_scales, view, still)[0]
    log_scales[:, 2] = 50.0  # the third scale has no influence
    assert torch.equal(surfel_mask(means, log_scales, view, still)[0], before)
    means[0, 1], log_scales[1, 1], log_scales[2] = math.nan, math.nan, 1e4
    means[3] = torch.tensor([-0.5, 0.3, 2.0])
    assert bool(surfel_mask(means, log_scales, view, still)[0][:4].all())  # what cannot be decided is a candidate
    assert bool(surfel_mask_torch(means, log_scales, view, still)[:4].all())
