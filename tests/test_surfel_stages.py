"""The two stages of surfels together give the bits of the one call, images, gradients and what densification reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from render_scenes import make_scene
from torch import Tensor

from odin_nerfstudio.rendering import rasterization_2dgs
from odin_nerfstudio.rendering.stages import StageView
from odin_nerfstudio.rendering.surfel_stages import SurfelSplats, project_surfels

LEAVES = ("means", "quats", "scales", "opacities", "colors")


def loss(images: tuple[Any, ...], geometry: bool) -> Tensor:
    """A random weighting of colours and opacities and, with geometry, of the other images."""
    g = torch.Generator().manual_seed(1)
    wanted = [i for i in (images if geometry else images[:2]) if i is not None]
    return sum(((i * torch.randn(i.shape, generator=g)).sum() for i in wanted), torch.zeros(()))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("degree", "depth", "geometry", "mode"), [(3, False, False, "expected"), (None, True, True, "median")]
)
def test_stages_equal_one_call(parts: int, degree: int | None, depth: bool, geometry: bool, mode: str) -> None:
    scene = make_scene(900, 80, 56, sh_degree=degree, pixels=6.0)
    scene["scales"][::31] *= 30  # through the camera's plane, where outlines are no ellipses
    scene["opacities"][::17] = 1e-3  # too faint to be seen, and yet visible to strategies
    whole = {k: scene[k].clone().requires_grad_() for k in LEAVES}
    *expected, meta = rasterization_2dgs(
        **{**scene, **whole}, render_mode="RGB+ED" if depth else "RGB", depth_mode=mode
    )
    loss(tuple(expected), geometry).backward()

    view = StageView(scene["viewmats"][0], scene["Ks"][0], 80, 56, with_depth=depth)
    owner = torch.arange(900) * 7 % 13 % parts  # rows of a part lie scattered
    rows = [(owner == r).nonzero().flatten() for r in range(parts)]
    leaves = [{k: scene[k][part].clone().requires_grad_() for k in LEAVES} for part in rows]
    projected = [project_surfels(*[leaf[k] for k in LEAVES], sh_degree=degree, view=view) for leaf in leaves]
    ids = torch.cat([part[p.rows] for part, p in zip(rows, projected)])
    order = torch.argsort(ids)
    assert torch.equal(ids[order], (meta["radii"][0] > 0).nonzero().flatten())
    surfels = SurfelSplats(torch.cat([p.splats for p in projected])[order], view)
    *images, info = surfels.rasterize(expected_depth=depth, depth_mode=mode)
    for image, one in zip(images, expected):
        assert (image is None) == (one is None) and (image is None or one is None or torch.equal(image, one))
    assert torch.equal(info["radii"][0], meta["radii"][0, ids[order]])
    loss(tuple(images), geometry).backward()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    given, start = surfels.gradients(), 0
    for part, p, leaf in zip(rows, projected, leaves):
        mine = given[back[start : start + len(p.rows)]]
        start += len(p.rows)
        active = (mine != 0).any(1).nonzero().flatten()
        p.backward(active, mine[active])
        for name in LEAVES:
            assert torch.equal(leaf[name].grad, whole[name].grad[part]), name
        assert torch.equal(p.radii, meta["radii"][0, part[p.rows]])
        assert torch.equal(p.info()["gradient_2dgs"].grad, meta["gradient_2dgs"].grad[0, part[p.rows]])
    assert bool(given[:, -4:].any()) == geometry


def test_nothing_visible() -> None:
    scene = make_scene(5, 32, 32, sh_degree=0)
    view = StageView(scene["viewmats"][0], scene["Ks"][0], 32, 32)
    scene["means"][:, 2] = -1.0
    p = project_surfels(*[scene[k].clone().requires_grad_() for k in LEAVES], sh_degree=0, view=view)
    image = SurfelSplats(p.splats, view).rasterize()[0]
    assert p.rows.shape == (0,) and not bool(image.any()) and p.info()["gradient_2dgs"].grad is None
    with pytest.raises(ValueError, match="splats"):
        SurfelSplats(torch.zeros(3, 11), view)
