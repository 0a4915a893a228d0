"""The surfel rasterizer as two differentiable steps: `Project` makes records of primitives, `Blend` images of these.

Between the steps runs one tensor with a row per visible (camera, primitive), the record of `surfel_layout`; the columns
of its gradient are those of a row of sums there, which is as wide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.rendering.cpu import scene, surfel_scene
from odin_nerfstudio.rendering.cpu.buffers import Array, empty
from odin_nerfstudio.rendering.cpu.info import Info, defer_tile_entries
from odin_nerfstudio.rendering.cpu.projection import camera_record, inverse_rotation
from odin_nerfstudio.rendering.cpu.records import Primitives, Settings, Tiles
from odin_nerfstudio.rendering.cpu.surfel_kernels import depth_normals
from odin_nerfstudio.rendering.cpu.surfel_scene import Images, Surfels, SurfelsBlended


def _array(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


class Call:
    """What the two steps of one call share, beside tensors."""

    def __init__(self, settings: Settings, cameras: list[Array], per_camera_colors: bool) -> None:
        self.settings = settings
        self.cameras = cameras
        self.per_camera_colors = per_camera_colors
        self.surfels: list[Surfels] = []
        self.tiles: list[Tiles] = []
        self.starts: list[int] = [0]  # where each camera's records start
        self.centres: Tensor | None = None  # `means2d` of the results, which gets `absgrad` if it is wanted

    def add(self, surfels: Surfels) -> None:
        """Append one camera's projection."""
        self.surfels.append(surfels)
        self.starts.append(self.starts[-1] + len(surfels.records))

    def color_array(self, colors: Tensor) -> Array:
        """Colours as (C or 1, N, K, channels), K = 1 for final values."""
        array = _array(colors)
        if self.settings.sh_degree < 0:
            array = np.expand_dims(array, -2)
        return np.ascontiguousarray(array if self.per_camera_colors else array[None])

    def primitives(self, arrays: list[Array], camera: int) -> Primitives:
        """One camera's view of the inputs or of their gradients: means, quats, scales, opacities, colours."""
        *fields, colors = arrays
        return Primitives(*fields, colors=colors[camera if self.per_camera_colors else 0])

    def background(self, backgrounds: Tensor | None) -> Array:
        """(C, 4) float32."""
        background = np.zeros((len(self.cameras), 4), np.float32)
        if backgrounds is not None:
            background[:, : self.settings.channels] = _array(backgrounds)
        return background


class Project(torch.autograd.Function):
    """Records of the visible surfels of all cameras. `densify` [C, N, 2] gets gsplat's ``gradient_2dgs``."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        densify: Tensor,
        means: Tensor,
        quats: Tensor,
        scales: Tensor,
        opacities: Tensor,
        colors: Tensor,
    ) -> Tensor:
        inputs = [_array(t) for t in (means, quats, scales, opacities)] + [call.color_array(colors)]
        for k, camera in enumerate(call.cameras):
            call.add(surfel_scene.project(call.primitives(inputs, k), call.settings, camera))
        parts = [surfels.records for surfels in call.surfels]
        records = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
        ctx.call = call
        ctx.save_for_backward(means, quats, scales, opacities, colors, records)
        return records

    @staticmethod
    def backward(ctx: Any, sums: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call: Call = ctx.call
        means, quats, scales, opacities, colors, records = ctx.saved_tensors
        count, cameras = len(means), len(call.cameras)
        inputs = [_array(t) for t in (means, quats, scales, opacities)] + [call.color_array(colors)]
        outputs = [empty(a.shape) for a in inputs]
        v_densify, absolute = np.zeros((cameras, count, 2), np.float32), np.zeros((cameras, count, 2), np.float32)
        for k, camera in enumerate(call.cameras):
            part = slice(call.starts[k], call.starts[k + 1])
            surfel_scene.project_backward(
                call.primitives(inputs, k),
                call.settings,
                camera,
                call.surfels[k].projected.rows,
                records.numpy()[part],
                _array(sums)[part],
                call.primitives(outputs, k),
                k > 0,
                k > 0 and not call.per_camera_colors,
                v_densify[k],
                absolute[k],
            )
        if call.centres is not None:
            call.centres.absgrad = torch.from_numpy(absolute)  # type: ignore[attr-defined]
        v_colors = outputs[4] if call.per_camera_colors else outputs[4][0]
        return (
            None,
            torch.from_numpy(v_densify),
            *map(torch.from_numpy, outputs[:4]),
            torch.from_numpy(v_colors).view(colors.shape),
        )


class Blend(torch.autograd.Function):
    """Images of records: colours, opacities, normals, distortion and median depth, [C, H, W, channels] each."""

    @staticmethod
    def forward(ctx: Any, call: Call, records: Tensor, backgrounds: Tensor | None) -> tuple[Tensor, ...]:
        settings = call.settings
        size = (len(call.cameras), settings.height, settings.width)
        outputs = [empty((*size, channels)) for channels in (settings.channels, 1, 3, 1, 1)]
        packed, background = records.detach().numpy(), call.background(backgrounds)
        blended: list[SurfelsBlended] = []
        for k, surfels in enumerate(call.surfels):
            tiles = scene.sort_into_tiles(surfels.projected, settings)
            call.tiles.append(tiles)
            part = packed[call.starts[k] : call.starts[k + 1]]
            blended.append(surfel_scene.blend(part, tiles, settings, background[k], _images(outputs, k)))
        # What was blended belongs to this step alone: `info` keeps the other one, and its call, alive.
        ctx.call, ctx.blended = call, blended
        ctx.save_for_backward(records, backgrounds)
        ctx.set_materialize_grads(False)
        return tuple(map(torch.from_numpy, outputs))

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        records, backgrounds = ctx.saved_tensors
        settings, cameras = call.settings, len(call.cameras)
        size = (cameras, settings.height, settings.width)
        with_geometry = any(g is not None for g in incoming[2:])
        gradients = [
            np.zeros((*size, channels) if k < 2 or with_geometry else (cameras, 1, 1, channels), np.float32)
            if g is None
            else _array(g)
            for k, (channels, g) in enumerate(zip((settings.channels, 1, 3, 1, 1), incoming))
        ]
        packed, background = records.numpy(), call.background(backgrounds)
        v_backgrounds = np.zeros((cameras, 4))
        sums: list[Array] = []
        for k, blended in enumerate(ctx.blended):
            images, part = _images(gradients, k), packed[call.starts[k] : call.starts[k + 1]]
            tiles = call.tiles[k]
            sums.append(
                surfel_scene.blend_backward(part, tiles, blended, settings, background[k], images, with_geometry)
            )
            if ctx.needs_input_grad[2]:
                v_backgrounds[k] = scene.background_gradient(blended, settings, images.image)
        v_background = None
        if ctx.needs_input_grad[2]:
            v_background = torch.from_numpy(v_backgrounds.astype(np.float32)[:, : settings.channels].copy())
        return None, torch.from_numpy(sums[0] if cameras == 1 else np.concatenate(sums)), v_background


def _images(arrays: list[Array], k: int) -> Images:
    image, alphas, normals, distortion, median = (a[k] for a in arrays)
    return Images(image, alphas[..., 0], normals, distortion[..., 0], median[..., 0])


def rasterize(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    colors: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    width: int,
    height: int,
    near_plane: float,
    far_plane: float,
    radius_clip: float,
    sh_degree: int | None,
    backgrounds: Tensor | None,
    render_mode: str,
    absgrad: bool,
    depth_mode: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Info]:
    """Render checked arguments; the results are those of `surfels.rasterization_2dgs`."""
    with_color, with_depth = render_mode.startswith("RGB"), render_mode != "RGB"
    color_channels = 0 if not with_color else 3 if sh_degree is not None else colors.shape[-1]
    settings = Settings(
        width=width,
        height=height,
        sh_degree=sh_degree if sh_degree is not None and with_color else -1,
        color_channels=color_channels,
        depth_channel=color_channels if with_depth else -1,
        antialiased=False,
    )
    per_camera_colors = colors.dim() == (3 if sh_degree is None else 4)
    if sh_degree is not None and not with_color:
        colors = colors.flatten(-2)  # not looked at; stays an input, so that it gets a zero gradient
    matrices, intrinsics = _array(viewmats), _array(Ks)
    cameras = [
        camera_record(matrix, K, width, height, 0.0, near_plane, far_plane, radius_clip)
        for matrix, K in zip(matrices, intrinsics)
    ]
    call = Call(settings, cameras, per_camera_colors)
    densify = torch.zeros(len(cameras), len(means), 2, requires_grad=True)
    records: Tensor = Project.apply(call, densify, means, quats, scales, opacities, colors)  # type: ignore[assignment]
    blended = Blend.apply(call, records, backgrounds)
    images = finish(call, blended, intrinsics, render_mode, depth_mode)  # type: ignore[arg-type]
    info = _info(call, densify, images[4], opacities)
    if absgrad:
        call.centres = info["means2d"]
    return *images, info


def finish(
    call: Call, blended: tuple[Tensor, ...], intrinsics: Array, render_mode: str, depth_mode: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """The images of `surfels.rasterization_2dgs` from those of `Blend`; intrinsics (C, 3, 3)."""
    image, alphas, normals, distortion, median = blended
    if render_mode in ("ED", "RGB+ED"):
        image = torch.cat([image[..., :-1], image[..., -1:] / alphas.clamp(min=1e-10)], dim=-1)
    surface = None
    if render_mode in ("RGB+D", "RGB+ED"):
        depths = median if depth_mode == "median" else image[..., -1:]
        to_world = np.stack([inverse_rotation(camera) for camera in call.cameras])
        surface = depth_normals.depth_normals(depths, to_world, intrinsics).squeeze(0)
    return image, alphas, normals, surface, distortion, median


def _info(call: Call, densify: Tensor, distortion: Tensor, opacities: Tensor) -> Info:
    projected = [s.projected for s in call.surfels]

    def dense(name: str, columns: tuple[int, ...]) -> Tensor:
        values = np.zeros((len(projected), len(projected[0].radii), *columns), np.float32)
        for row, surfels in zip(values, call.surfels):
            row[surfels.projected.rows] = getattr(surfels, name).reshape(-1, *columns)
        return torch.from_numpy(values)

    info = Info(
        camera_ids=None,
        gaussian_ids=None,
        radii=torch.from_numpy(np.stack([p.radii for p in projected])),
        means2d=torch.from_numpy(np.stack([p.means2d for p in projected])),
        depths=torch.from_numpy(np.stack([p.depths for p in projected])),
        opacities=opacities.detach().expand(len(projected), -1),
        width=call.settings.width,
        height=call.settings.height,
        n_cameras=len(projected),
        render_distort=distortion,
        gradient_2dgs=densify,
    )
    info.defer("ray_transforms", lambda: dense("transforms", (3, 3)))
    info.defer("normals", lambda: dense("normals", (3,)))
    defer_tile_entries(info, projected, call.tiles, call.settings)
    return info
