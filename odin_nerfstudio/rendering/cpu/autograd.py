"""The CPU rasterizer as two differentiable steps, with `means2d` between them as gsplat has it.

`_Project` turns primitives into splats, `_Blend` splats into images. Between the steps runs, beside `means2d`
[C, N, 2], one packed tensor with a row per visible (camera, primitive): what strategies read stays dense, what they do
not stays compact. A row of the packed tensor's gradient has the columns that `layout` says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.rendering.cpu import scene
from odin_nerfstudio.rendering.cpu.buffers import Array, empty
from odin_nerfstudio.rendering.cpu.info import Info, defer_tile_entries
from odin_nerfstudio.rendering.cpu.layout import G_XX, G_YY, S_OPACITY, SPLAT
from odin_nerfstudio.rendering.cpu.projection import camera_record
from odin_nerfstudio.rendering.cpu.records import Blended, Primitives, Projected, Settings, Tiles


def _array(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array)


class _Call:
    """What the two steps of one call share, beside tensors."""

    def __init__(self, settings: Settings, cameras: list[Array], per_camera_colors: bool) -> None:
        self.settings = settings
        self.cameras = cameras
        self.per_camera_colors = per_camera_colors
        self.projected: list[Projected] = []
        self.tiles: list[Tiles] = []
        self.camera_sums: dict[int, Array] = {}
        """By camera, what its gradient was made of, where it was wanted."""
        self.starts: list[int] = [0]  # where each camera's rows of the packed tensor start

    def primitives(self, arrays: list[Array], camera: int) -> Primitives:
        """One camera's view of the inputs or of their gradients: means, quats, scales, opacities, and the colours as
        (C or 1, N, K, channels).
        """
        means, quats, scales, opacities, colors = arrays
        return Primitives(means, quats, scales, opacities, colors[camera if self.per_camera_colors else 0])


def _color_array(call: _Call, colors: Tensor) -> Array:
    """Colours as (C or 1, N, K, channels), K = 1 for final values."""
    array = _array(colors)
    if call.settings.sh_degree < 0:
        array = np.expand_dims(array, -2)
    return np.ascontiguousarray(array if call.per_camera_colors else array[None])


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        means: Tensor,
        quats: Tensor,
        scales: Tensor,
        opacities: Tensor,
        colors: Tensor,
        viewmats: Tensor,
    ) -> tuple[Tensor, ...]:
        count, cameras = len(means), len(call.cameras)
        inputs = [_array(t) for t in (means, quats, scales, opacities)] + [_color_array(call, colors)]
        radii = np.empty((cameras, count), np.int32)
        means2d, conics = np.empty((cameras, count, 2), np.float32), np.empty((cameras, count, 3), np.float32)
        depths, used_opacities = np.empty((cameras, count), np.float32), np.empty((cameras, count), np.float32)
        for k, camera in enumerate(call.cameras):
            out = Projected(radii[k], means2d[k], depths[k], conics[k], used_opacities[k])
            scene.project(call.primitives(inputs, k), call.settings, camera, out)
            call.projected.append(out)
            call.starts.append(call.starts[-1] + len(out.rows))
        splats = call.projected[0].splats if cameras == 1 else np.concatenate([p.splats for p in call.projected])
        outputs = tuple(map(_tensor, (means2d, splats, radii, depths, conics, used_opacities)))
        ctx.save_for_backward(means, quats, scales, opacities, colors, outputs[1])
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        v_means2d, v_splats, _, v_depths, v_conics, v_opacities = gradients
        call: _Call = ctx.call
        means, quats, scales, opacities, colors, splats = ctx.saved_tensors
        count, cameras = len(means), len(call.cameras)
        inputs = [_array(t) for t in (means, quats, scales, opacities)] + [_color_array(call, colors)]
        outputs = [empty(a.shape) for a in inputs]
        g_means2d = np.zeros((cameras, count, 2), np.float32) if v_means2d is None else _array(v_means2d)
        g_splats = np.zeros((call.starts[-1], SPLAT), np.float32) if v_splats is None else _array(v_splats)
        if v_conics is not None or v_opacities is not None:
            g_splats = g_splats.copy()
        packed = splats.numpy()
        v_viewmats = np.zeros((cameras, 4, 4), np.float32)
        for k, camera in enumerate(call.cameras):
            rows, part = call.projected[k].rows, slice(call.starts[k], call.starts[k + 1])
            if v_conics is not None:
                conics = call.projected[k].conics[rows]
                g_splats[part, G_XX : G_YY + 1] += scene.covariance_gradient(conics, _array(v_conics)[k, rows])
            if v_opacities is not None:
                g_splats[part, S_OPACITY] += _array(v_opacities)[k, rows]
            g_depths = np.zeros(len(rows), np.float32) if v_depths is None else _array(v_depths)[k, rows]
            sums = scene.project_backward(
                call.primitives(inputs, k),
                call.settings,
                camera,
                rows,
                packed[part],
                g_means2d[k],
                g_depths,
                g_splats[part],
                call.primitives(outputs, k),
                accumulate=k > 0,
                accumulate_colors=k > 0 and not call.per_camera_colors,
                want_camera=ctx.needs_input_grad[6],
            )
            if ctx.needs_input_grad[6]:
                v_viewmats[k] = scene.camera_gradient(sums, camera)
                call.camera_sums[k] = sums
        v_colors = outputs[4] if call.per_camera_colors else outputs[4][0]
        return (
            None,
            *map(_tensor, outputs[:4]),
            _tensor(v_colors).view(colors.shape),
            _tensor(v_viewmats) if ctx.needs_input_grad[6] else None,
        )


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, absgrad: bool, means2d: Tensor, splats: Tensor, backgrounds: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        settings, cameras = call.settings, len(call.cameras)
        image = empty((cameras, settings.height, settings.width, settings.channels))
        alphas = empty((cameras, settings.height, settings.width, 1))
        background = _background(call, backgrounds)
        records: list[Blended] = []
        for k, projected in enumerate(call.projected):
            tiles = scene.sort_into_tiles(projected, settings)
            call.tiles.append(tiles)
            records.append(scene.blend(projected.splats, tiles, settings, background[k], image[k], alphas[k, :, :, 0]))
        # The records belong to this step alone: `info` keeps the other one, and its call, alive.
        ctx.call, ctx.absgrad, ctx.records = call, absgrad, records
        ctx.save_for_backward(means2d, splats, backgrounds)
        return _tensor(image), _tensor(alphas)

    @staticmethod
    def backward(ctx: Any, v_image: Tensor, v_alphas: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call: _Call = ctx.call
        means2d, splats, backgrounds = ctx.saved_tensors
        packed = splats.numpy()
        g_image, g_alphas = _array(v_image), _array(v_alphas)
        background = _background(call, backgrounds)
        v_means2d = np.zeros(tuple(means2d.shape), np.float32)
        v_means2d_abs = np.zeros_like(v_means2d)
        v_splats = empty(packed.shape)
        v_backgrounds = np.zeros((len(call.cameras), 4))
        for k, projected in enumerate(call.projected):
            part = slice(call.starts[k], call.starts[k + 1])
            scene.blend_backward(
                packed[part],
                projected.rows,
                call.tiles[k],
                ctx.records[k],
                call.settings,
                background[k],
                g_image[k],
                g_alphas[k, :, :, 0],
                v_means2d[k],
                v_means2d_abs[k],
                v_splats[part],
            )
            if ctx.needs_input_grad[4]:
                v_backgrounds[k] = scene.background_gradient(ctx.records[k], call.settings, g_image[k])
        if ctx.absgrad:
            means2d.absgrad = _tensor(v_means2d_abs)
        v_background = None
        if ctx.needs_input_grad[4]:
            v_background = torch.zeros_like(backgrounds)
            colors = call.settings.color_channels
            v_background[:, :colors] = _tensor(v_backgrounds.astype(np.float32))[:, :colors]
        return None, None, _tensor(v_means2d), _tensor(v_splats), v_background


def _background(call: _Call, backgrounds: Tensor | None) -> Array:
    """(C, 4) float32; the depth channel has none."""
    background = np.zeros((len(call.cameras), 4), np.float32)
    if backgrounds is not None:
        colors = call.settings.color_channels
        background[:, :colors] = _array(backgrounds)[:, :colors]
    return background


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
    eps2d: float,
    sh_degree: int | None,
    backgrounds: Tensor | None,
    render_mode: str,
    absgrad: bool,
    rasterize_mode: str,
) -> tuple[Tensor, Tensor, Info]:
    """Render checked arguments (see `arguments.check`); the results are those of `rasterization`."""
    with_color, with_depth = render_mode.startswith("RGB"), render_mode != "RGB"
    color_channels = 0 if not with_color else 3 if sh_degree is not None else colors.shape[-1]
    settings = Settings(
        width=width,
        height=height,
        sh_degree=sh_degree if sh_degree is not None and with_color else -1,
        color_channels=color_channels,
        depth_channel=color_channels if with_depth else -1,
        antialiased=rasterize_mode == "antialiased",
    )
    per_camera_colors = colors.dim() == (3 if sh_degree is None else 4)
    if sh_degree is not None and not with_color:
        # Colours are not looked at. They stay an input, so that they get a zero gradient as in gsplat.
        colors = colors.flatten(-2)
    matrices, intrinsics = _array(viewmats), _array(Ks)
    cameras = [
        camera_record(matrices[k], intrinsics[k], width, height, eps2d, near_plane, far_plane, radius_clip)
        for k in range(len(matrices))
    ]
    call = _Call(settings, cameras, per_camera_colors)
    means2d, splats, radii, depths, conics, used_opacities = _Project.apply(  # type: ignore[misc]
        call, means, quats, scales, opacities, colors, viewmats
    )
    image, alphas = _Blend.apply(call, absgrad, means2d, splats, backgrounds)  # type: ignore[misc]
    if render_mode in ("ED", "RGB+ED"):
        image = torch.cat([image[..., :-1], image[..., -1:] / alphas.clamp(min=1e-10)], dim=-1)
    info = Info(
        camera_ids=None,
        gaussian_ids=None,
        radii=radii,
        means2d=means2d,
        depths=depths,
        conics=conics,
        opacities=used_opacities,
        width=width,
        height=height,
        n_cameras=len(cameras),
    )
    defer_tile_entries(info, call.projected, call.tiles, settings)
    return image, alphas, info
