"""The parts of odin-splatfacto-mcmc: relocation and growth as gsplat's, noise that depends on (seed, step, row) only.

Whole trainings, with 1 to 4 ranks, are in test_methods.py.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import gsplat.strategy.ops as gsplat_ops
import numpy as np
import pytest
import torch
from gsplat.strategy import MCMCStrategy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_candidates import camera, rows_at_the_border, visible
from torch import Tensor

from odin_nerfstudio.glue.mcmc import OdinMcmcStrategy, relocation
from odin_nerfstudio.runtime import noise as noise_module
from odin_nerfstudio.runtime.adam_motion import MotionBound
from odin_nerfstudio.runtime.candidates import ViewTest, candidate_mask, candidate_mask_torch
from odin_nerfstudio.runtime.noise import PositionNoise, moved_means, variates

RATES = {"means": 1.6e-4, "scales": 5e-3, "opacities": 0.05}


# Relocation -----------------------------------------------------------------------------------------------------------


def relocation_as_written(opacities: Tensor, scales: Tensor, ratios: Tensor, binoms: Tensor) -> tuple[Tensor, Tensor]:
    """gsplat's CUDA kernel, equation 9 of the paper, term by term in float64."""
    new_opacities, new_scales = torch.empty_like(opacities), torch.empty_like(scales)
    for row, (opacity, scale, ratio) in enumerate(zip(opacities.flatten(), scales, ratios)):
        n = min(max(int(ratio), 1), binoms.shape[0])
        new = 1 - (1 - float(opacity)) ** (1 / n)
        total = 0.0
        for i in range(1, n + 1):
            for k in range(i):
                total += math.comb(i - 1, k) * (-1) ** k / math.sqrt(k + 1) * new ** (k + 1)
        new_opacities.view(-1)[row] = new
        new_scales[row] = float(opacity) / total * scale
    return new_opacities, new_scales


def test_relocation_is_the_papers_equation() -> None:
    ratios = torch.tensor([1, 2, 3, 5, 10, 20, 51, 200]).repeat(6)
    opacities = torch.tensor([0.006, 0.05, 0.3, 0.7, 0.95, 0.999]).repeat_interleave(8)
    scales = torch.rand(48, 3, generator=torch.Generator().manual_seed(0)) + 0.01
    got = relocation(opacities, scales, ratios)
    expected = relocation_as_written(opacities, scales, ratios, torch.zeros(51, 51))
    for one, other in zip(got, expected):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-6, atol=0)
    same = ratios == 1
    torch.testing.assert_close(got[1][same], scales[same])


def population(count: int = 300) -> tuple[torch.nn.ParameterDict, dict[str, torch.optim.Optimizer]]:
    """Primitives, many of them dead, whose Adam has moments."""
    g = torch.Generator().manual_seed(5)
    values = {
        "means": torch.randn(count, 3, generator=g),
        "scales": torch.randn(count, 3, generator=g) - 3,
        "quats": torch.randn(count, 4, generator=g),
        "opacities": torch.randn(count, 1, generator=g) * 3 - 3,
        "features_dc": torch.arange(3.0 * count).reshape(count, 3),
    }
    parameters = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in values.items()})
    optimizers: dict[str, torch.optim.Optimizer] = {k: torch.optim.Adam([p], lr=1e-9) for k, p in parameters.items()}
    for name, optimizer in optimizers.items():
        parameters[name].grad = torch.randn(values[name].shape, generator=g)
        optimizer.step()
    return parameters, optimizers


def test_relocation_and_growth_equal_gsplats_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same draws, same parameters, same moments; and the map of parents tells where each row comes from."""

    def in_place_of_cuda(opacities: Tensor, scales: Tensor, ratios: Tensor, binoms: Tensor) -> tuple[Tensor, Tensor]:
        shared, new_scales = relocation(opacities.flatten(), scales, ratios)
        return shared.reshape(opacities.shape), new_scales

    monkeypatch.setattr(gsplat_ops, "compute_relocation", in_place_of_cuda)
    monkeypatch.setattr("gsplat.strategy.mcmc.inject_noise_to_position", lambda **_: None)
    options: dict[str, Any] = {"cap_max": 310, "refine_start_iter": 5, "refine_every": 10, "min_opacity": 0.01}
    stock, ours = MCMCStrategy(**options), OdinMcmcStrategy(**options)
    theirs, their_optimizers = population()
    mine, my_optimizers = population()
    before = mine["features_dc"].detach().clone()
    state: dict[str, Any] = {"odin_parents": torch.arange(300)}
    assert [step for step in range(50) if ours.acts_at(step)] == [10, 20, 30, 40]
    torch.manual_seed(1)
    stock.step_post_backward(theirs, their_optimizers, stock.initialize_state(), 20, {}, lr=0.0)
    torch.manual_seed(1)
    ours.step_post_backward(mine, my_optimizers, state, 20, {})
    assert len(mine["means"]) == 310, "grown to the cap"
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
        one, other = my_optimizers[name].state[mine[name]], their_optimizers[name].state[theirs[name]]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(one[key], other[key]), (name, key)
    parents = state["odin_parents"]
    assert torch.equal(before[parents], mine["features_dc"].detach())
    assert (parents[:300] != torch.arange(300)).any(), "dead rows moved"


# Noise ----------------------------------------------------------------------------------------------------------------


def cloud(count: int = 1000, seed: int = 2) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "means": torch.randn(count, 3, generator=g),
        "scales": torch.randn(count, 3, generator=g) * 0.5 - 4,
        "quats": torch.randn(count, 4, generator=g),
        "opacities": torch.randn(count, 1, generator=g) * 2 - 4,
    }


def noise_of(rows: dict[str, Tensor], seed: int = 3) -> PositionNoise:
    return PositionNoise(rows, lambda step: RATES, 5e5, seed)


def test_noise_of_a_row_is_the_same_whoever_adds_it() -> None:
    """Rows one after the other, in two parts, all at once, in torch's operations, on a rank that has only some of them:
    the same bits."""
    rows, start = cloud(), cloud()["means"]
    whole, parts = {**rows, "means": start.clone()}, {**rows, "means": start.clone()}
    noise_of(whole).add(7, None)
    mask = (torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.3).byte()
    noise_of(parts).add(7, mask)
    assert torch.equal(parts["means"][mask == 0], start[mask == 0])
    noise_of(parts).add(7, 1 - mask)
    assert torch.equal(parts["means"], whole["means"])
    key, scale, _ = noise_of(rows)._of_step(7)
    in_torch = moved_means(start, rows["scales"], rows["quats"], rows["opacities"], torch.arange(1000), key, scale)
    assert torch.equal(in_torch, whole["means"])
    shard = {k: v[mask != 0].clone() for k, v in rows.items()}
    places = mask.nonzero().flatten().int()
    some = PositionNoise(shard, lambda step: RATES, 5e5, 3, places=lambda: places)
    bound, lags = MotionBound.steady(RATES["means"], RATES["scales"], (0.9, 0.999), 16), torch.full((1000,), 5)
    reach = noise_of(rows).reach(7, lags.int(), 0, bound)[mask != 0]
    assert torch.equal(some.reach(7, lags[mask != 0].int(), 0, bound), reach) and bool(reach.any())
    some.add(7, None)
    assert torch.equal(shard["means"], whole["means"][mask != 0])
    for seed, step in ((3, 8), (4, 7)):
        other = {**rows, "means": start.clone()}
        noise_of(other, seed).add(step, None)
        moved = (other["means"] != start).any(1)
        assert moved.any() and not torch.equal(other["means"][moved], whole["means"][moved])


def test_noise_is_normal_enough_and_bounded() -> None:
    z = variates(12345, torch.arange(100_000))
    assert float(z.abs().max()) < 6
    assert float(z.mean(0).abs().max()) < 0.01 and float((z.std(0) - 1).abs().max()) < 0.01
    assert np.abs(np.corrcoef(z.numpy().T) - np.eye(3)).max() < 0.01
    for sigma, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
        assert float((z.abs() > sigma).double().mean()) == pytest.approx(share, abs=0.004), sigma


def test_noise_is_gsplats(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same z, gsplat's ``inject_noise_to_position`` moves the rows to the same places."""
    from gsplat.cuda._torch_impl import _quat_scale_to_covar_preci

    rows = cloud()
    key, scale, _ = noise_of(rows)._of_step(11)
    z = variates(key, torch.arange(1000)).float()
    monkeypatch.setattr(
        gsplat_ops, "quat_scale_to_covar_preci", lambda q, s, **_: _quat_scale_to_covar_preci(q, s, True, False)
    )
    monkeypatch.setattr(torch, "randn_like", lambda _: z)
    theirs = torch.nn.ParameterDict({k: torch.nn.Parameter(v.clone()) for k, v in rows.items()})
    gsplat_ops.inject_noise_to_position(theirs, {}, {}, scaler=scale)
    mine = copy.deepcopy(rows)
    noise_of(mine).add(11, None)
    torch.testing.assert_close(mine["means"], theirs["means"].detach(), rtol=2e-4, atol=2e-6)
    assert float((mine["means"] - rows["means"]).abs().max()) > 0.01


@given(seed=st.integers(0, 2**32 - 1), lag=st.integers(1, 6), least=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_candidates_on_a_lagging_copy_miss_nothing_that_noise_moves_into_view(seed: int, lag: int, least: int) -> None:
    """Rows at the border of a view get several updates, each as large as Adam's bound allows, and noise."""
    rng = np.random.default_rng(seed)
    viewmat, K, size = camera(rng)
    means, scales, quats = rows_at_the_border(rng, viewmat, K, size, 400)
    scales = scales.clamp(max=math.log(float(10.0 ** rng.uniform(-3, 1))))
    copied = {
        "means": means,
        "scales": scales,
        "quats": quats,
        "opacities": torch.tensor(rng.uniform(-9, 1, (400, 1)), dtype=torch.float32),
    }
    bound = MotionBound.steady(RATES["means"], RATES["scales"], (0.9, 0.999), 16)
    fall = 7.26 * RATES["opacities"]
    state = {k: v.clone() for k, v in copied.items()}
    step = 20
    noise = noise_of(state, seed=seed)
    versions = torch.tensor(rng.integers(step - lag, step + 1, 400), dtype=torch.int32)
    for s in range(step - lag, step):
        due = (versions <= s).byte()
        for name, size_of in (("means", bound.means[1]), ("scales", bound.log_scales[1]), ("opacities", fall)):
            push = torch.tensor(rng.choice([-1.0, 0.0, 1.0], state[name].shape), dtype=torch.float32) * float(size_of)
            state[name] += push * due[:, None] * (1 - 1e-5)
        state["quats"] += 0.01 * due[:, None]
        noise.add(s, due)
    extra = noise_of(copied, seed=seed).reach(step, versions, least, bound)
    moved = (state["means"] - copied["means"]).abs().amax(1)
    assert bool((moved <= extra + bound.means[lag] + 1e-5 * (1 + means.abs().amax(1))).all())
    seen = visible(state["means"], state["scales"], state["quats"], viewmat, K, size)
    test = ViewTest.of(viewmat, K, *size)
    kwargs: dict[str, Any] = {"versions": versions, "step": step, "least_lag": least, "extra": extra}
    mask, count = candidate_mask(means, scales, test, bound, **kwargs)
    assert count == int(mask.sum())
    assert not bool((seen & (mask == 0)).any())
    assert not bool((seen & ~candidate_mask_torch(means, scales, test, bound, **kwargs)).any())


def test_reach_in_torch_equals_the_kernels() -> None:
    rows = cloud()
    bound = MotionBound.steady(RATES["means"], RATES["scales"], (0.9, 0.999), 16)
    versions = torch.arange(1000, dtype=torch.int32) % 7 + 14
    noise = noise_of(rows)
    on_cpu = noise.reach(20, versions, 2, bound)
    known = [noise._of_step(s) for s in range(19, 3, -1)]
    fade = np.concatenate([[0.0], np.cumsum([k[2] for k in known])]) * (1 + 1e-6) + 1e-5
    arguments = (rows["means"], rows["scales"], rows["opacities"], torch.arange(1000), versions, 20, 2, known)
    elsewhere = noise_module._reach(*arguments, bound.log_scales.astype(np.float64), fade)
    torch.testing.assert_close(on_cpu, elsewhere, rtol=1e-6, atol=0)
    assert float((on_cpu > 0).double().mean()) > 0.5
