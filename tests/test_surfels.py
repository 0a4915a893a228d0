"""The CPU rasterizer of surfels against its dense twin in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from render_scenes import make_scene
from torch import Tensor

from odin_nerfstudio.rendering import rasterization_2dgs, set_render_threads
from odin_nerfstudio.rendering.dense_surfels import dense_rasterization_2dgs

LEAVES = ("means", "quats", "scales", "opacities", "colors", "backgrounds")
IMAGES = ("image", "alphas", "normals", "surface", "distortion", "median")


def render(
    function: Callable[..., Any], scene: dict[str, Any], dtype: torch.dtype, only: str = ""
) -> dict[str, Tensor]:
    """Render, and differentiate a random weighting of all images (or of one); images, radii and gradients."""
    arguments: dict[str, Any] = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in scene.items()}
    leaves = {k: arguments[k].clone().requires_grad_() for k in LEAVES if isinstance(scene.get(k), Tensor)}
    *images, meta = function(**{**arguments, **leaves})
    result = {name: image for name, image in zip(IMAGES, images) if image is not None}
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=dtype)
    for name, image in result.items():
        weights = torch.randn(image.shape, generator=generator).to(dtype)
        covered = (result["alphas"].detach() > 0.1).to(dtype)
        if name == "image" and "ED" in scene.get("render_mode", "RGB"):
            weights = weights * covered  # depth / alpha is ill-conditioned in float32 where alpha is small
        if name == "surface":  # a difference of depths even more so, and the gradient grows with one over its length
            near = -torch.nn.functional.max_pool2d(-covered.permute(0, 3, 1, 2), 3, 1, 1).permute(0, 2, 3, 1)
            near = near.reshape(*image.shape[:-1], 1)
            weights, result[name] = weights * near * 1e-2, image * near
        if only in ("", name):
            loss = loss + (image * weights).sum()
    twin = isinstance(meta["ray_transforms"], list)
    if twin:
        for transforms in meta["ray_transforms"]:
            transforms.retain_grad()
    loss.backward()
    if twin:
        pairs = [(t, torch.zeros_like(t) if t.grad is None else t.grad) for t in meta["ray_transforms"]]
        densify = torch.stack([g[:, :2, 2] * t[:, 2:, 2] for t, g in pairs]).detach()
    else:
        densify = meta["gradient_2dgs"].grad
    result = {name: image.detach() for name, image in result.items()}
    result |= {"radii": meta["radii"], "gradient_2dgs": densify}
    result |= {f"d {k}": torch.zeros_like(t) if t.grad is None else t.grad for k, t in leaves.items()}
    return result


def assert_as_dense(scene: dict[str, Any], tolerance: float = 1e-5, only: str = "") -> dict[str, Tensor]:
    """Images and gradients agree with the twin in float64, relative to each one's largest entry (or 1, if larger)."""
    fast = render(rasterization_2dgs, scene, torch.float32, only)
    dense = render(dense_rasterization_2dgs, scene, torch.float64, only)
    assert torch.equal(fast["radii"], dense["radii"])
    errors = {}
    for name, expected in dense.items():
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        errors[name] = (fast[name].double() - expected).abs().max().item() / scale if expected.numel() else 0.0
        assert fast[name].shape == expected.shape, name
    assert all(e <= tolerance for e in errors.values()), {k: f"{e:.1e}" for k, e in errors.items()}
    return fast


@pytest.mark.parametrize("render_mode", ["RGB", "RGB+ED", "RGB+D", "ED", "D"])
def test_modes(render_mode: str) -> None:
    assert_as_dense({**make_scene(120, 50, 37, cameras=2, pixels=3.0), "render_mode": render_mode})


@pytest.mark.parametrize("only", ["normals", "surface", "distortion", "median"])
def test_gradients_of_each_image(only: str) -> None:
    scene = make_scene(120, 40, 40, pixels=5.0)
    assert_as_dense({**scene, "render_mode": "RGB+D"}, only=only)


def test_normals_of_the_median_depth() -> None:
    scene = make_scene(150, 40, 40, pixels=8.0)
    assert_as_dense({**scene, "render_mode": "RGB+ED", "depth_mode": "median"}, only="surface")


@pytest.mark.parametrize("sh_degree", [0, 2, 3, None])
@pytest.mark.parametrize("per_camera", [False, True])
def test_colors_and_backgrounds(sh_degree: int | None, per_camera: bool) -> None:
    scene = make_scene(100, 33, 16, cameras=3, sh_degree=sh_degree)
    scene["backgrounds"] = torch.rand(3, 4, generator=torch.Generator().manual_seed(3))
    if per_camera:
        scene["colors"] = torch.stack([scene["colors"] * (1 + 0.1 * k) for k in range(3)])
    assert_as_dense({**scene, "render_mode": "RGB+D"})


@pytest.mark.parametrize("options", [{"near_plane": 4.0, "far_plane": 6.0}, {"radius_clip": 4.0}])
def test_culling(options: dict[str, Any]) -> None:
    assert_as_dense({**make_scene(150, 40, 40, pixels=2.0), **options})


def test_wide_surfels() -> None:
    """Across many tiles, beyond the image, and through the camera's plane, where outlines are no ellipses."""
    scene = make_scene(60, 150, 130, pixels=20.0)
    scene["scales"][::2, 0] *= 3
    scene["means"][::5, :2] *= 1.8
    scene["scales"][::7] *= 30
    assert_as_dense({**scene, "render_mode": "RGB+D"}, tolerance=5e-5)


def test_tiny_surfels() -> None:
    """Far below a pixel: the low-pass decides everywhere, and gradients move centres alone."""
    scene = make_scene(200, 40, 40, pixels=0.02)
    fast = assert_as_dense({**scene, "render_mode": "RGB+D"}, only="image")
    assert fast["radii"].max() == 1 and fast["alphas"].max() > 0.3 and fast["d means"].any()


def test_edge_on_surfels() -> None:
    """Seen exactly, nearly and not quite from the side."""
    scene = make_scene(90, 60, 50, pixels=8.0)
    tilt = torch.tensor([0.0, 1e-3, 0.1]).repeat(30)
    to_mean = torch.nn.functional.normalize(scene["means"], dim=-1)
    first = torch.nn.functional.normalize(torch.cross(to_mean, torch.randn(90, 3), dim=-1), dim=-1)
    third = torch.cross(to_mean, first, dim=-1)  # normal at right angles to the ray
    second = torch.cos(tilt)[:, None] * to_mean + torch.sin(tilt)[:, None] * third
    third = torch.cross(first, second, dim=-1)
    scene["quats"] = quaternions(torch.stack([first, second, third], dim=-1))
    assert_as_dense({**scene, "render_mode": "RGB"}, tolerance=1e-3)


def quaternions(matrices: Tensor) -> Tensor:
    """w x y z of rotation matrices (N, 3, 3): eigenvectors of Bar-Itzhack's symmetric matrix."""
    m = matrices.double()
    k = torch.zeros(len(m), 4, 4, dtype=torch.float64)
    for i, (a, b) in enumerate(((2, 1), (0, 2), (1, 0))):
        k[:, 0, i + 1] = k[:, i + 1, 0] = m[:, a, b] - m[:, b, a]
    trace = m.diagonal(dim1=1, dim2=2).sum(-1)
    k[:, 1:, 1:] = m + m.transpose(1, 2) - trace[:, None, None] * torch.eye(3, dtype=torch.float64)
    k[:, 0, 0] = trace
    return torch.linalg.eigh(k).eigenvectors[:, :, -1].float()


def test_opaque_surfels_end_pixels() -> None:
    """Clamped alphas, and pixels whose transmittance runs out while surfels remain."""
    scene = make_scene(400, 40, 24, pixels=8.0)
    scene["opacities"] = torch.where(torch.arange(400) % 3 == 0, 1.0, scene["opacities"])
    assert_as_dense({**scene, "render_mode": "RGB+D"}, tolerance=3e-5)


@pytest.mark.parametrize("case", ["no primitives", "none in view", "behind"])
def test_nothing_to_see(case: str) -> None:
    scene = make_scene(0 if case == "no primitives" else 20, 20, 18, cameras=2)
    scene["means"] += torch.tensor([0.0, 0.0, -100.0]) if case == "behind" else torch.tensor([1e3, 0.0, 0.0])
    scene |= {"backgrounds": torch.tensor([[0.1, 0.2, 0.3, 0.0], [0.4, 0.5, 0.6, 0.0]]), "render_mode": "RGB+ED"}
    fast = render(rasterization_2dgs, scene, torch.float32)
    assert torch.equal(fast["image"], scene["backgrounds"][:, None, None].expand(2, 18, 20, 4))
    for name, value in fast.items():
        assert name in ("image", "d backgrounds") or not value.any(), name
    assert fast["d colors"].shape == scene["colors"].shape


def test_absolute_gradients_of_centres() -> None:
    """Each pixel's gradient of the projected centre, taken by rendering one pixel's loss at a time."""
    scene = make_scene(12, 10, 9, sh_degree=None, pixels=1.0)
    leaves: dict[str, Any] = {k: v.double() if isinstance(v, Tensor) else v for k, v in scene.items()}
    leaves["means"].requires_grad_()
    *images, meta = dense_rasterization_2dgs(**leaves)
    expected = torch.zeros(1, 12, 2, dtype=torch.float64)
    assert images[0] is not None
    for value in images[0].sum(-1).flatten():
        (gradient,) = torch.autograd.grad(value, meta["means2d"], retain_graph=True)
        expected += gradient.abs()
    means = scene["means"].requires_grad_()
    image, *_, meta = rasterization_2dgs(**{**scene, "means": means}, absgrad=True)
    image.sum().backward()
    assert expected.max() > 0.1
    assert torch.allclose(meta["means2d"].absgrad.double(), expected, rtol=0, atol=1e-5)


def test_projection_of_gsplat() -> None:
    """Radii, centres, depths, ray transforms and normals are those of gsplat's own reference in torch."""
    from gsplat.cuda._torch_impl_2dgs import _fully_fused_projection_2dgs

    scene = {**make_scene(300, 60, 50, cameras=2), "render_mode": "RGB+ED"}
    scene["scales"][:, 2] = 1.0  # the reference scales normals by it, the kernels do not
    *_, meta = rasterization_2dgs(**scene)
    arguments: Any = [scene[k].double() for k in ("means", "quats", "scales", "viewmats", "Ks")]
    reference: Any = _fully_fused_projection_2dgs  # its annotation promises four results
    radii, means2d, depths, transforms, normals = reference(*arguments, 60, 50)
    assert torch.equal(meta["radii"], radii)
    seen = radii > 0
    transforms = transforms.mT  # the layout of its kernels
    pairs = {"means2d": means2d, "depths": depths, "normals": normals, "ray_transforms": transforms}
    for name, expected in pairs.items():
        assert torch.allclose(meta[name][seen].double(), expected[seen], rtol=1e-5, atol=1e-4), name


def test_same_bits_on_any_threads_and_beside_rows_that_nobody_sees() -> None:
    scene = {**make_scene(3000, 200, 150, pixels=6.0), "render_mode": "RGB+ED"}
    try:
        set_render_threads(1)
        one = render(rasterization_2dgs, scene, torch.float32)
        set_render_threads(3)
        three = render(rasterization_2dgs, scene, torch.float32)
    finally:
        set_render_threads(None)
    assert [k for k in one if not torch.equal(one[k], three[k])] == []
    seen = one["radii"][0] > 0
    part = {k: v[seen] if k in LEAVES else v for k, v in scene.items()}
    some = render(rasterization_2dgs, part, torch.float32)
    for name in (*IMAGES, "d means", "d quats", "d scales", "d opacities", "d colors", "gradient_2dgs"):
        whole = one[name]
        if name == "gradient_2dgs":
            whole = whole[:, seen]
        elif name.startswith("d "):
            whole = whole[seen]
        assert torch.equal(some[name], whole), name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"viewmats": torch.eye(4)[None].requires_grad_()}, "viewmats"),
        ({"distloss": True}, "render_mode"),
        ({"depth_mode": "mean"}, "depth_mode"),
        ({"backgrounds": torch.zeros(1, 3), "render_mode": "RGB+D"}, "backgrounds"),
        ({"packed": True}, "packed"),
        ({"scales": torch.ones(20, 2)}, "scales"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: "):
        rasterization_2dgs(**{**make_scene(20, 20, 20), **options})
