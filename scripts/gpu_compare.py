"""Compares gsplat on CUDA with the package's CPU rasterizers, of Gaussians and of surfels.

Compared are images and gradients of the same seeded scene.

Not yet run: no machine with a GPU was at hand when this was written.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from odin_nerfstudio.rendering import rasterization, rasterization_2dgs, warm_up_surfels

WIDTH, HEIGHT, COUNT = 320, 240, 5000
IMAGE_TOLERANCE = 2e-3
"""Largest difference of a pixel. A splat at the 1/255 cut or at the end of a ray may fall on either side."""
GRADIENT_TOLERANCE = 2e-3
"""Largest difference of a gradient, relative to the largest gradient of its tensor; gsplat sums with atomics."""


def scene(device: str) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Leaf tensors, view matrix [1, 4, 4] and intrinsics [1, 3, 3] of a random scene, equal on every device."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    depth = 2 + 6 * uniform(COUNT)
    means = torch.stack(((uniform(COUNT) - 0.5) * depth, (uniform(COUNT) - 0.5) * depth, depth), dim=-1)
    leaves = {
        "means": means,
        "quats": uniform(COUNT, 4) - 0.5,
        "scales": 0.01 + 0.05 * uniform(COUNT, 3),
        "opacities": uniform(COUNT),
        "colors": uniform(COUNT, 16, 3) - 0.5,
    }
    leaves = {name: value.to(device).requires_grad_() for name, value in leaves.items()}
    focal = 0.9 * WIDTH
    intrinsics = torch.tensor([[[focal, 0, WIDTH / 2], [0, focal, HEIGHT / 2], [0, 0, 1]]], device=device)
    return leaves, torch.eye(4, device=device)[None], intrinsics


def render(device: str, mode: str) -> dict[str, torch.Tensor]:
    """Image, alpha and gradients on one device, brought to the CPU."""
    leaves, viewmat, intrinsics = scene(device)
    image, alpha, info = rasterization(
        **leaves,
        viewmats=viewmat,
        Ks=intrinsics,
        width=WIDTH,
        height=HEIGHT,
        sh_degree=3,
        render_mode="RGB+ED",
        rasterize_mode=mode,
        packed=False,
        absgrad=True,
    )
    info["means2d"].retain_grad()
    weight = torch.rand(image.shape, generator=torch.Generator().manual_seed(1)).to(device)
    ((image * weight).mean() + alpha.mean()).backward()
    result = {"image": image, "alpha": alpha, "absgrad": info["means2d"].absgrad}
    result |= {f"grad {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: value.detach().cpu() for name, value in result.items()}


def render_surfels(device: str) -> dict[str, torch.Tensor]:
    """Images of the scene as surfels, and gradients, on one device, brought to the CPU."""
    leaves, viewmat, intrinsics = scene(device)
    image, alpha, normals, surface, distortion, median, _ = rasterization_2dgs(
        **leaves,
        viewmats=viewmat,
        Ks=intrinsics,
        width=WIDTH,
        height=HEIGHT,
        sh_degree=3,
        render_mode="RGB+ED",
        distloss=True,
    )
    result = {"image": image, "alpha": alpha, "normals": normals, "distortion": distortion, "median": median}
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.rand(value.shape, generator=generator).to(device) for name, value in result.items()}
    losses = [(value * weights[name]).mean() for name, value in result.items() if name != "median"]
    torch.stack(losses).sum().backward()
    if surface is not None:
        result["surface normals"] = surface
    result |= {f"grad {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: value.detach().cpu() for name, value in result.items()}


def main() -> int:
    """Prints a table of differences; exit code 1 if one is above its tolerance."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to compare")
        return 2
    warm_up_surfels()
    failed = False
    for mode in ("classic", "antialiased", "surfels"):
        if mode == "surfels":
            gpu, cpu = render_surfels("cuda"), render_surfels("cpu")
        else:
            gpu, cpu = render("cuda", mode), render("cpu", mode)
        for name, value in gpu.items():
            is_image = not name.startswith(("grad", "absgrad"))
            scale = 1.0 if is_image else float(cpu[name].abs().max())
            differences = (value.reshape(cpu[name].shape) - cpu[name]).abs()
            # A median or a normal of depths jumps where a surfel falls on the other side of a threshold.
            jumps = name in ("median", "surface normals")
            difference = float(differences.mean() if jumps else differences.max()) / max(scale, 1e-30)
            tolerance = IMAGE_TOLERANCE if is_image else GRADIENT_TOLERANCE
            verdict = "ok" if difference <= tolerance else "DIFFERS"
            failed |= difference > tolerance
            what = "mean" if jumps else "max"
            print(f"{mode:12s} {name:16s} {what} difference {difference:.2e}  tolerance {tolerance:.0e}  {verdict}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
