"""The rasterizer as two stages that may run on different ranks: primitives to splats, splats to an image.

There is a first and a second stage for each kind of splat: here those of 3D Gaussians, in `surfel_stages` those of
surfels. What passes between them is a row of float32 values per visible splat, and a row of gradients back.

A Gaussian travels in `SPLAT_COLUMNS` float32 values: its mean in pixels (2), the shape of its ellipse (3), its opacity
(after compensation, if antialiased), its colour (3), its depth and its radius in pixels. Its gradient comes back in
`GRADIENT_COLUMNS` values: of the mean (2), of the 2D covariance (3), of the opacity, and of the colours and the depth
(4). Both stages together give the bits of one call of `rasterization`, images and gradients, also where the primitives
were split over several projections whose splats are merged in the order of the rows. The gradient of the camera, a sum
over primitives, travels exactly (`cpu.exact`) and is rounded where all of it is together.

That is on the CPU. For tensors on another device gsplat's functions are the same two stages, see `device_stages`; which
ones are meant is decided by the device of `means`, and of the splats (`splats_on`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

SPLAT_COLUMNS = 11
GRADIENT_COLUMNS = 10


@dataclass(frozen=True)
class StageView:
    """What both stages must know of a view."""

    viewmat: Tensor
    """World to camera. [4, 4] float32 on the CPU, wherever the primitives are."""
    K: Tensor
    """Intrinsics in pixels. [3, 3] float32 on the CPU."""
    width: int
    height: int
    near: float = 0.01
    far: float = 1e10
    radius_clip: float = 0.0
    eps2d: float = 0.3
    with_depth: bool = False
    """Depths are rendered, too, as a fourth channel."""
    antialiased: bool = False
    """Opacities are compensated for eps2d."""
    trained: bool = False
    """The gradient of the matrix is wanted, see `viewmat_gradient`."""


def _settings(view: StageView, sh_degree: int | None) -> Any:
    from odin_nerfstudio.rendering.cpu.records import Settings

    return Settings(
        width=view.width,
        height=view.height,
        sh_degree=-1 if sh_degree is None else sh_degree,
        color_channels=3,
        depth_channel=3 if view.with_depth else -1,
        antialiased=view.antialiased,
    )


def _call(view: StageView, sh_degree: int | None) -> Any:
    from odin_nerfstudio.rendering.cpu import autograd
    from odin_nerfstudio.rendering.cpu.projection import camera_record

    matrix, intrinsics = view.viewmat.detach().numpy(), view.K.detach().numpy()
    planes = (view.eps2d, view.near, view.far, view.radius_clip)
    camera = camera_record(matrix, intrinsics, view.width, view.height, *planes)
    return autograd._Call(_settings(view, sh_degree), [camera], per_camera_colors=False)


@dataclass(eq=False)
class Projection(ABC):
    """The visible splats of some primitives in one view, and the way back to the primitives."""

    rows: Tensor
    """Rows of the primitives that are visible, ascending. [V] int64."""
    splats: Tensor
    """What the other stage needs. [V, columns of the kind] float32, without gradient."""
    radii: Tensor
    """Their radii in pixels. [V] int32."""

    @abstractmethod
    def backward(self, rows: Tensor, gradients: Tensor) -> None:
        """Add to the gradients of the leaves behind the projection; once.

        Args:
            rows: Which of the visible splats have a gradient. [m] int64.
            gradients: What the other stage's ``gradients`` has for them. [m, gradient columns of the kind] float32.
        """

    def camera_sums(self) -> Tensor | None:
        """After `backward`: what `viewmat_gradient` takes, where the view is trained; of the rows given.

        [K] int64 or, where the rows are not on the CPU, float64; on the CPU either way."""
        return None

    def info(self) -> dict[str, Any]:
        """After `backward`: entries of gsplat's ``meta``, of the visible splats, that only this stage knows."""
        return {}


class ViewSplats(Protocol):
    """The splats of a view as leaves of the second stage's graph; a class of these is a kind of splat."""

    columns: ClassVar[int]
    """Values of a splat that travels."""
    gradient_columns: ClassVar[int]
    """Values of its gradient."""
    has_norms: ClassVar[bool]
    """The second stage knows the 2D gradients that densification looks at; else the first one does, after backward."""

    def __init__(self, splats: Tensor, view: StageView) -> None: ...

    @property
    def count(self) -> int:
        """Splats, V."""
        ...

    def rasterize(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        """The images of the kind, and last the part of gsplat's ``meta`` that strategies read."""
        ...

    def gradients(self) -> Tensor:
        """What the backward pass left, for `Projection.backward`. [V, gradient_columns] float32."""
        ...


@dataclass(eq=False)
class _GaussianProjection(Projection):
    _means2d: Tensor
    _packed: Tensor
    _call: Any

    def backward(self, rows: Tensor, gradients: Tensor) -> None:
        from odin_nerfstudio.rendering.cpu.layout import S_COLOUR, S_OPACITY

        packed = torch.zeros_like(self._packed)
        packed[rows, : S_OPACITY + 1] = gradients[:, : S_OPACITY + 1]
        packed[rows, S_COLOUR : S_COLOUR + 4] = gradients[:, S_OPACITY + 1 :]
        means2d = torch.zeros_like(self._means2d)
        means2d[0, self.rows[rows]] = gradients[:, :2]
        torch.autograd.backward([self._means2d, self._packed], [means2d, packed])

    def camera_sums(self) -> Tensor | None:
        sums = self._call.camera_sums.get(0)
        return None if sums is None else torch.from_numpy(sums).flatten()


def viewmat_gradient(sums: Tensor, view: StageView) -> Tensor:
    """Gradient of a view's matrix [4, 4], on the CPU with the bits of one projection of all primitives.

    sums: `Projection.camera_sums` of projections of any parts of them, added up. [K] int64 or float64.
    """
    if sums.is_floating_point():
        return sums.float().view(4, 4)
    from odin_nerfstudio.rendering.cpu import exact, scene

    return torch.from_numpy(scene.camera_gradient(sums.numpy().reshape(-1, exact.BINS), _call(view, None).cameras[0]))


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
    """The first stage: project primitives into a view. Arguments as `rasterization`'s.

    Args:
        means: [N, 3]. quats: [N, 4]. scales: [N, 3]. opacities: [N]. All float32 on one device.
        colors: [N, 3] final values, or [N, K, 3] coefficients of spherical harmonics where `sh_degree` is given.
        viewmat: The view's matrix [4, 4] as part of the graph, where its gradient is wanted.

    Raises:
        ValueError: An argument has another shape, type or device.
    """
    if means.device.type != "cpu":
        from odin_nerfstudio.rendering import device_stages

        return device_stages.project(means, quats, scales, opacities, colors, sh_degree, view, viewmat)
    from odin_nerfstudio.rendering.cpu.arguments import check
    from odin_nerfstudio.rendering.cpu.autograd import _Project
    from odin_nerfstudio.rendering.cpu.layout import S_COLOUR, S_OPACITY, S_RADIUS
    from odin_nerfstudio.rendering.cpu.warm import warm_up

    if viewmat is None:
        viewmat = view.viewmat.clone().requires_grad_() if view.trained else view.viewmat
    matrices = viewmat[None]
    check(
        means, quats, scales, opacities, colors, matrices, view.K[None], view.width, view.height, view.near, view.far,
        view.radius_clip, view.eps2d, sh_degree, False, 16, None, "RGB+D" if view.with_depth else "RGB", False,
        "antialiased" if view.antialiased else "classic", False, "pinhole", None,
    )  # fmt: skip
    if colors.shape[-1] != 3:
        raise ValueError(f"colors: splats travel with 3 channels, got {colors.shape[-1]}")
    warm_up()
    call = _call(view, sh_degree)
    with torch.enable_grad():
        means2d, packed, radii, depths, _, _ = _Project.apply(  # type: ignore[misc]
            call, means, quats, scales, opacities, colors, matrices
        )
    rows = torch.from_numpy(call.projected[0].rows)
    given = packed.detach()
    splats = torch.empty((rows.shape[0], SPLAT_COLUMNS))
    splats[:, : S_OPACITY + 1] = given[:, : S_OPACITY + 1]
    splats[:, S_OPACITY + 1 : S_OPACITY + 4] = given[:, S_COLOUR : S_COLOUR + 3]
    splats[:, -2] = depths.detach()[0, rows]
    splats[:, -1] = given[:, S_RADIUS]
    return _GaussianProjection(rows, splats, radii[0, rows], means2d, packed, call)


def check_columns(splats: Tensor, columns: int) -> None:
    """Raise a ValueError unless splats are float32 [V, columns]."""
    if splats.dim() != 2 or splats.shape[1] != columns or splats.dtype != torch.float32:
        raise ValueError(f"splats: {splats.dtype} {tuple(splats.shape)}, expected float32 [V, {columns}]")


class Splats:
    """The Gaussians of a view as leaves of the second stage's graph."""

    columns: ClassVar[int] = SPLAT_COLUMNS
    gradient_columns: ClassVar[int] = GRADIENT_COLUMNS
    has_norms: ClassVar[bool] = True

    def __init__(self, splats: Tensor, view: StageView) -> None:
        """
        Args:
            splats: Projected splats, in the order of their primitives' rows. [V, SPLAT_COLUMNS] float32 on the CPU.

        Raises:
            ValueError: Another shape or dtype.
        """
        check_columns(splats, SPLAT_COLUMNS)
        from odin_nerfstudio.rendering.cpu.layout import SPLAT
        from odin_nerfstudio.rendering.cpu.records import Projected
        from odin_nerfstudio.rendering.cpu.warm import warm_up
        from odin_nerfstudio.rendering.cpu.wire import restore

        warm_up()
        self.view = view
        self._call = _call(view, None)
        count = splats.shape[0]
        records = np.empty((count, SPLAT), np.float32)
        radii, bound = np.empty(count, np.int32), np.empty(count, np.int32)
        means2d, depths = np.empty((count, 2), np.float32), np.empty(count, np.float32)
        depth_channel = self._call.settings.depth_channel
        source = splats.detach().contiguous().numpy()
        restore(source, depth_channel, view.width, view.height, records, radii, means2d, depths, bound)
        nothing = np.empty((0, 3), np.float32)
        rows = np.arange(count, dtype=np.int64)
        self._call.projected = [
            Projected(radii, means2d, depths, nothing, nothing, rows=rows, splats=records, tile_bound=bound)
        ]
        self._call.starts = [0, count]
        self.radii = torch.from_numpy(radii)
        """Radii in pixels. [V] int32."""
        self.means2d = torch.from_numpy(means2d)[None].requires_grad_()
        """Means in pixels, a leaf. [1, V, 2]; after backward it has ``grad`` and, with absgrad, ``absgrad``."""
        self._packed = torch.from_numpy(records).requires_grad_()

    @property
    def count(self) -> int:
        """Splats, V."""
        return self.radii.shape[0]

    def rasterize(
        self, background: Tensor | None = None, absgrad: bool = False, expected_depth: bool = False
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The second stage: blend the splats into an image.

        Args:
            background: [3], differentiable; None for black.
            absgrad: Also sum absolute gradients of the projected means.
            expected_depth: Divide the depth by the opacity ("RGB+ED"); else it is accumulated.

        Returns:
            Image [1, H, W, 3 or 4], opacities [1, H, W, 1], and the part of gsplat's ``meta`` that strategies read.
        """
        from odin_nerfstudio.rendering.cpu.autograd import _Blend

        backgrounds = None if background is None else background[None]
        self._call.tiles = []
        image, alphas = _Blend.apply(self._call, absgrad, self.means2d, self._packed, backgrounds)  # type: ignore[misc]
        if expected_depth and self.view.with_depth:
            image = torch.cat([image[..., :-1], image[..., -1:] / alphas.clamp(min=1e-10)], dim=-1)
        info = {
            "radii": self.radii[None],
            "means2d": self.means2d,
            "width": self.view.width,
            "height": self.view.height,
            "n_cameras": 1,
            "gaussian_ids": None,
        }
        return image, alphas, info

    def gradients(self) -> Tensor:
        """What the backward pass left, for `Projection.backward`. [V, GRADIENT_COLUMNS] float32."""
        from odin_nerfstudio.rendering.cpu.layout import S_COLOUR, S_OPACITY

        out = torch.zeros((self.count, GRADIENT_COLUMNS))
        if self._packed.grad is not None:
            out[:, : S_OPACITY + 1] = self._packed.grad[:, : S_OPACITY + 1]
            out[:, S_OPACITY + 1 :] = self._packed.grad[:, S_COLOUR : S_COLOUR + 4]
        if self.means2d.grad is not None:
            out[:, :2] = self.means2d.grad[0]
        return out


def splats_on(device: torch.device) -> type[ViewSplats]:
    """The second stage for what `project` gives on a device."""
    if device.type == "cpu":
        return Splats
    from odin_nerfstudio.rendering.device_stages import DeviceSplats

    return DeviceSplats
