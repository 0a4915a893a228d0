"""The 3D smoothing filter of odin-splatfacto-aa: sampling intervals, smoothed primitives, complete candidate sets."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_candidates import camera, rows_at_the_border, visible

from odin_nerfstudio.rendering import sampling_rate
from odin_nerfstudio.rendering.sampling_rate import FILTER_VARIANCE, sampling_intervals, smoothed
from odin_nerfstudio.runtime.candidates import MotionBound, ViewTest, candidate_mask, candidate_mask_torch


def test_the_finest_view_that_sees_a_position_counts() -> None:
    """Two cameras on one axis, one of them with a longer lens; positions before, beside and behind them."""
    viewmats = torch.eye(4).repeat(2, 1, 1)
    viewmats[1, 2, 3] = 1.0  # one unit further back
    Ks = torch.tensor([[[100.0, 0, 50], [0, 100, 40], [0, 0, 1]], [[300.0, 0, 50], [0, 300, 40], [0, 0, 1]]])
    sizes = torch.tensor([[100, 80], [100, 80]])
    means = torch.tensor(
        [
            [0.0, 0.0, 2.0],  # both see it: 2 / 100 against 3 / 300
            [0.0, 0.0, 0.2],  # 0.2 / 100 against 1.2 / 300
            [0.9, 0.0, 2.0],  # at pixel 95 of the first and 140 of the second, beyond the margin
            [1.1, 0.0, 2.0],  # at pixel 105 of the first, within the margin
            [0.0, 0.0, -5.0],  # nobody: the largest of the others
        ]
    )
    found = sampling_intervals(means, viewmats, Ks, sizes)
    torch.testing.assert_close(found, torch.tensor([0.01, 0.002, 0.02, 0.02, 0.02]))
    assert torch.equal(sampling_intervals(means[4:], viewmats, Ks, sizes), torch.zeros(1))


def test_intervals_in_torch_equal_the_kernels() -> None:
    rng = np.random.default_rng(0)
    views = [camera(rng) for _ in range(20)]
    means = torch.tensor(rng.standard_normal((500, 3)) * 20, dtype=torch.float32)
    viewmats, Ks = torch.stack([v[0] for v in views]), torch.stack([v[1] for v in views])
    sizes = torch.tensor([v[2] for v in views])
    found = sampling_intervals(means, viewmats, Ks, sizes)
    elsewhere = sampling_rate._intervals_torch(means, sampling_rate.packed_views(viewmats, Ks, sizes), 0.01)
    seen = torch.isfinite(elsewhere)
    assert 20 < int(seen.sum()) < 500
    torch.testing.assert_close(found[seen], elsewhere[seen], rtol=1e-6, atol=0)


def test_smoothing_keeps_the_integral_and_widens() -> None:
    g = torch.Generator().manual_seed(0)
    log_scales, logits = torch.randn(100, 3, generator=g) - 4, torch.randn(100, 1, generator=g)
    intervals = torch.rand(100, 1, generator=g) * 0.05
    scales, opacities = smoothed(log_scales, logits, intervals)
    before = torch.sigmoid(logits)[:, 0] * torch.exp(log_scales).prod(1)
    torch.testing.assert_close(opacities[:, 0] * scales.prod(1), before, rtol=1e-4, atol=0)
    assert bool((scales**2 >= FILTER_VARIANCE * intervals**2).all())
    assert torch.equal(smoothed(log_scales, logits, torch.zeros(100, 1))[1], torch.sigmoid(logits))


@given(seed=st.integers(0, 2**32 - 1), lag=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_candidates_hold_what_is_visible_after_the_filter(seed: int, lag: int) -> None:
    rng = np.random.default_rng(seed)
    viewmat, K, size = camera(rng)
    means, wide, quats = rows_at_the_border(rng, viewmat, K, size, 500)  # their footprint just about meets the image
    share = torch.tensor(rng.uniform(0.01, 0.99, (500, 1)), dtype=torch.float32)
    variance = torch.exp(2 * wide.amin(1, keepdim=True)) * share
    scales = 0.5 * torch.log(torch.exp(2 * wide) - variance)
    seen = visible(means, 0.5 * torch.log(torch.exp(2 * scales) + variance), quats, viewmat, K, size)
    bound = MotionBound.steady(1.6e-4, 5e-3, (0.9, 0.999), 8)
    test = ViewTest.of(viewmat, K, *size)
    mask, count = candidate_mask(means, scales, test, bound, least_lag=lag, variance=variance[:, 0])
    assert count == int(mask.sum()) and not bool((seen & (mask == 0)).any())
    in_torch = candidate_mask_torch(means, scales, test, bound, least_lag=lag, variance=variance[:, 0])
    assert not bool((seen & ~in_torch).any())
    _, without = candidate_mask(means, wide, test, bound, least_lag=lag)
    assert abs(count - without) <= 2 + 0.02 * without, "the set is that of primitives of the filtered size"
