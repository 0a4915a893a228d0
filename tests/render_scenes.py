"""Small random scenes for the rasterizer's tests, and the comparison with the dense twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.rendering import rasterization
from odin_nerfstudio.rendering.dense import dense_rasterization

LEAVES = ("means", "quats", "scales", "opacities", "colors", "viewmats", "backgrounds")


def make_scene(
    count: int,
    width: int,
    height: int,
    *,
    cameras: int = 1,
    sh_degree: int | None = 3,
    pixels: float = 4.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `rasterization`: Gaussians about `pixels` wide in front of cameras that look along z."""
    g = torch.Generator().manual_seed(seed)
    focal = 0.9 * width
    z = 2 + 6 * torch.rand(count, generator=g)
    x = (torch.rand(count, generator=g) * 1.1 - 0.55) * width / focal * z
    y = (torch.rand(count, generator=g) * 1.1 - 0.55) * height / focal * z
    viewmats = torch.eye(4).repeat(cameras, 1, 1)
    for k in range(1, cameras):
        turn = torch.randn(3, 3, generator=g) * 0.1
        viewmats[k, :3, :3] = torch.matrix_exp(turn - turn.T)
        viewmats[k, :3, 3] = 0.2 * torch.randn(3, generator=g)
    coefficients = 1 if sh_degree is None else (sh_degree + 1) ** 2
    colors = 0.3 * torch.randn(count, coefficients, 3, generator=g)
    return {
        "means": torch.stack([x, y, z], dim=-1),
        "quats": torch.randn(count, 4, generator=g),
        "scales": 0.6 * pixels * z[:, None] / focal * torch.exp(0.5 * torch.randn(count, 3, generator=g)),
        "opacities": torch.sigmoid(1.5 * torch.randn(count, generator=g)),
        "colors": colors[:, 0] if sh_degree is None else colors,
        "viewmats": viewmats,
        "Ks": torch.tensor([[focal, 0, width / 2 + 1.3], [0, focal, height / 2 - 0.7], [0, 0, 1]]).repeat(
            cameras, 1, 1
        ),
        "width": width,
        "height": height,
        "sh_degree": sh_degree,
    }


def run(function: Any, scene: dict[str, Any], dtype: torch.dtype, seed: int = 1) -> dict[str, Tensor]:
    """Render, and differentiate a random weighting of both images; returns images, radii and all gradients."""
    arguments: dict[str, Any] = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in scene.items()}
    leaves = {k: arguments[k].clone().requires_grad_() for k in LEAVES if isinstance(scene.get(k), Tensor)}
    image, alphas, info = function(**{**arguments, **leaves})
    info["means2d"].retain_grad()
    g = torch.Generator().manual_seed(seed)
    weights = torch.randn(image.shape, generator=g).to(dtype)
    if "ED" in scene.get("render_mode", "RGB"):
        weights = weights * (alphas.detach() > 0.1)  # depth / alpha is ill-conditioned in float32 where alpha is small
    ((image * weights).sum() + (alphas * torch.randn(alphas.shape, generator=g).to(dtype)).sum()).backward()
    result = {"image": image.detach(), "alphas": alphas.detach(), "radii": info["radii"]}
    result["means2d"] = info["means2d"].grad
    result |= {k: torch.zeros_like(t) if t.grad is None else t.grad for k, t in leaves.items()}
    result["viewmats"] = result["viewmats"][:, :3]  # the last row is no input of the method
    if hasattr(info["means2d"], "absgrad"):
        result["absgrad"] = info["means2d"].absgrad
    return result


def assert_as_dense(scene: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Images and gradients of the CPU rasterizer agree with the twin in float64, relative to each one's largest entry
    (or 1, if that is larger).
    """
    fast, dense = run(rasterization, scene, torch.float32), run(dense_rasterization, scene, torch.float64)
    assert torch.equal(fast.pop("radii"), dense.pop("radii"))
    for name, expected in dense.items():
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        error = (fast[name].double() - expected).abs().max().item() / scale if expected.numel() else 0.0
        assert fast[name].shape == expected.shape, name
        assert error <= tolerance, f"{name}: {error:.1e}"
