"""The meaning of `rasterization_2dgs` in plain torch, for tests: any float dtype, every surfel on every pixel.

It follows gsplat 1.4.0 (Huang et al. 2024) and differentiates by autograd. Time and memory grow as primitives times
pixels: keep scenes small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.rendering.dense import (
    ALPHA_MAX,
    ALPHA_MIN,
    TILE,
    TRANSMITTANCE_MIN,
    harmonics,
    rotation_matrices,
)


def project_surfels(
    means: Tensor, quats: Tensor, scales: Tensor, viewmat: Tensor, K: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Centres in pixels (N, 2), depths (N,), ray transforms (N, 3, 3), radii (N,), normals (N, 3), camera's frame."""
    axes = viewmat[:3, :3] @ rotation_matrices(quats)
    centres = means @ viewmat[:3, :3].T + viewmat[:3, 3]
    normals = axes[:, :, 2]
    facing = (-(normals * centres).sum(-1, keepdim=True) > 0).to(means.dtype) * 2 - 1
    transforms = K @ torch.stack([axes[:, :, 0] * scales[:, :1], axes[:, :, 1] * scales[:, 1:2], centres], dim=-1)
    sign = torch.tensor([1.0, 1.0, -1.0], dtype=means.dtype)
    below = (sign * transforms[:, 2] ** 2).sum(-1, keepdim=True)
    f = sign / torch.where(below == 0, torch.ones_like(below), below)
    means2d = torch.stack([(f * transforms[:, k] * transforms[:, 2]).sum(-1) for k in (0, 1)], dim=-1)
    squares = torch.stack([(f * transforms[:, k] ** 2).sum(-1) for k in (0, 1)], dim=-1)
    radii = torch.ceil(3 * torch.sqrt((means2d**2 - squares).amax(-1).clamp(min=1e-4)))
    radii = torch.where(below[:, 0] == 0, torch.zeros_like(radii), radii)
    return means2d, centres[:, 2], transforms, radii.detach(), normals * facing


def blend_surfels(
    order: list[int],
    means2d: Tensor,
    transforms: Tensor,
    opacities: Tensor,
    radii: Tensor,
    colors: Tensor,
    normals: Tensor,
    size: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Colours (H, W, X), transmittance (H, W), normals (H, W, 3), distortion and median depth (H, W), front to back."""
    width, height = size
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    px, py = columns.to(means2d.dtype) + 0.5, rows.to(means2d.dtype) + 0.5
    tile_x, tile_y = columns // TILE, rows // TILE
    image, normal_image = means2d.new_zeros(height, width, colors.shape[-1]), means2d.new_zeros(height, width, 3)
    transmittance = means2d.new_ones(height, width)
    distortion, depth_sum, median = (means2d.new_zeros(height, width) for _ in range(3))
    finished = torch.zeros(height, width, dtype=torch.bool)
    zero = torch.zeros_like(transmittance)
    for i in order:
        x, y, r = means2d[i, 0].item(), means2d[i, 1].item(), radii[i].item()
        in_box = (
            (tile_x >= (x - r) // TILE)
            & (tile_x < -((-x - r) // TILE))
            & (tile_y >= (y - r) // TILE)
            & (tile_y < -((-y - r) // TILE))
        )
        across = px[..., None] * transforms[i, 2] - transforms[i, 0]
        along = py[..., None] * transforms[i, 2] - transforms[i, 1]
        meet = torch.cross(across, along, dim=-1)
        meets = meet[..., 2] != 0
        third = torch.where(meets, meet[..., 2], torch.ones_like(zero))
        in_plane = (meet[..., 0] / third) ** 2 + (meet[..., 1] / third) ** 2
        in_image = 2 * ((means2d[i, 0] - px) ** 2 + (means2d[i, 1] - py) ** 2)
        sigma = 0.5 * torch.where(in_plane <= in_image, in_plane, in_image)
        alpha = torch.clamp(opacities[i] * torch.exp(-sigma), max=ALPHA_MAX)
        reached = in_box & meets & (alpha >= ALPHA_MIN) & ~finished
        left = transmittance * (1 - alpha)
        ends = reached & (left <= TRANSMITTANCE_MIN)
        takes = reached & ~ends
        weight = torch.where(takes, alpha * transmittance, zero)
        depth = colors[i, -1]
        image = image + weight[..., None] * colors[i]
        normal_image = normal_image + weight[..., None] * normals[i]
        distortion = distortion + 2 * weight * (depth * (1 - transmittance) - depth_sum)
        depth_sum = depth_sum + weight * depth
        median = torch.where(takes & (transmittance > 0.5), depth, median)
        transmittance = torch.where(takes, left, transmittance)
        finished = finished | ends
    return image, transmittance, normal_image, distortion, median


def normals_of_depth(depth: Tensor, to_world: Tensor, K: Tensor) -> Tensor:
    """Normals (H, W, 3) in the world of a depth image (H, W)."""
    height, width = depth.shape
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    u, v = (x - K[0, 2] + 0.5) / K[0, 0], (y - K[1, 2] + 0.5) / K[1, 1]
    points = torch.stack([u, v, torch.ones_like(u)], dim=-1) @ to_world.T * depth[..., None]
    down, right = points[2:, 1:-1] - points[:-2, 1:-1], points[1:-1, 2:] - points[1:-1, :-2]
    inner = torch.nn.functional.normalize(torch.cross(down, right, dim=-1), dim=-1)
    return torch.nn.functional.pad(inner, (0, 0, 1, 1, 1, 1))


def dense_rasterization_2dgs(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    colors: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    width: int,
    height: int,
    near_plane: float = 0.01,
    far_plane: float = 1e10,
    radius_clip: float = 0.0,
    sh_degree: int | None = None,
    backgrounds: Tensor | None = None,
    render_mode: str = "RGB",
    depth_mode: str = "expected",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, dict[str, Any]]:
    """`rasterization_2dgs` by dense torch operations; arguments and results as there.

    `meta` has radii, means2d, depths and, to differentiate, a list of the ray transforms [N, 3, 3] of each camera.
    """
    projections = [project_surfels(means, quats, scales, V, K) for V, K in zip(viewmats, Ks)]
    transforms = [p[2] * 1 for p in projections]  # a copy, whose gradient leaves out that through the projected centres
    all_means2d = torch.stack([p[0] for p in projections])  # one tensor, so that its gradient can be asked for
    results: list[tuple[Tensor, ...]] = []
    all_radii, surfaces = [], []
    for k, (_, depths, _, radii, normals) in enumerate(projections):
        means2d = all_means2d[k]
        seen = (depths >= near_plane) & (depths <= far_plane) & (radii > radius_clip)
        seen &= (means2d[:, 0] + radii > 0) & (means2d[:, 0] - radii < width)
        seen &= (means2d[:, 1] + radii > 0) & (means2d[:, 1] - radii < height)
        to_world = torch.linalg.inv(viewmats[k, :3, :3])
        if sh_degree is None:
            final = colors[k] if colors.dim() == 3 else colors
        else:
            rays = means + to_world @ viewmats[k, :3, 3]
            directions = rays / rays.norm(dim=-1, keepdim=True)
            coefficients = colors[k] if colors.dim() == 4 else colors
            final = torch.clamp(harmonics(sh_degree, directions, coefficients) + 0.5, min=0.0)
        if render_mode in ("D", "ED"):
            final = depths[:, None]
        elif render_mode != "RGB":
            final = torch.cat([final, depths[:, None]], dim=-1)
        order = [i for i in torch.argsort(depths.detach(), stable=True).tolist() if seen[i]]
        image, transmittance, normal_image, distortion, median = blend_surfels(
            order, means2d, transforms[k], opacities, radii, final, normals, (width, height)
        )
        if backgrounds is not None:
            image = image + transmittance[..., None] * backgrounds[k]
        alpha = 1 - transmittance[..., None]
        if render_mode in ("ED", "RGB+ED"):
            image = torch.cat([image[..., :-1], image[..., -1:] / alpha.clamp(min=1e-10)], dim=-1)
        if render_mode in ("RGB+D", "RGB+ED"):
            depth = median if depth_mode == "median" else image[..., -1]
            surfaces.append(normals_of_depth(depth, to_world, Ks[k]))
        results.append((image, alpha, normal_image @ to_world.T, distortion[..., None], median[..., None]))
        all_radii.append(torch.where(seen, radii, 0).int())
    images, alphas, normal_images, distortions, medians = (torch.stack(r) for r in zip(*results))
    meta = {
        "radii": torch.stack(all_radii),
        "means2d": all_means2d,
        "depths": torch.stack([p[1] for p in projections]),
        "ray_transforms": transforms,
    }
    surface = torch.stack(surfaces).squeeze(0) if surfaces else None
    return images, alphas, normal_images, surface, distortions, medians, meta
