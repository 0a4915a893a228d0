"""The two stages together give the bits of the one call, images and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from render_scenes import make_scene
from torch import Tensor

from odin_nerfstudio.rendering import rasterization
from odin_nerfstudio.rendering.cpu import exact
from odin_nerfstudio.rendering.stages import Splats, StageView, project, viewmat_gradient

LEAVES = ("means", "quats", "scales", "opacities", "colors")


def weights(image: Tensor) -> Tensor:
    return torch.randn(image.shape, generator=torch.Generator().manual_seed(1))


def at_once(scene: dict[str, Any], depth: bool, mode: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    leaves = {k: scene[k].clone().requires_grad_() for k in (*LEAVES, "viewmats")}
    image, alphas, info = rasterization(
        **{**scene, **leaves}, render_mode="RGB+ED" if depth else "RGB", absgrad=True, rasterize_mode=mode
    )
    info["means2d"].retain_grad()
    ((image * weights(image)).sum() + alphas.sum()).backward()
    seen = info["radii"][0] > 0
    means2d = info["means2d"]
    return image, means2d.grad[0, seen], means2d.absgrad[0, seen], {k: t.grad for k, t in leaves.items()}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("degree", "depth", "mode"), [(3, False, "classic"), (None, True, "antialiased")])
def test_stages_equal_one_call(parts: int, degree: int | None, depth: bool, mode: str) -> None:
    scene = make_scene(900, 80, 56, sh_degree=degree, pixels=6.0)
    expected, grad, absgrad, gradients = at_once(scene, depth, mode)
    view = StageView(
        scene["viewmats"][0], scene["Ks"][0], 80, 56, with_depth=depth, antialiased=mode == "antialiased", trained=True
    )
    owner = torch.arange(900) * 7 % 13 % parts  # rows of a part lie scattered
    rows = [(owner == r).nonzero().flatten() for r in range(parts)]
    leaves = [{k: scene[k][part].clone().requires_grad_() for k in LEAVES} for part in rows]
    projected = [project(*[leaf[k] for k in LEAVES], sh_degree=degree, view=view) for leaf in leaves]
    ids = torch.cat([part[p.rows] for part, p in zip(rows, projected)])
    order = torch.argsort(ids)
    splats = Splats(torch.cat([p.splats for p in projected])[order], view)
    image, alphas, info = splats.rasterize(absgrad=True, expected_depth=depth)
    assert torch.equal(image, expected)
    ((image * weights(image)).sum() + alphas.sum()).backward()
    assert torch.equal(info["means2d"].grad[0], grad)
    assert torch.equal(info["means2d"].absgrad[0], absgrad)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    given, start, sums = splats.gradients(), 0, torch.zeros(1, dtype=torch.int64)
    for part, p, leaf in zip(rows, projected, leaves):
        mine = given[back[start : start + len(p.rows)]]
        start += len(p.rows)
        active = (mine != 0).any(1).nonzero().flatten()
        p.backward(active, mine[active])
        own = p.camera_sums()
        assert own is not None
        sums = sums + own
        for name in LEAVES:
            assert torch.equal(leaf[name].grad, gradients[name][part]), name
    assert torch.equal(viewmat_gradient(sums, view), gradients["viewmats"][0])


def test_sums_of_a_camera_are_exact() -> None:
    """Over all exponents, in any order and in parts."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(3000) * 10.0 ** rng.uniform(-44, 37, 3000)).astype(np.float32)
    whole, parts = np.zeros((2, exact.BINS), np.int64), np.zeros((2, exact.BINS), np.int64)
    _add_all(values, whole)
    _add_all(values[:1000], parts)
    _add_all(values[:999:-1].copy(), parts)
    assert np.array_equal(whole, parts)
    assert exact.totals(whole).tolist() == [math.fsum(values.tolist()), 0.0]
    _add_all(np.array([np.inf], np.float32), whole)
    assert math.isnan(exact.totals(whole)[0])


@njit
def _add_all(values: np.ndarray, sums: np.ndarray) -> None:
    for value in values:
        exact.add(sums, 0, value)


def test_nothing_visible() -> None:
    scene = make_scene(5, 32, 32, sh_degree=0)
    view = StageView(scene["viewmats"][0], scene["Ks"][0], 32, 32)
    scene["means"][:, 2] = -1.0
    p = project(*[scene[k].clone().requires_grad_() for k in LEAVES], sh_degree=0, view=view)
    image, _, _ = Splats(p.splats, view).rasterize()
    assert p.rows.shape == (0,) and not bool(image.any())
    with pytest.raises(ValueError, match="splats"):
        Splats(torch.zeros(3, 4), view)
