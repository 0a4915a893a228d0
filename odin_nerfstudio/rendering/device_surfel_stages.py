"""The two stages of `surfel_stages` with gsplat's own kernels, for tensors on a CUDA device; see `device_stages`.

They are what gsplat 1.4.0's ``rasterization_2dgs`` does before and after its projection is through. A surfel travels in
`DEVICE_SURFEL_COLUMNS` float32 values: its centre in pixels (2), its ray transform (9), its opacity, its colour (3) and
normal (3, in the camera's frame), its depth and its radius; its gradient comes back in all but the last of these
columns. What densification looks at, ``gradient_2dgs``, is known in the second stage, unlike on the CPU.

Not yet run on a GPU: tested with references in torch's operations in the place of gsplat's functions.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from gsplat.cuda import _wrapper as gsplat
from gsplat.utils import depth_to_normal
from torch import Tensor

from odin_nerfstudio.rendering.device_stages import (
    TILE,
    DeviceLeaves,
    DeviceProjection,
    camera_on,
    colors_of,
    expected,
    intersections,
)
from odin_nerfstudio.rendering.stages import Projection, StageView

DEVICE_SURFEL_COLUMNS = 20
DEVICE_SURFEL_GRADIENT_COLUMNS = 19


def project_surfels(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    colors: Tensor,
    sh_degree: int | None,
    view: StageView,
) -> Projection:
    """`surfel_stages.project_surfels` on the device of `means`."""
    matrices, intrinsics = camera_on(means.device, view)
    with torch.enable_grad():
        projected: Any = gsplat.fully_fused_projection_2dgs(
            means, quats, scales, matrices, intrinsics, view.width, view.height, eps2d=view.eps2d,
            near_plane=view.near, far_plane=view.far, radius_clip=view.radius_clip, packed=False, sparse_grad=False,
        )  # fmt: skip
        radii, means2d, depths, transforms, normals = projected
        shades = colors_of(means, colors, sh_degree, matrices, radii)
        columns = [means2d[0], transforms[0], opacities[:, None], shades[0], normals[0], depths[0, :, None]]
        return DeviceProjection.of(columns, radii[0], None)


class DeviceSurfelSplats(DeviceLeaves):
    """`surfel_stages.SurfelSplats` on a device."""

    columns: ClassVar[int] = DEVICE_SURFEL_COLUMNS
    gradient_columns: ClassVar[int] = DEVICE_SURFEL_GRADIENT_COLUMNS

    def rasterize(
        self, background: Tensor | None = None, expected_depth: bool = False, depth_mode: str = "expected"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, dict[str, Any]]:
        """As `surfel_stages.SurfelSplats.rasterize`; the part of ``meta`` has ``gradient_2dgs``, too."""
        view, radii, rest = self.view, self.radii[None], self._rest
        transforms, opacities = rest[..., :9].unflatten(-1, (3, 3)), rest[..., 9]
        colors, normals, depths = rest[..., 10:13], rest[..., 13:16], rest[..., 16]
        if view.with_depth:
            colors = torch.cat((colors, depths[..., None]), dim=-1)
        densify = torch.zeros_like(self.means2d, requires_grad=True)
        offsets, flat = intersections(self.means2d.detach(), radii, depths.detach(), view)
        blended: Any = gsplat.rasterize_to_pixels_2dgs(
            self.means2d, transforms, colors, opacities, normals, densify, view.width, view.height, TILE, offsets,
            flat, backgrounds=None if background is None else background[None], packed=False, absgrad=False,
            distloss=view.with_depth,
        )  # fmt: skip
        image, alphas, facing, distortion, median = blended
        if expected_depth and view.with_depth:
            image = expected(image, alphas)
        matrices, intrinsics = camera_on(radii.device, view)
        to_world = torch.linalg.inv(matrices)
        surface = None
        if view.with_depth:
            depth = median if depth_mode == "median" else image[..., -1:]
            surface = depth_to_normal(depth, to_world, intrinsics).squeeze(0)
        info = {
            "radii": radii,
            "gradient_2dgs": densify,
            "width": view.width,
            "height": view.height,
            "n_cameras": 1,
            "gaussian_ids": None,
        }
        return image, alphas, facing @ to_world[0, :3, :3].T, surface, distortion, median, info
