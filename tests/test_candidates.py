"""Candidate sets never miss a row that becomes visible, whatever Adam does in the steps that are missing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gsplat.cuda._torch_impl import (
    _fully_fused_projection,
    _persp_proj,
    _quat_scale_to_covar_preci,
    _world_to_cam,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from odin_nerfstudio.runtime.adam_motion import MotionBound, adam_motion_bound
from odin_nerfstudio.runtime.candidates import ViewTest, candidate_ids, candidate_mask, candidate_mask_torch

BETAS = (0.9, 0.999)
LRS = (1.6e-4, 5e-3)
ROWS = 1500

betas_strategy = st.tuples(st.floats(0.0, 0.98), st.floats(0.5, 0.9999)).filter(lambda b: b[0] ** 2 < 0.99 * b[1])


def visible(
    means: Tensor, log_scales: Tensor, quats: Tensor, viewmat: Tensor, K: Tensor, size: tuple[int, int]
) -> Tensor:
    """gsplat's own test, radii > 0. [N] bool."""
    covars, _ = _quat_scale_to_covar_preci(quats, torch.exp(log_scales), True, False)
    assert covars is not None
    return _fully_fused_projection(means, covars, viewmat[None], K[None], *size)[0][0] > 0


def camera(rng: np.random.Generator) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """A random pose, near the origin or far, along the axes or not, and any focal lengths and principal point."""
    rotation, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    if rng.random() < 0.3:
        rotation = np.eye(3)[rng.permutation(3)]
    viewmat = np.eye(4)
    viewmat[:3, :3] = rotation * np.sign(np.linalg.det(rotation))
    viewmat[:3, 3] = rng.standard_normal(3) * 10.0 ** rng.uniform(-2, 3.5)
    width, height = int(rng.integers(16, 1500)), int(rng.integers(16, 1500))
    fx, fy = width * 10.0 ** rng.uniform(-0.7, 0.7, 2)
    fy = rng.choice([fx, fy])
    K = np.array([[fx, 0, width * rng.uniform(0.2, 0.8)], [0, fy, height * rng.uniform(0.2, 0.8)], [0, 0, 1]])
    return torch.tensor(viewmat, dtype=torch.float32), torch.tensor(K, dtype=torch.float32), (width, height)


def gsplat_radius(means: Tensor, log_scales: Tensor, quats: Tensor, viewmat: Tensor, K: Tensor, size: tuple) -> Tensor:
    """The radius that gsplat would give, wherever the row lies. [N]."""
    covars, _ = _quat_scale_to_covar_preci(quats, torch.exp(log_scales), True, False)
    assert covars is not None
    local, covars = _world_to_cam(means, covars, viewmat[None])
    covars = _persp_proj(local, covars, K[None], *size)[1][0] + 0.3 * torch.eye(2)
    half = (covars[:, 0, 0] + covars[:, 1, 1]) / 2
    return torch.ceil(3 * torch.sqrt(half + torch.sqrt((half**2 - torch.linalg.det(covars)).clamp(min=0.01))))


def rows_at_the_border(
    rng: np.random.Generator, viewmat: Tensor, K: Tensor, size: tuple[int, int], n: int = ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose footprint just about meets the image, at all depths, as means, log_scales, quats."""
    depth = 10.0 ** rng.uniform(-2.1, 2, n)
    depth[: n // 10] = 0.01 * (1 + 1e-3 * rng.standard_normal(n // 10))
    pose, focal = viewmat.double().numpy(), K.double().numpy()
    radius = 10.0 ** rng.uniform(-1, 3.5, n)
    scale = radius / 3 * depth / math.sqrt(focal[0, 0] * focal[1, 1])
    flatness = rng.standard_normal((n, 3)) * rng.choice([0.0, 0.1, 2.0], n)[:, None]
    logs = np.log(scale)[:, None] + flatness - flatness.max(1, keepdims=True)
    log_scales, quats = (torch.tensor(x, dtype=torch.float32) for x in (logs, rng.standard_normal((n, 4))))
    side, along = rng.integers(0, 4, n), rng.uniform(-0.5, 1.5, n)
    jitter = 1 + rng.standard_normal(n) * 10.0 ** rng.uniform(-7, 0, n)
    means = torch.empty(0)
    for _ in range(4):  # the radius depends on the position, and the position on the radius
        gap = radius * jitter
        u = np.select([side == 0, side == 1], [-gap, size[0] + gap], along * size[0])
        v = np.select([side == 2, side == 3], [-gap, size[1] + gap], along * size[1])
        local = [(u - focal[0, 2]) / focal[0, 0] * depth, (v - focal[1, 2]) / focal[1, 1] * depth, depth]
        means = torch.tensor((np.stack(local, 1) - pose[:3, 3]) @ pose[:3, :3], dtype=torch.float32)
        radius = gsplat_radius(means, log_scales, quats, viewmat, K, size).double().numpy().clip(1, 1e6)
    return means, log_scales, quats


@given(
    betas=betas_strategy, seed=st.integers(0, 2**32 - 1), silent=st.sampled_from([0, 0, 3, 40]), growth=st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_no_gradients_move_adam_beyond_the_bound(
    betas: tuple[float, float], seed: int, silent: int, growth: bool
) -> None:
    """Random, growing and alternating gradients, after silent steps, with learning rates that change."""
    rng = np.random.default_rng(seed)
    n, steps = 64, 60
    rate = np.where(rng.random(n) < 0.5, betas[1] / max(betas[0], 1e-2), 10.0 ** rng.uniform(-1, 1, n))
    sign = np.where(rng.random((steps, n)) < rng.random(n), 1.0, -1.0)
    log_size = np.arange(steps)[:, None] * np.log(rate) * growth + rng.standard_normal((steps, n)) * rng.choice(
        [0, 1, 3], n
    )
    gradients = torch.tensor(sign * np.exp(np.clip(log_size - 20, -40, 40)), dtype=torch.float32)
    p = torch.nn.Parameter(torch.zeros(n))
    optimizer = torch.optim.Adam([p], betas=betas, eps=1e-15)
    bound = adam_motion_bound(betas)
    for step in range(silent + steps):
        lr = float(10.0 ** rng.uniform(-4, 0))
        optimizer.param_groups[0]["lr"] = lr
        before = p.detach().clone()
        p.grad = gradients[step - silent].clone() if step >= silent else torch.zeros(n)
        optimizer.step()
        rounding = 2.0**-23 * float(p.detach().abs().max())
        assert float((p.detach() - before).abs().max()) <= lr * bound + rounding


def test_the_bound_is_reached() -> None:
    """Gradients that grow by b2 / b1 come within half a percent; (1 - b1) / sqrt(1 - b2) is exceeded."""
    b1, b2 = BETAS
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([p], lr=1.0, betas=BETAS, eps=1e-15)
    before = 0.0
    for step in range(6000):
        before = float(p.detach())
        p.grad = torch.full((1,), 1e-3 * (b2 / b1) ** (step - 5900) if step > 5800 else 0.0, dtype=torch.float64)
        optimizer.step()
    moved = abs(float(p.detach()) - before)
    assert adam_motion_bound(BETAS) == pytest.approx(7.27, abs=0.005)
    assert 0.995 * adam_motion_bound(BETAS) < moved <= adam_motion_bound(BETAS)
    assert moved > 2 * (1 - b1) / math.sqrt(1 - b2)


def test_moments_set_to_zero_later_stay_within_the_bound() -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([p], lr=1.0, betas=BETAS, eps=1e-15)
    for step in range(300):
        before = float(p.detach())
        p.grad = torch.full((1,), (BETAS[1] / BETAS[0]) ** (step % 90))
        optimizer.step()
        assert abs(float(p.detach()) - before) <= adam_motion_bound(BETAS) + 2e-5 * abs(before)
        if step % 90 == 0:
            optimizer.state[p]["exp_avg"].zero_()
            optimizer.state[p]["exp_avg_sq"].zero_()


@given(
    seed=st.integers(0, 2**32 - 1),
    lag=st.integers(0, 6),
    means_lr=st.sampled_from([0.0, 1.6e-6, 1.6e-4, 1e-2, 1.0]),
    scales_lr=st.sampled_from([0.0, 5e-3, 0.1]),
    betas=betas_strategy,
)
@settings(max_examples=40, deadline=None)
def test_everything_within_reach_is_covered(
    seed: int, lag: int, means_lr: float, scales_lr: float, betas: tuple
) -> None:
    """Rows moved to corners and other points of the box that Adam can reach: seen by gsplat, so candidates."""
    rng = np.random.default_rng(seed)
    viewmat, K, size = camera(rng)
    means, log_scales, quats = rows_at_the_border(rng, viewmat, K, size)
    lags = torch.from_numpy(rng.integers(0, lag + 1, ROWS).astype(np.int32))
    motion = MotionBound.steady(means_lr, scales_lr, betas, lag)
    view = ViewTest.of(viewmat, K, *size)
    known: dict[str, Any] = {"versions": 100 - lags, "step": 100}
    mask, count = candidate_mask(means, log_scales, view, motion, **known)
    twin = candidate_mask_torch(means, log_scales, view, motion, **known)
    reach = adam_motion_bound(betas) * lags[:, None].double()
    local = means.double() @ viewmat[:3, :3].double().T + viewmat[:3, 3].double()
    right, down, forward = viewmat[:3, :3].double()
    x, y = (-torch.sign(local[:, k : k + 1]) * axis for k, axis in ((0, right), (1, down)))  # towards the optical axis
    directions = [0 * x, x, y, x + y, x - forward, x + forward, y - forward, y + forward, x + y - forward]
    shares = [torch.sign(d) for d in directions] + [torch.from_numpy(rng.uniform(-1, 1, (ROWS, 3)))]
    for push, share in enumerate(shares):
        grow = scales_lr * reach * (push > 0)
        moved = (means.double() + means_lr * reach * share).float()
        grown = (log_scales.double() + grow).float()
        for dtype in (torch.float32, torch.float64):  # gsplat's own rounding, and none
            scene = [t.to(dtype) for t in (moved, grown, quats, viewmat, K)]
            seen = visible(scene[0], scene[1], scene[2], scene[3], scene[4], size)
            missed = seen & ~mask.bool()
            assert not bool(missed.any()), f"push {push}: missed {missed.nonzero().flatten().tolist()[:5]}"
            assert not bool((seen & ~twin).any()), f"push {push}: the twin missed rows"
    assert count == int(mask.sum())


@given(
    seed=st.integers(0, 2**32 - 1), lag=st.integers(1, 4), kind=st.sampled_from(["growing", "random", "alternating"])
)
@settings(max_examples=20, deadline=None)
def test_rows_made_visible_by_adam_are_candidates(seed: int, lag: int, kind: str) -> None:
    """A lagging copy knows which rows a view reads after real Adam steps with gradients chosen against it."""
    rng = np.random.default_rng(seed)
    viewmat, K, size = camera(rng)
    means, log_scales, quats = rows_at_the_border(rng, viewmat, K, size)
    params = [torch.nn.Parameter(means.clone()), torch.nn.Parameter(log_scales.clone())]
    scale = float(10.0 ** rng.uniform(-4, -1))
    lrs = [[scale * 0.9**k for k in range(lag)], [5e-3 * 0.8**k for k in range(lag)]]  # of the missing steps, in order
    optimizer = torch.optim.Adam([{"params": [p], "lr": 0.0} for p in params], betas=BETAS, eps=1e-15)
    warm = int(rng.integers(0, 80))
    stale = (means, log_scales)
    axis = (means.double() @ viewmat[:3, :3].double().T + viewmat[:3, 3].double())[:, :2]
    aim = [(torch.sign(axis) @ viewmat[:2, :3].double()).float(), -torch.ones(ROWS, 3)]  # minus the wanted motion
    for step in range(warm + lag):
        for p, direction, group, rates in zip(params, aim, optimizer.param_groups, lrs):
            group["lr"] = rates[step - warm] if step >= warm else 0.0
            size_now = 1e-6 * (BETAS[1] / BETAS[0]) ** step if kind != "random" else 10.0 ** rng.uniform(-6, 0)
            p.grad = direction * size_now * ((-1) ** (step // 3) if kind == "alternating" else 1)
        if step == warm:
            stale = (params[0].detach().clone(), params[1].detach().clone())
        optimizer.step()
    motion = MotionBound.of(lrs[0][::-1], lrs[1][::-1], BETAS)
    ids = candidate_ids(stale[0], stale[1], ViewTest.of(viewmat, K, *size), motion, least_lag=lag)
    assert ids.dtype == torch.int32 and bool((ids[1:] > ids[:-1]).all())
    seen = visible(params[0].detach(), params[1].detach(), quats, viewmat, K, size).nonzero().flatten()
    assert set(seen.tolist()) <= set(ids.tolist())


def aerial_scene(n: int = 40_000) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, int]]:
    """A flat site of 10 x 10 units from 2.5 units above, small splats: like a drone survey."""
    rng = np.random.default_rng(0)
    means = np.stack([*rng.uniform(-5, 5, (2, n)), 0.1 * rng.standard_normal(n)], 1)
    log_scales = np.log(0.02) + 0.6 * rng.standard_normal((n, 3))
    viewmat = np.array([[1, 0, 0, 0.5], [0, -1, 0, 0.3], [0, 0, -1, 2.5], [0, 0, 0, 1]])
    K = np.array([[500.0, 0, 360], [0, 500, 270], [0, 0, 1]])
    arrays = (means, log_scales, rng.standard_normal((n, 4)), viewmat, K)
    return *(torch.tensor(a, dtype=torch.float32) for a in arrays), (720, 540)  # type: ignore[return-value]


def test_candidates_exceed_the_visible_rows_by_little() -> None:
    means, log_scales, quats, viewmat, K, size = aerial_scene()
    seen = visible(means, log_scales, quats, viewmat, K, size)
    view = ViewTest.of(viewmat, K, *size)
    for lag, most in ((0, 0.045), (1, 0.055), (3, 0.075)):
        mask, count = candidate_mask(means, log_scales, view, MotionBound.steady(*LRS, BETAS, lag), least_lag=lag)
        assert bool((mask.bool() | ~seen).all())
        assert count <= (1 + most) * int(seen.sum())


def test_lags_and_limits() -> None:
    means, log_scales, _, viewmat, K, size = aerial_scene(3000)
    view, motion = ViewTest.of(viewmat[None], K[None], *size), MotionBound.steady(0.01, 0.01, BETAS, 3)
    by_lag = [candidate_mask(means, log_scales, view, motion, least_lag=lag)[0] for lag in range(4)]
    versions = (10 - torch.arange(3000) % 4).to(torch.int32)
    mixed, count = candidate_mask(means, log_scales, view, motion, versions=versions, step=10, least_lag=1)
    expected = torch.stack([by_lag[max(1, int(k) % 4)][k] for k in range(3000)])
    assert torch.equal(mixed, expected) and count == int(expected.sum())
    buffer = torch.full((3000,), 7, dtype=torch.uint8)
    assert candidate_mask(means, log_scales, view, motion, least_lag=2, out=buffer)[0] is buffer
    assert torch.equal(buffer, by_lag[2])
    late: list[dict[str, Any]] = [{"versions": versions, "step": 11}, {"least_lag": 4}]
    for arguments in late:
        for function in (candidate_mask, candidate_mask_torch):
            with pytest.raises(ValueError, match="lags by 4 steps, motion covers 3"):
                function(means, log_scales, view, motion, **arguments)


def test_far_radius_clip_and_broken_rows() -> None:
    means, log_scales, _, viewmat, K, size = aerial_scene(3000)
    still = MotionBound.steady(0.0, 0.0, BETAS, 0)
    everything = candidate_mask(means, log_scales, ViewTest.of(viewmat, K, *size), still)[1]
    assert candidate_mask(means, log_scales, ViewTest.of(viewmat, K, *size, far=1.0), still)[1] == 0
    clipped = candidate_mask(means, log_scales, ViewTest.of(viewmat, K, *size, radius_clip=8.0), still)[1]
    assert 0 < clipped < everything
    means[0, 1], log_scales[1, 2], log_scales[2] = math.nan, math.nan, 1e4
    means[3] = torch.tensor([-0.5, 0.3, 2.0])
    for mask in (
        candidate_mask(means, log_scales, ViewTest.of(viewmat, K, *size), still)[0].bool(),
        candidate_mask_torch(means, log_scales, ViewTest.of(viewmat, K, *size), still),
    ):
        assert bool(mask[:4].all())  # what cannot be decided is a candidate


@pytest.mark.parametrize("betas", [(0.9, 0.8), (0.999, 0.998), (1.0, 0.999), (0.9, 1.0), (-0.1, 0.9)])
def test_betas_without_a_bound(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="betas"):
        adam_motion_bound(betas)


def test_wrong_arguments_are_named() -> None:
    means, log_scales, _, viewmat, K, size = aerial_scene(10)
    view, motion = ViewTest.of(viewmat, K, *size), MotionBound.steady(*LRS, BETAS, 1)
    skewed = K.clone()
    skewed[0, 1] = 3.0
    cases = [
        ("log_scales", lambda: candidate_mask(means, log_scales[:5], view, motion)),
        ("versions", lambda: candidate_mask(means, log_scales, view, motion, versions=torch.zeros(10))),
        ("out", lambda: candidate_mask(means, log_scales, view, motion, out=torch.zeros(10))),
        ("skew", lambda: ViewTest.of(viewmat, skewed, *size)),
        ("viewmat", lambda: ViewTest.of(viewmat[:3], K, *size)),
        ("near", lambda: ViewTest.of(viewmat, K, *size, near=0.0)),
        ("scales_lrs", lambda: MotionBound.of([1e-3], [], BETAS)),
    ]
    for name, call in cases:
        with pytest.raises(ValueError, match=name):
            call()
