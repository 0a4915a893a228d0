"""The meaning of `rasterization` in plain torch, for tests: any float dtype, every splat on every pixel, no tricks.

It follows gsplat 1.4.0 (Kerbl et al. 2023; Zwicker et al. 2002 for the projection; Yu et al. 2024 for the compensation)
and differentiates by autograd. Time and memory grow as primitives times pixels: keep scenes small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TILE = 16
ALPHA_MAX, ALPHA_MIN, TRANSMITTANCE_MIN = 0.999, 1.0 / 255.0, 1e-4


def rotation_matrices(quats: Tensor) -> Tensor:
    """Quaternions w x y z of any length (N, 4) to rotation matrices (N, 3, 3)."""
    w, x, y, z = torch.unbind(quats / quats.norm(dim=-1, keepdim=True), dim=-1)
    rows = [
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    ]
    return torch.stack(rows, dim=-1).reshape(-1, 3, 3)


def harmonics(degree: int, directions: Tensor, coefficients: Tensor) -> Tensor:
    """Sum of spherical harmonics up to `degree` (at most 3) in unit `directions` (N, 3); coefficients (N, K, 3)."""
    x, y, z = torch.unbind(directions, dim=-1)
    basis = [torch.full_like(x, 0.2820947917738781)]
    if degree >= 1:
        basis += [-0.48860251190292 * y, 0.48860251190292 * z, -0.48860251190292 * x]
    if degree >= 2:
        basis += [
            1.0925484305920792 * x * y,
            -1.092548430592079 * y * z,
            0.9461746957575601 * z * z - 0.3153915652525201,
            -1.092548430592079 * x * z,
            0.5462742152960395 * (x * x - y * y),
        ]
    if degree >= 3:
        basis += [
            -0.5900435899266435 * y * (3 * x * x - y * y),
            2.890611442640554 * x * y * z,
            y * (0.4570457994644658 - 2.285228997322329 * z * z),
            z * (1.865881662950577 * z * z - 1.119528997770346),
            x * (0.4570457994644658 - 2.285228997322329 * z * z),
            1.445305721320277 * z * (x * x - y * y),
            -0.5900435899266435 * x * (x * x - 3 * y * y),
        ]
    return torch.einsum("nk,nkc->nc", torch.stack(basis, dim=-1), coefficients[:, : len(basis)])


def project(
    means: Tensor, quats: Tensor, scales: Tensor, viewmat: Tensor, K: Tensor, width: int, height: int, eps2d: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Means in pixels (N, 2), depths (N,), conics (N, 3), 3-sigma radii (N,) and compensations (N,)."""
    fx, fy, cx, cy = K[0, 0], K[1, 1], K[0, 2], K[1, 2]
    rotation = viewmat[:3, :3]
    x, y, z = torch.unbind(means @ rotation.T + viewmat[:3, 3], dim=-1)
    # The Jacobian is taken no farther than 15 % of the image outside its border.
    margin_x, margin_y = 0.15 * width / fx, 0.15 * height / fy
    jx = torch.clamp(x / z, -float(cx / fx + margin_x), float((width - cx) / fx + margin_x))
    jy = torch.clamp(y / z, -float(cy / fy + margin_y), float((height - cy) / fy + margin_y))
    zero = torch.zeros_like(z)
    jacobian = torch.stack([fx / z, zero, -fx * jx / z, zero, fy / z, -fy * jy / z], dim=-1).reshape(-1, 2, 3)
    axes = jacobian @ rotation @ (rotation_matrices(quats) * scales[:, None, :])
    covariance = axes @ axes.transpose(1, 2)
    a, b, c = covariance[:, 0, 0], covariance[:, 0, 1], covariance[:, 1, 1]
    sharp = a * c - b * b
    a, c = a + eps2d, c + eps2d
    det = a * c - b * b
    conics = torch.stack([c / det, -b / det, a / det], dim=-1)
    mid = 0.5 * (a + c)
    radii = torch.ceil(3.0 * torch.sqrt(mid + torch.sqrt(torch.clamp(mid * mid - det, min=0.01))))
    compensations = torch.sqrt(torch.clamp(sharp / det, min=0.0))
    return torch.stack([fx * x / z + cx, fy * y / z + cy], dim=-1), z, conics, radii.detach(), compensations


def blend(
    order: list[int],
    means2d: Tensor,
    conics: Tensor,
    opacities: Tensor,
    radii: Tensor,
    colors: Tensor,
    size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Colours (H, W, X) and transmittance (H, W) of the splats in `order`, front to back."""
    width, height = size
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    px, py = columns.to(means2d.dtype) + 0.5, rows.to(means2d.dtype) + 0.5
    tile_x, tile_y = columns // TILE, rows // TILE
    image = means2d.new_zeros(height, width, colors.shape[-1])
    transmittance = means2d.new_ones(height, width)
    finished = torch.zeros(height, width, dtype=torch.bool)
    for i in order:
        x, y, r = means2d[i, 0].item(), means2d[i, 1].item(), radii[i].item()
        in_box = (
            (tile_x >= (x - r) // TILE)
            & (tile_x < -((-x - r) // TILE))
            & (tile_y >= (y - r) // TILE)
            & (tile_y < -((-y - r) // TILE))
        )
        dx, dy = means2d[i, 0] - px, means2d[i, 1] - py
        sigma = 0.5 * (conics[i, 0] * dx * dx + conics[i, 2] * dy * dy) + conics[i, 1] * dx * dy
        alpha = torch.clamp(opacities[i] * torch.exp(-sigma), max=ALPHA_MAX)
        reached = in_box & (sigma >= 0) & (alpha >= ALPHA_MIN) & ~finished
        left = transmittance * (1 - alpha)
        ends = reached & (left <= TRANSMITTANCE_MIN)
        takes = reached & ~ends
        weight = torch.where(takes, alpha * transmittance, torch.zeros_like(alpha))
        image = image + weight[..., None] * colors[i]
        transmittance = torch.where(takes, left, transmittance)
        finished = finished | ends
    return image, transmittance


def dense_rasterization(
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
    eps2d: float = 0.3,
    sh_degree: int | None = None,
    backgrounds: Tensor | None = None,
    render_mode: str = "RGB",
    rasterize_mode: str = "classic",
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """`rasterization` by dense torch operations; arguments and results as there (`info`: radii, means2d, depths)."""
    projections = [project(means, quats, scales, V, K, width, height, eps2d) for V, K in zip(viewmats, Ks)]
    all_means2d = torch.stack([p[0] for p in projections])  # one tensor, so that its gradient can be asked for
    images, alphas, infos = [], [], []
    for k, (_, depths, conics, radii, compensations) in enumerate(projections):
        means2d = all_means2d[k]
        seen = (depths >= near_plane) & (depths <= far_plane) & (radii > radius_clip)
        seen &= (means2d[:, 0] + radii > 0) & (means2d[:, 0] - radii < width)
        seen &= (means2d[:, 1] + radii > 0) & (means2d[:, 1] - radii < height)
        used_opacities = opacities * compensations if rasterize_mode == "antialiased" else opacities
        if sh_degree is None:
            final = colors[k] if colors.dim() == 3 else colors
        else:
            rays = means + torch.linalg.solve(viewmats[k, :3, :3], viewmats[k, :3, 3])
            directions = rays / rays.norm(dim=-1, keepdim=True)
            coefficients = colors[k] if colors.dim() == 4 else colors
            final = torch.clamp(harmonics(sh_degree, directions, coefficients) + 0.5, min=0.0)
        background = means.new_zeros(final.shape[-1]) if backgrounds is None else backgrounds[k]
        if render_mode in ("D", "ED"):
            final, background = depths[:, None], means.new_zeros(1)
        elif render_mode in ("RGB+D", "RGB+ED"):
            final = torch.cat([final, depths[:, None]], dim=-1)
            background = torch.cat([background, means.new_zeros(1)])
        order = [i for i in torch.argsort(depths.detach(), stable=True).tolist() if seen[i]]
        image, transmittance = blend(order, means2d, conics, used_opacities, radii, final, (width, height))
        image = image + transmittance[..., None] * background
        alpha = 1 - transmittance[..., None]
        if render_mode in ("ED", "RGB+ED"):
            image = torch.cat([image[..., :-1], image[..., -1:] / alpha.clamp(min=1e-10)], dim=-1)
        images.append(image)
        alphas.append(alpha)
        infos.append((torch.where(seen, radii, 0).int(), depths))
    info = {"radii": torch.stack([i[0] for i in infos]), "depths": torch.stack([i[1] for i in infos])}
    return torch.stack(images), torch.stack(alphas), {**info, "means2d": all_means2d}
