"""The rasterizer of surfels as two stages that may run on different ranks; see `stages`.

A surfel travels in `SURFEL_COLUMNS` float32 values: its centre in pixels (2), the vectors A, B and C of
`cpu.surfel_layout` (9), its opacity, its colour (3) and normal (3), its depth, its radius in pixels, and the ellipse
that holds its outline (3). Its gradient comes back in `SURFEL_GRADIENT_COLUMNS` values: of A, B and C (9), of the
centre (2), of the opacity's logarithm, of the colours and the depth (4), of the depth in distortion and median depth,
and of the normal (3). Both stages together give the bits of one call of `rasterization_2dgs`, images and gradients.
What densification looks at, gsplat's ``gradient_2dgs``, is known in the first stage, after the backward pass.

That is on the CPU; for tensors on another device see `device_surfel_stages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.rendering.stages import Projection, StageView, ViewSplats, check_columns

SURFEL_COLUMNS = 23
SURFEL_GRADIENT_COLUMNS = 20


def _call(view: StageView, sh_degree: int | None) -> Any:
    from odin_nerfstudio.rendering.cpu.projection import camera_record
    from odin_nerfstudio.rendering.cpu.records import Settings
    from odin_nerfstudio.rendering.cpu.surfel_autograd import Call

    settings = Settings(
        width=view.width,
        height=view.height,
        sh_degree=-1 if sh_degree is None else sh_degree,
        color_channels=3,
        depth_channel=3 if view.with_depth else -1,
        antialiased=False,
    )
    matrix, intrinsics = view.viewmat.detach().numpy(), view.K.detach().numpy()
    planes = (0.0, view.near, view.far, view.radius_clip)
    return Call(settings, [camera_record(matrix, intrinsics, view.width, view.height, *planes)], False)


@dataclass(eq=False)
class _SurfelProjection(Projection):
    _densify: Tensor
    _records: Tensor

    def backward(self, rows: Tensor, gradients: Tensor) -> None:
        from odin_nerfstudio.rendering.cpu.surfel_wire import OF_SUMS

        sums = torch.zeros_like(self._records)
        sums[rows[:, None], torch.from_numpy(OF_SUMS)] = gradients
        torch.autograd.backward([self._records], [sums])

    def info(self) -> dict[str, Any]:
        grad = self._densify.grad
        return {"gradient_2dgs": SimpleNamespace(grad=None if grad is None else grad[0, self.rows])}


def project_surfels(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    colors: Tensor,
    sh_degree: int | None,
    view: StageView,
) -> Projection:
    """The first stage: project surfels into a view. Arguments as `rasterization_2dgs`'s.

    Args:
        means: [N, 3]. quats: [N, 4]. scales: [N, 3]. opacities: [N]. All float32 on one device.
        colors: [N, 3] final values, or [N, K, 3] coefficients of spherical harmonics where `sh_degree` is given.

    Raises:
        ValueError: An argument has another shape, type or device, or the view is antialiased.
    """
    if view.antialiased:
        raise ValueError("view: surfels have a low-pass filter of their own; antialiased must be False")
    if means.device.type != "cpu":
        from odin_nerfstudio.rendering import device_surfel_stages

        return device_surfel_stages.project_surfels(means, quats, scales, opacities, colors, sh_degree, view)
    from odin_nerfstudio.rendering.cpu.arguments import check
    from odin_nerfstudio.rendering.cpu.surfel_autograd import Project
    from odin_nerfstudio.rendering.cpu.surfel_warm import warm_up
    from odin_nerfstudio.rendering.cpu.surfel_wire import OF_OUTLINE, OF_RECORD, W_DEPTH, W_OUTLINE, W_RADIUS

    check(
        means, quats, scales, opacities, colors, view.viewmat[None], view.K[None], view.width, view.height, view.near,
        view.far, view.radius_clip, view.eps2d, sh_degree, False, 16, None, "RGB+D" if view.with_depth else "RGB",
        False, "classic", False, "pinhole", None,
    )  # fmt: skip
    if colors.shape[-1] != 3:
        raise ValueError(f"colors: surfels travel with 3 channels, got {colors.shape[-1]}")
    warm_up()
    call = _call(view, sh_degree)
    densify = torch.zeros(1, means.shape[0], 2, requires_grad=True)
    with torch.enable_grad():
        records: Tensor = Project.apply(call, densify, means, quats, scales, opacities, colors)  # type: ignore[assignment]
    projected = call.surfels[0].projected
    surfels = np.empty((len(projected.rows), SURFEL_COLUMNS), np.float32)
    surfels[:, :W_DEPTH] = call.surfels[0].records[:, OF_RECORD]
    surfels[:, W_DEPTH] = projected.depths[projected.rows]
    surfels[:, W_RADIUS] = projected.radii[projected.rows]
    surfels[:, W_OUTLINE:] = projected.splats[:, OF_OUTLINE]
    rows = torch.from_numpy(projected.rows)
    return _SurfelProjection(rows, torch.from_numpy(surfels), torch.from_numpy(projected.radii)[rows], densify, records)


class SurfelSplats:
    """The surfels of a view as leaves of the second stage's graph."""

    columns: ClassVar[int] = SURFEL_COLUMNS
    gradient_columns: ClassVar[int] = SURFEL_GRADIENT_COLUMNS
    has_norms: ClassVar[bool] = False

    def __init__(self, splats: Tensor, view: StageView) -> None:
        """
        Args:
            splats: Projected surfels, in the order of their primitives' rows. [V, SURFEL_COLUMNS] float32 on the CPU.

        Raises:
            ValueError: Another shape or dtype.
        """
        check_columns(splats, SURFEL_COLUMNS)
        from odin_nerfstudio.rendering.cpu.layout import SPLAT
        from odin_nerfstudio.rendering.cpu.records import Projected
        from odin_nerfstudio.rendering.cpu.surfel_layout import RECORD
        from odin_nerfstudio.rendering.cpu.surfel_scene import Surfels
        from odin_nerfstudio.rendering.cpu.surfel_warm import warm_up
        from odin_nerfstudio.rendering.cpu.surfel_wire import restore

        warm_up()
        self.view = view
        self._call = _call(view, None)
        count = splats.shape[0]
        records, outlines = np.empty((count, RECORD), np.float32), np.empty((count, SPLAT), np.float32)
        radii, bound = np.empty(count, np.int32), np.empty(count, np.int32)
        means2d, depths = np.empty((count, 2), np.float32), np.empty(count, np.float32)
        source, channel = splats.detach().contiguous().numpy(), self._call.settings.depth_channel
        restore(source, channel, view.width, view.height, records, outlines, radii, means2d, depths, bound)
        nothing, rows = np.empty((0, 3), np.float32), np.arange(count, dtype=np.int64)
        projected = Projected(radii, means2d, depths, nothing, nothing, rows=rows, splats=outlines, tile_bound=bound)
        self._call.add(Surfels(projected, records, nothing, nothing))
        self.radii = torch.from_numpy(radii)
        """Radii in pixels. [V] int32."""
        self._records = torch.from_numpy(records).requires_grad_()

    @property
    def count(self) -> int:
        """Surfels, V."""
        return self.radii.shape[0]

    def rasterize(
        self, background: Tensor | None = None, expected_depth: bool = False, depth_mode: str = "expected"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, dict[str, Any]]:
        """The second stage: blend the surfels into images.

        Args:
            background: [channels, depth included], differentiable; None for black.
            expected_depth: Divide the depth by the opacity ("RGB+ED"); else it is accumulated.
            depth_mode: The depth that the second normals are made from: "expected" or "median".

        Returns:
            The images of `rasterization_2dgs` for one camera (which see), and the part of gsplat's ``meta`` that
            strategies read, but for ``gradient_2dgs``.
        """
        from odin_nerfstudio.rendering.cpu.surfel_autograd import Blend, finish

        self._call.tiles = []
        blended = Blend.apply(self._call, self._records, None if background is None else background[None])
        mode = ("RGB+ED" if expected_depth else "RGB+D") if self.view.with_depth else "RGB"
        intrinsics = self.view.K.detach()[None].numpy()
        images = finish(self._call, blended, intrinsics, mode, depth_mode)  # type: ignore[arg-type]
        info = {
            "radii": self.radii[None],
            "width": self.view.width,
            "height": self.view.height,
            "n_cameras": 1,
            "gaussian_ids": None,
        }
        return *images, info

    def gradients(self) -> Tensor:
        """What the backward pass left, for `Projection.backward`. [V, SURFEL_GRADIENT_COLUMNS] float32."""
        from odin_nerfstudio.rendering.cpu.surfel_wire import OF_SUMS

        if self._records.grad is None:
            return torch.zeros((self.count, SURFEL_GRADIENT_COLUMNS))
        return self._records.grad[:, torch.from_numpy(OF_SUMS)]


def surfels_on(device: torch.device) -> type[ViewSplats]:
    """The second stage for what `project_surfels` gives on a device."""
    if device.type == "cpu":
        return SurfelSplats
    from odin_nerfstudio.rendering.device_surfel_stages import DeviceSurfelSplats

    return DeviceSurfelSplats
