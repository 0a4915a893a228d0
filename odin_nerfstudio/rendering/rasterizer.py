"""The one entry to rendering: gsplat's `rasterization()` on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def rasterization(
    means: Tensor,  # [N, 3]
    quats: Tensor,  # [N, 4]
    scales: Tensor,  # [N, 3]
    opacities: Tensor,  # [N]
    colors: Tensor,  # [(C,) N, D] or [(C,) N, K, 3]
    viewmats: Tensor,  # [C, 4, 4]
    Ks: Tensor,  # [C, 3, 3]
    width: int,
    height: int,
    near_plane: float = 0.01,
    far_plane: float = 1e10,
    radius_clip: float = 0.0,
    eps2d: float = 0.3,
    sh_degree: int | None = None,
    packed: bool = False,
    tile_size: int = 16,
    backgrounds: Tensor | None = None,
    render_mode: str = "RGB",
    sparse_grad: bool = False,
    absgrad: bool = False,
    rasterize_mode: str = "classic",
    channel_chunk: int = 32,
    distributed: bool = False,
    camera_model: str = "pinhole",
    covars: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Render N Gaussians into C views. The device of `means` decides by what: CUDA by gsplat, unchanged; else the CPU.

    Arguments, results and `info` are those of ``gsplat.rasterization`` 1.4.0 (which see), in its order, except that
    `packed` is False by default. On the CPU all tensors are float32, colours have at most 4 channels (depth included),
    spherical harmonics at most degree 3, and `packed`, `sparse_grad`, `distributed`, `covars`, other camera models
    and other tile sizes are refused. Results are equal to the bit over runs, processes, thread counts and processors,
    and do not change when primitives that no view sees are left out.

    Gradients flow to means, quats, scales, opacities, colours, the upper three rows of the view matrices, and
    backgrounds. After the backward pass ``info["means2d"].grad`` (if retained) and, with `absgrad`, ``.absgrad``
    [C, N, 2] hold the gradients of the projected means in pixels.

    Args:
        means: centres in the world.
        quats: rotations, w x y z, of any non-zero length.
        scales: standard deviations along the axes, in world units.
        opacities: in [0, 1].
        colors: final values, or coefficients of spherical harmonics where `sh_degree` is given.
        viewmats: world to camera (x right, y down, z forward).
        Ks: intrinsics in pixels; pixel centres are at half integers.
        width: of the image, pixels.
        height: of the image, pixels.
        near_plane: Gaussians whose centre is nearer (along z) are left out.
        far_plane: as are those farther away.
        radius_clip: and those whose 3-sigma radius is not larger than this, pixels.
        eps2d: added to the diagonal of 2D covariances, square pixels.
        sh_degree: degree to use of the harmonics.
        packed: must be False on the CPU.
        tile_size: must be 16 on the CPU.
        backgrounds: [C, channels of the colours]; none for the depth.
        render_mode: "RGB", "D" (accumulated depth), "ED" (expected depth), "RGB+D" or "RGB+ED".
        sparse_grad: must be False on the CPU.
        absgrad: also sum absolute gradients of the projected means.
        rasterize_mode: "classic", or "antialiased" to compensate opacities for `eps2d`.
        channel_chunk: no effect on the CPU.
        distributed: must be False on the CPU.
        camera_model: must be "pinhole" on the CPU.
        covars: must be None on the CPU.

    Returns:
        Images [C, height, width, channels], alphas [C, height, width, 1], and the dictionary of intermediate results.

    Raises:
        ValueError: naming the argument of wrong shape, type, device or value (CPU only).
    """
    if means.is_cuda:
        from gsplat import rasterization as gsplat_rasterization

        return gsplat_rasterization(
            means,
            quats,
            scales,
            opacities,
            colors,
            viewmats,
            Ks,
            width,
            height,
            near_plane=near_plane,
            far_plane=far_plane,
            radius_clip=radius_clip,
            eps2d=eps2d,
            sh_degree=sh_degree,
            packed=packed,
            tile_size=tile_size,
            backgrounds=backgrounds,
            render_mode=render_mode,  # type: ignore[arg-type]
            sparse_grad=sparse_grad,
            absgrad=absgrad,
            rasterize_mode=rasterize_mode,  # type: ignore[arg-type]
            channel_chunk=channel_chunk,
            distributed=distributed,
            camera_model=camera_model,  # type: ignore[arg-type]
            covars=covars,
        )
    from odin_nerfstudio.rendering.cpu.arguments import check
    from odin_nerfstudio.rendering.cpu.autograd import rasterize
    from odin_nerfstudio.rendering.cpu.warm import warm_up as warm

    check(
        means,
        quats,
        scales,
        opacities,
        colors,
        viewmats,
        Ks,
        width,
        height,
        near_plane,
        far_plane,
        radius_clip,
        eps2d,
        sh_degree,
        packed,
        tile_size,
        backgrounds,
        render_mode,
        sparse_grad,
        rasterize_mode,
        distributed,
        camera_model,
        covars,
    )
    warm()
    return rasterize(
        means,
        quats,
        scales,
        opacities,
        colors,
        viewmats,
        Ks,
        width,
        height,
        near_plane,
        far_plane,
        radius_clip,
        eps2d,
        sh_degree,
        backgrounds,
        render_mode,
        absgrad,
        rasterize_mode,
    )


def warm_up(announce: Callable[[str], None] = print) -> float:
    """Compile or load the CPU kernels, once; returns the seconds that it took (0.0 when done before).

    Call it before starting processes that render: a cold compilation, which `announce` is told about before and
    after, then happens once. Rendering does it by itself otherwise.
    """
    from odin_nerfstudio.rendering.cpu.warm import warm_up as warm

    return warm(announce)


def set_render_threads(count: int | None) -> None:
    """Threads that one CPU rendering may use. None, the default: the usable cores, but not more than torch uses.

    Raises:
        ValueError: if `count` is neither None nor a positive integer.
    """
    from odin_nerfstudio.rendering.threads import set_render_threads as set_threads

    set_threads(count)
