"""gsplat's functions in torch's operations on the CPU, in the place of its kernels for CUDA.

Projection, harmonics and tiles are gsplat's own references, or the package's dense twin of surfels; pixels are blended
tile by tile from what these say. As with the kernels, what is not visible holds no values, and gradients with respect
to the absolute value and for densification are left where gsplat leaves them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gsplat.cuda import _torch_impl as reference
from gsplat.cuda import _wrapper
from torch import Tensor

from odin_nerfstudio.rendering import dense_surfels
from odin_nerfstudio.rendering.dense import ALPHA_MAX, ALPHA_MIN, TRANSMITTANCE_MIN

NAN = float("nan")


def unset(seen: Tensor, *values: Tensor | None) -> list[Any]:
    """Values [1, N, ...] without those that are not seen [1, N]."""
    return [
        None if v is None else torch.where(seen.view(*seen.shape, *[1] * (v.dim() - 2)), v, torch.full_like(v, NAN))
        for v in values
    ]


def fully_fused_projection(
    means: Tensor, covars: None, quats: Tensor, scales: Tensor, viewmats: Tensor, Ks: Tensor, width: int, height: int,
    eps2d: float, near_plane: float, far_plane: float, radius_clip: float, packed: bool, sparse_grad: bool,
    calc_compensations: bool, camera_model: Any,
) -> tuple[Any, ...]:  # fmt: skip
    covariances, _ = reference._quat_scale_to_covar_preci(quats, scales, compute_preci=False)
    radii, means2d, depths, conics, compensations = reference._fully_fused_projection(
        means, covariances, viewmats, Ks, width, height, eps2d, near_plane, far_plane, calc_compensations,  # type: ignore[arg-type]
        camera_model,
    )  # fmt: skip
    radii = torch.where(radii <= radius_clip, 0, radii)
    compensations = None if compensations is None else torch.where(radii > 0, compensations, 0.0)
    return radii, *unset(radii > 0, means2d, depths, conics), compensations


def fully_fused_projection_2dgs(
    means: Tensor, quats: Tensor, scales: Tensor, viewmats: Tensor, Ks: Tensor, width: int, height: int, eps2d: float,
    near_plane: float, far_plane: float, radius_clip: float, packed: bool, sparse_grad: bool,
) -> tuple[Any, ...]:  # fmt: skip
    device, arguments = means.device, (means, quats, scales, viewmats[0], Ks[0])
    means2d, depths, transforms, radii, normals = dense_surfels.project_surfels(*(t.cpu() for t in arguments))
    seen = (depths >= near_plane) & (depths <= far_plane) & (radii > radius_clip)
    seen &= (means2d[:, 0] + radii > 0) & (means2d[:, 0] - radii < width)
    seen &= (means2d[:, 1] + radii > 0) & (means2d[:, 1] - radii < height)
    values = unset(seen[None], *(v[None] for v in (means2d, depths, transforms, normals)))
    return tuple(t.to(device) for t in (torch.where(seen, radii, 0).int()[None], *values))


def spherical_harmonics(degree: int, dirs: Tensor, coeffs: Tensor, masks: Tensor) -> Tensor:
    return unset(masks, reference._spherical_harmonics(degree, dirs, coeffs))[0]


def isect_tiles(
    means2d: Tensor, radii: Tensor, depths: Tensor, tile: int, across: int, down: int, packed: bool, n_cameras: int
) -> tuple[Tensor, ...]:
    found = reference._isect_tiles(means2d.cpu(), radii.cpu(), depths.cpu(), tile, across, down)
    return tuple(t.to(means2d.device) for t in found)


def isect_offset_encode(ids: Tensor, cameras: int, across: int, down: int) -> Tensor:
    return reference._isect_offset_encode(ids.cpu(), cameras, across, down).to(ids.device)


class _Tiles:
    """Pixels and splats of each tile, and an image made from what is blended there."""

    def __init__(self, width: int, height: int, tile: int, offsets: Tensor, flat: Tensor) -> None:
        self.width, self.height, self._tile = width, height, tile
        self._across = offsets.shape[2]
        self._starts = [*offsets.cpu().flatten().tolist(), flat.shape[0]]
        self._flat = flat.cpu().long()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, tuple[slice, slice]]]:
        """Splats front to back [n], centres of pixels [P, 2], and where the pixels are."""
        for k, (start, end) in enumerate(zip(self._starts, self._starts[1:])):
            y, x = k // self._across * self._tile, k % self._across * self._tile
            place = slice(y, min(y + self._tile, self.height)), slice(x, min(x + self._tile, self.width))
            rows, columns = (torch.arange(s.start, s.stop) + 0.5 for s in place)
            pixels = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).reshape(-1, 2)
            yield self._flat[start:end], pixels, place


def blend_weights(alphas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, and what is left before each of them [n, P], and at the end [P]. alphas: front to back [n, P]."""
    alphas = torch.where(alphas >= ALPHA_MIN, alphas, 0.0)
    left = torch.cumprod(1 - alphas, 0)
    before = torch.cat((torch.ones_like(alphas[:1]), left))[:-1]
    takes = (left.detach() > TRANSMITTANCE_MIN).to(alphas)
    return alphas * before * takes, before, (1 - alphas * takes).prod(0)


class _Kernel(torch.autograd.Function):
    """Something differentiable that runs on the CPU, whatever device its arguments are on."""

    @staticmethod
    def forward(ctx: Any, blend: Callable, after: Callable, *given: Tensor | None) -> tuple[Tensor, ...]:
        device = given[0].device  # type: ignore[union-attr]
        with torch.enable_grad():
            held = [None if t is None else t.detach().cpu().requires_grad_() for t in given]
            results, more = blend(*held)
        ctx.held, ctx.more, ctx.results, ctx.after = held, more, results, after
        ctx.save_for_backward(*given)
        return tuple(r.detach().to(device) for r in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        device, wanted = gradients[0].device, [t for t in ctx.held if t is not None]
        linked = [(r, g.cpu()) for r, g in zip(ctx.results, gradients) if r.requires_grad]
        results, given = zip(*linked) if linked else ((), ())
        everything = [*wanted, *ctx.more]
        if linked:
            found = torch.autograd.grad(results, everything, given, allow_unused=True)
        else:
            found = [None] * len(everything)
        found = [torch.zeros_like(t) if f is None else f for t, f in zip(everything, found)]
        by_argument = iter(found[: len(wanted)])
        out = [None if t is None else next(by_argument) for t in ctx.held]
        out = ctx.after(ctx.saved_tensors, out, found[len(wanted) :])
        return None, None, *(None if t is None else t.to(device) for t in out)


def rasterize_to_pixels(
    means2d: Tensor, conics: Tensor, colors: Tensor, opacities: Tensor, width: int, height: int, tile: int,
    offsets: Tensor, flat: Tensor, backgrounds: Tensor | None, packed: bool, absgrad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    tiles = _Tiles(width, height, tile, offsets, flat)
    ids = [splats for splats, _, _ in tiles]

    def blend(means2d: Tensor, conics: Tensor, colors: Tensor, opacities: Tensor, background: Tensor | None) -> Any:
        image, alphas = torch.zeros(height, width, colors.shape[-1]), torch.zeros(height, width, 1)
        each = []
        for splats, pixels, (rows, columns) in tiles:
            shape = (rows.stop - rows.start, columns.stop - columns.start, -1)
            mean = means2d[0, splats, None].expand(-1, pixels.shape[0], -1)
            each.append(mean)
            dx, dy = (mean - pixels).unbind(-1)
            a, b, c = conics[0, splats, :, None].unbind(1)
            sigma = 0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy
            alpha = torch.clamp_max(opacities[0, splats, None] * torch.exp(-sigma), ALPHA_MAX)
            weights, _, left = blend_weights(torch.where(sigma >= 0, alpha, 0.0))
            color = torch.einsum("np,nc->pc", weights, colors[0, splats])
            color = color if background is None else color + left[:, None] * background
            image = image.index_put(_grid(rows, columns), color.view(shape))
            alphas = alphas.index_put(_grid(rows, columns), (1 - left).view(shape))
        return (image[None], alphas[None]), each

    def after(given: tuple[Tensor, ...], out: list[Tensor | None], each: list[Tensor]) -> list[Tensor | None]:
        if absgrad:
            sums = torch.zeros(given[0].shape[1:])
            for splats, gradient in zip(ids, each):
                sums.index_add_(0, splats, gradient.abs().sum(1))
            given[0].absgrad = sums[None].to(given[0].device)  # type: ignore[attr-defined]
        return out

    return _Kernel.apply(blend, after, means2d, conics, colors, opacities, backgrounds)  # type: ignore[return-value]


def rasterize_to_pixels_2dgs(
    means2d: Tensor, transforms: Tensor, colors: Tensor, opacities: Tensor, normals: Tensor, densify: Tensor,
    width: int, height: int, tile: int, offsets: Tensor, flat: Tensor, backgrounds: Tensor | None, packed: bool,
    absgrad: bool, distloss: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    tiles = _Tiles(width, height, tile, offsets, flat)

    def blend(
        means2d: Tensor, transforms: Tensor, colors: Tensor, opacities: Tensor, normals: Tensor, densify: Tensor,
        background: Tensor | None,
    ) -> Any:  # fmt: skip
        channels = colors.shape[-1]
        whole = torch.zeros(height, width, channels + 6)
        for splats, pixels, (rows, columns) in tiles:
            px, py = pixels[:, :1], pixels[:, 1:]
            x, y, z = transforms[0, splats, :, None].unbind(1)
            meet = torch.linalg.cross(px * z - x, py * z - y)
            meets = meet[..., 2] != 0
            third = torch.where(meets, meet[..., 2], 1.0)
            in_plane = (meet[..., 0] / third) ** 2 + (meet[..., 1] / third) ** 2
            in_image = 2 * ((means2d[0, splats, None] - pixels) ** 2).sum(-1)
            sigma = 0.5 * torch.where(in_plane <= in_image, in_plane, in_image)
            alpha = torch.clamp_max(opacities[0, splats, None] * torch.exp(-sigma), ALPHA_MAX)
            alpha = torch.where(meets & (alpha >= ALPHA_MIN), alpha, 0.0)
            weights, before, left = blend_weights(alpha)
            depths = colors[0, splats, -1:]
            color = torch.einsum("np,nc->pc", weights, colors[0, splats])
            color = color if background is None else color + left[:, None] * background
            normal = torch.einsum("np,nc->pc", weights, normals[0, splats])
            nearer = torch.cumsum(weights * depths, 0) - weights * depths
            distortion = (2 * weights * (depths * (1 - before) - nearer)).sum(0)
            halves = (weights > 0) & (before > 0.5)
            count = torch.arange(1, splats.shape[0] + 1)[:, None] * halves
            at = count.amax(0) if splats.shape[0] else torch.zeros(pixels.shape[0], dtype=torch.int64)
            median = torch.cat((torch.zeros(1), depths[:, 0]))[at]
            parts = (color, 1 - left[:, None], normal, distortion[:, None], median[:, None])
            values = torch.cat(parts, 1).view(rows.stop - rows.start, columns.stop - columns.start, -1)
            whole = whole.index_put(_grid(rows, columns), values)
        return [part.contiguous() for part in whole[None].split([channels, 1, 3, 1, 1], -1)], []

    def after(given: tuple[Tensor, ...], out: list[Tensor | None], _: list[Tensor]) -> list[Tensor | None]:
        transforms, by_transform = given[1].cpu(), out[1]
        assert by_transform is not None
        out[5] = by_transform[..., :2, 2] * transforms[..., 2, 2, None]
        return out

    return _Kernel.apply(  # type: ignore[return-value]
        blend, after, means2d, transforms, colors, opacities, normals, densify, backgrounds
    )


def _grid(*place: slice) -> tuple[Tensor, ...]:
    return tuple(torch.meshgrid(*(torch.arange(s.start, s.stop) for s in place), indexing="ij"))


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    fully_fused_projection,
    fully_fused_projection_2dgs,
    spherical_harmonics,
    isect_tiles,
    isect_offset_encode,
    rasterize_to_pixels,
    rasterize_to_pixels_2dgs,
)


def put_in_place(patch: pytest.MonkeyPatch) -> None:
    """In the place of gsplat's functions."""
    for function in FUNCTIONS:
        signature = inspect.signature(getattr(_wrapper, function.__name__))
        patch.setattr(_wrapper, function.__name__, _called_as(function, signature))


def _called_as(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """A function that also refuses arguments that gsplat's own would refuse."""

    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return function(*args, **kwargs)

    return call
