"""The CPU rasterizer against its dense twin in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from render_scenes import assert_as_dense, make_scene, run

from odin_nerfstudio.rendering import rasterization
from odin_nerfstudio.rendering.dense import dense_rasterization


@pytest.mark.parametrize("rasterize_mode", ["classic", "antialiased"])
@pytest.mark.parametrize("render_mode", ["RGB", "RGB+ED", "RGB+D", "ED", "D"])
def test_modes(render_mode: str, rasterize_mode: str) -> None:
    scene = make_scene(120, 50, 37, cameras=2, pixels=2.0)
    assert_as_dense({**scene, "render_mode": render_mode, "rasterize_mode": rasterize_mode})


@pytest.mark.parametrize("sh_degree", [0, 1, 2, 3, None])
@pytest.mark.parametrize("per_camera", [False, True])
def test_colors_and_backgrounds(sh_degree: int | None, per_camera: bool) -> None:
    scene = make_scene(100, 33, 16, cameras=3, sh_degree=sh_degree)
    scene["backgrounds"] = torch.rand(3, 3, generator=torch.Generator().manual_seed(3))
    if per_camera:
        scene["colors"] = torch.stack([scene["colors"] * (1 + 0.1 * k) for k in range(3)])
    assert_as_dense(scene)


def test_lower_degree_leaves_other_coefficients_alone() -> None:
    scene = make_scene(60, 32, 32, sh_degree=3)
    assert_as_dense({**scene, "sh_degree": 1})


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_other_channel_counts(channels: int) -> None:
    scene = make_scene(50, 20, 20, sh_degree=None)
    colors = torch.rand(50, channels, generator=torch.Generator().manual_seed(3))
    assert_as_dense({**scene, "colors": colors, "backgrounds": torch.full((1, channels), 0.3)})


@pytest.mark.parametrize(
    "options",
    [
        {"near_plane": 4.0, "far_plane": 6.0},
        {"radius_clip": 4.0},
        {"eps2d": 0.1, "rasterize_mode": "antialiased"},
    ],
)
def test_culling(options: dict[str, Any]) -> None:
    assert_as_dense({**make_scene(150, 40, 40, pixels=2.0), **options})


def test_wide_splats() -> None:
    """Splats across many tiles and beyond the image, whose Jacobian is clamped."""
    scene = make_scene(40, 150, 130, pixels=20.0)
    scene["scales"][::2, 0] *= 3
    scene["means"][::5, :2] *= 1.8
    assert_as_dense(scene)


def test_needles() -> None:
    """Splats 200 times as long as thin, at all angles: float32 keeps a little less of those."""
    scene = make_scene(60, 90, 70, pixels=4.0)
    scene["scales"][:, 0] *= 10
    scene["scales"][:, 1:] *= 0.05
    assert_as_dense(scene, tolerance=3e-5)


def test_opaque_splats_end_pixels() -> None:
    """Clamped alphas, and pixels whose transmittance runs out while splats remain."""
    scene = make_scene(400, 40, 24, pixels=8.0)
    scene["opacities"] = torch.where(torch.arange(400) % 3 == 0, 1.0, scene["opacities"])
    assert_as_dense(scene)


def test_equal_depths_blend_in_input_order() -> None:
    scene = make_scene(60, 32, 32, pixels=8.0)
    scene["means"][:, 2] = 4.0
    assert_as_dense(scene)


def test_absolute_gradients() -> None:
    """Each pixel's gradient of the projected mean, taken by rendering one pixel's loss at a time."""
    scene = make_scene(12, 10, 9, sh_degree=None, pixels=3.0)
    leaves: dict[str, Any] = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in scene.items()}
    leaves["means"].requires_grad_()
    image, _, info = dense_rasterization(**leaves)
    expected = torch.zeros(1, 12, 2, dtype=torch.float64)
    for value in image.sum(-1).flatten():
        (gradient,) = torch.autograd.grad(value, info["means2d"], retain_graph=True)
        expected += gradient.abs()
    means = scene["means"].requires_grad_()
    image, _, info = rasterization(**{**scene, "means": means}, absgrad=True)
    image.sum().backward()
    assert torch.allclose(info["means2d"].absgrad.double(), expected, rtol=0, atol=1e-5)


def test_gradients_through_info() -> None:
    """Depths, conics and opacities of `info` are differentiable, as gsplat's are."""
    scene = make_scene(30, 24, 24, cameras=2)
    scene["rasterize_mode"] = "antialiased"
    leaves = {k: scene[k].clone().requires_grad_() for k in ("means", "quats", "scales", "opacities")}
    _, _, info = rasterization(**{**scene, **leaves})
    seen = info["radii"] > 0
    (info["depths"].sum() + (info["conics"][seen] ** 2).sum() + info["opacities"].sum()).backward()

    from odin_nerfstudio.rendering.dense import project

    reference = {k: scene[k].double().requires_grad_() for k in leaves}
    loss = torch.zeros((), dtype=torch.float64)
    for k in range(2):
        _, depths, conics, _, compensations = project(
            reference["means"],
            reference["quats"],
            reference["scales"],
            scene["viewmats"][k].double(),
            scene["Ks"][k].double(),
            24,
            24,
            0.3,
        )
        used = reference["opacities"] * compensations
        loss = loss + depths[seen[k]].sum() + (conics[seen[k]] ** 2).sum() + used[seen[k]].sum()
    loss.backward()
    for name, leaf in leaves.items():
        expected = reference[name].grad
        assert expected is not None and leaf.grad is not None
        assert (leaf.grad.double() - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item()), name


@pytest.mark.parametrize("case", ["no primitives", "none in view"])
def test_nothing_to_see(case: str) -> None:
    """The background, no coverage, and zero gradients."""
    scene = make_scene(0 if case == "no primitives" else 20, 20, 18, cameras=2)
    scene["means"][:, 2] -= 100.0
    scene["backgrounds"] = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    result = run(rasterization, {**scene, "absgrad": True}, torch.float32)
    assert torch.equal(result["image"], scene["backgrounds"][:, None, None].expand(2, 18, 20, 3))
    for name in (
        "alphas",
        "radii",
        "means2d",
        "absgrad",
        "means",
        "quats",
        "scales",
        "opacities",
        "colors",
        "viewmats",
    ):
        assert not result[name].any(), name
    assert result["colors"].shape == scene["colors"].shape
