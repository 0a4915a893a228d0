"""The two stages of `stages` with gsplat's own kernels, for tensors on a CUDA device.

They are what gsplat 1.4.0's ``rasterization`` does before and after its projection is through, with the same functions
in the same order (gsplat/rendering.py). A Gaussian travels in `SPLAT_COLUMNS` float32 values: its mean in pixels (2),
its conic (3), its opacity (after compensation, if antialiased), its colour (3), its depth and its radius; its gradient
comes back in `GRADIENT_COLUMNS` values, those of all but the radius. As many columns as on the CPU, with another
meaning: all ranks of a job compute on the same type of device.

gsplat sums with atomics, so a view in two stages equals one call within rounding, as one call equals its repetition.
So does the gradient of the camera: every owner sends the sum over its rows as float64, and they are added in the order
of the ranks.

Not yet run on a GPU: tested with references in torch's operations in the place of gsplat's functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gsplat.cuda import _wrapper as gsplat
from torch import Tensor

from odin_nerfstudio.rendering.stages import GRADIENT_COLUMNS, SPLAT_COLUMNS, Projection, StageView, check_columns

TILE = 16
"""Edge of a tile in pixels: gsplat's default."""


def camera_on(device: torch.device, view: StageView) -> tuple[Tensor, Tensor]:
    """A view's matrix [1, 4, 4], and its intrinsics [1, 3, 3], on a device."""
    return view.viewmat.detach()[None].to(device), view.K.detach()[None].to(device)


def colors_of(means: Tensor, colors: Tensor, sh_degree: int | None, viewmats: Tensor, radii: Tensor) -> Tensor:
    """Colours of primitives in one view, as ``rasterization`` has them. [1, N, 3].

    radii: [1, N]; what is not visible need not have a colour.

    Raises:
        ValueError: They have another number of channels than 3.
    """
    if colors.shape[-1] != 3:
        raise ValueError(f"colors: splats travel with 3 channels, got {colors.shape[-1]}")
    if sh_degree is None:
        return colors[None]
    directions = means[None] - torch.inverse(viewmats)[:, None, :3, 3]
    harmonics = gsplat.spherical_harmonics(sh_degree, directions, colors[None], masks=radii > 0)
    return torch.clamp_min(harmonics + 0.5, 0.0)


@dataclass(eq=False)
class DeviceProjection(Projection):
    """Splats whose gradients are those of all of their columns but the radius."""

    _values: Tensor
    """These columns as part of the graph. [V, columns - 1]"""
    _viewmat: Tensor | None
    """The view's matrix, a leaf, where it is trained. [4, 4]"""

    @staticmethod
    def of(columns: list[Tensor], radii: Tensor, viewmat: Tensor | None) -> DeviceProjection:
        """The visible ones of all primitives. columns: [N, ...] each. radii: [N] int32."""
        rows = (radii > 0).nonzero().flatten()
        values = torch.cat([c.flatten(1) for c in columns], dim=1).index_select(0, rows)
        seen = radii.index_select(0, rows)
        splats = torch.cat((values.detach(), seen[:, None].float()), dim=1)
        return DeviceProjection(rows, splats, seen, values, viewmat)

    def backward(self, rows: Tensor, gradients: Tensor) -> None:
        given = torch.zeros_like(self._values)
        given[rows] = gradients
        torch.autograd.backward([self._values], [given])

    def camera_sums(self) -> Tensor | None:
        """As the base class has it; float64 [16] on the CPU."""
        grad = None if self._viewmat is None else self._viewmat.grad
        return None if grad is None else grad.flatten().double().cpu()


def project(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    colors: Tensor,
    sh_degree: int | None,
    view: StageView,
    viewmat: Tensor | None = None,
) -> Projection:
    """`stages.project` on the device of `means`."""
    matrices, intrinsics = camera_on(means.device, view)
    leaf = None
    with torch.enable_grad():
        if viewmat is not None:
            matrices = viewmat[None]
        elif view.trained:
            leaf = matrices[0].clone().requires_grad_()
            matrices = leaf[None]
        radii, means2d, depths, conics, compensations = gsplat.fully_fused_projection(
            means, None, quats, scales, matrices, intrinsics, view.width, view.height, eps2d=view.eps2d,
            near_plane=view.near, far_plane=view.far, radius_clip=view.radius_clip, packed=False, sparse_grad=False,
            calc_compensations=view.antialiased, camera_model="pinhole",
        )  # fmt: skip
        seen = opacities[None] if compensations is None else opacities[None] * compensations
        shades = colors_of(means, colors, sh_degree, matrices, radii)
        columns = [means2d[0], conics[0], seen[0, :, None], shades[0], depths[0, :, None]]
        return DeviceProjection.of(columns, radii[0], leaf)


def leaf_of(values: Tensor) -> Tensor:
    """Columns of splats [V, C] as a contiguous leaf of its own. [1, V, C]."""
    return values.detach().clone(memory_format=torch.contiguous_format)[None].requires_grad_()


def intersections(means2d: Tensor, radii: Tensor, depths: Tensor, view: StageView) -> tuple[Tensor, Tensor]:
    """Which splats lie over which tiles, by depth: gsplat's ``isect_offsets`` and ``flatten_ids``.

    means2d: [1, V, 2]. radii: [1, V] int32. depths: [1, V].
    """
    across, down = math.ceil(view.width / TILE), math.ceil(view.height / TILE)
    _, ids, flat = gsplat.isect_tiles(means2d, radii, depths, TILE, across, down, packed=False, n_cameras=1)
    return gsplat.isect_offset_encode(ids, 1, across, down), flat


def expected(image: Tensor, alphas: Tensor) -> Tensor:
    """An image whose last channel, an accumulated depth, is divided by the opacity."""
    return torch.cat([image[..., :-1], image[..., -1:] / alphas.clamp(min=1e-10)], dim=-1)


def gradient_of(leaf: Tensor) -> Tensor:
    """What the backward pass left in a leaf of [1, V, C]. [V, C]."""
    return torch.zeros_like(leaf[0]) if leaf.grad is None else leaf.grad[0]


class DeviceLeaves:
    """Splats of a view on a device: their means first, their radii last, and what else travels as leaves between."""

    columns: ClassVar[int]
    gradient_columns: ClassVar[int]
    has_norms: ClassVar[bool] = True

    def __init__(self, splats: Tensor, view: StageView) -> None:
        """
        Args:
            splats: Projected splats, in the order of their primitives' rows. [V, columns] float32.

        Raises:
            ValueError: Another shape or dtype.
        """
        check_columns(splats, self.columns)
        self.view = view
        self.radii = splats[:, -1].int()
        """Radii in pixels. [V] int32."""
        self.means2d = leaf_of(splats[:, :2])
        """Means in pixels, a leaf. [1, V, 2]; after backward it has ``grad`` and, with absgrad, ``absgrad``."""
        self._rest = leaf_of(splats[:, 2:-1])

    @property
    def count(self) -> int:
        """Splats, V."""
        return self.radii.shape[0]

    def gradients(self) -> Tensor:
        """What the backward pass left, for `Projection.backward`. [V, gradient_columns] float32."""
        return torch.cat((gradient_of(self.means2d), gradient_of(self._rest)), dim=1)


class DeviceSplats(DeviceLeaves):
    """`stages.Splats` on a device."""

    columns: ClassVar[int] = SPLAT_COLUMNS
    gradient_columns: ClassVar[int] = GRADIENT_COLUMNS

    def rasterize(
        self, background: Tensor | None = None, absgrad: bool = False, expected_depth: bool = False
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """As `stages.Splats.rasterize`."""
        view, radii = self.view, self.radii[None]
        conics, opacities, colors = self._rest[..., :3], self._rest[..., 3], self._rest[..., 4:7]
        depths = self._rest[..., 7]
        backgrounds = None if background is None else background[None]
        if view.with_depth:
            colors = self._rest[..., 4:]
            if backgrounds is not None:
                backgrounds = torch.cat([backgrounds, backgrounds.new_zeros(1, 1)], dim=-1)
        offsets, flat = intersections(self.means2d.detach(), radii, depths.detach(), view)
        image, alphas = gsplat.rasterize_to_pixels(
            self.means2d, conics, colors, opacities, view.width, view.height, TILE, offsets, flat,
            backgrounds=backgrounds, packed=False, absgrad=absgrad,
        )  # fmt: skip
        if expected_depth and view.with_depth:
            image = expected(image, alphas)
        info = {
            "radii": radii,
            "means2d": self.means2d,
            "width": view.width,
            "height": view.height,
            "n_cameras": 1,
            "gaussian_ids": None,
        }
        return image, alphas, info
