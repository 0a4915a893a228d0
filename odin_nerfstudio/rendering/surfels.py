"""The one entry to rendering surfels: gsplat's `rasterization_2dgs()` on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

DEPTH_MODES = ("expected", "median")


def rasterization_2dgs(
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
    distloss: bool = False,
    depth_mode: str = "expected",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, dict[str, Any]]:
    """Render N surfels (2D Gaussians, Huang et al. 2024) into C views. CUDA: by gsplat, unchanged; else on the CPU.

    Arguments, results and `meta` are those of ``gsplat.rasterization_2dgs`` 1.4.0 (which see). A primitive's third
    scale has no influence. On the CPU all tensors are float32, there are at most 4 channels (depth included), harmonics
    have at most degree 3, and `packed`, `sparse_grad` and other tile sizes are refused. Results are equal to the bit
    over runs, processes, thread counts and processors, and do not change when primitives that no view sees are left
    out.

    Gradients flow to means, quats, scales, opacities, colours and backgrounds, from all images. As in gsplat they do
    not flow to the cameras; the CPU refuses view matrices that want one. After the backward pass
    ``meta["gradient_2dgs"].grad`` [C, N, 2] is what densification looks at, and with `absgrad`
    ``meta["means2d"].absgrad``. On the CPU the other entries of `meta` carry no gradient.

    Where the CPU differs from gsplat 1.4.0 on purpose: gradients through the projected centre (pixels where the
    low-pass decides) hold all terms, of which gsplat leaves out some that are small unless the surfel is tilted; boxes
    are computed without cancellation; ``gradient_2dgs`` holds the whole sum, which gsplat may read while it is
    being added up; several cameras in one call get each their own normals, distortion and median depth.

    Args:
        means: centres in the world.
        quats: rotations, w x y z, of any non-zero length; the surfel lies in the plane of the first two axes.
        scales: standard deviations along the axes, in world units.
        opacities: in [0, 1].
        colors: final values, or coefficients of spherical harmonics where `sh_degree` is given.
        viewmats: world to camera (x right, y down, z forward).
        Ks: intrinsics in pixels; pixel centres are at half integers.
        width: of the image, pixels.
        height: of the image, pixels.
        near_plane: surfels whose centre is nearer (along z) are left out.
        far_plane: as are those farther away.
        radius_clip: and those whose box is not larger than this, pixels.
        eps2d: no effect, as in gsplat.
        sh_degree: degree to use of the harmonics.
        packed: must be False on the CPU.
        tile_size: must be 16 on the CPU.
        backgrounds: [C, channels of the image, depth included].
        render_mode: "RGB", "D" (accumulated depth), "ED" (expected depth), "RGB+D" or "RGB+ED".
        sparse_grad: must be False on the CPU.
        absgrad: also sum absolute gradients of the projected centres.
        distloss: ask that the distortion is one of depths; it is computed in any case.
        depth_mode: the depth that the second normals are made from: "expected" or "median".

    Returns:
        Images [C, height, width, channels]; alphas [.., 1]; normals in the world, blended, towards the camera [.., 3];
        normals of the depth image, in modes "RGB+D" and "RGB+ED" (else None), [height, width, 3] for one camera;
        distortions [.., 1]; median depths [.., 1] (both of the last colour channel where no depth is rendered); and
        `meta`.

    Raises:
        ValueError: naming the argument of wrong shape, type, device or value (CPU only).
    """
    if means.is_cuda:
        from gsplat import rasterization_2dgs as gsplat_rasterization

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
            distloss=distloss,
            depth_mode=depth_mode,  # type: ignore[arg-type]
        )
    from odin_nerfstudio.rendering.cpu.arguments import check
    from odin_nerfstudio.rendering.cpu.surfel_autograd import rasterize
    from odin_nerfstudio.rendering.cpu.surfel_warm import warm_up as warm

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
        None,
        render_mode,
        sparse_grad,
        "classic",
        False,
        "pinhole",
        None,
    )
    _check_surfels(colors, viewmats, sh_degree, backgrounds, render_mode, distloss, depth_mode)
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
        sh_degree,
        backgrounds,
        render_mode,
        absgrad,
        depth_mode,
    )


def _check_surfels(
    colors: Tensor,
    viewmats: Tensor,
    sh_degree: int | None,
    backgrounds: Tensor | None,
    render_mode: str,
    distloss: bool,
    depth_mode: str,
) -> None:
    from odin_nerfstudio.rendering.cpu.arguments import check_tensor

    if viewmats.requires_grad:
        raise ValueError("viewmats: surfels have no gradient to the camera, as in gsplat; detach the view matrices")
    if distloss and render_mode == "RGB":
        raise ValueError("render_mode: must render a depth for distloss (D, ED, RGB+D, RGB+ED), got 'RGB'")
    if depth_mode not in DEPTH_MODES:
        raise ValueError(f"depth_mode: must be one of {', '.join(DEPTH_MODES)}, got {depth_mode!r}")
    if backgrounds is not None:
        channels = 0 if render_mode in ("D", "ED") else 3 if sh_degree is not None else colors.shape[-1]
        channels += render_mode != "RGB"
        shape = (len(viewmats), channels)
        check_tensor("backgrounds", backgrounds, shape, f"[C, {channels}] with C = {shape[0]}, depth included")


def warm_up_surfels(announce: Callable[[str], None] = print) -> float:
    """Compile or load the CPU kernels of surfels, once; as `rendering.warm_up`, which it includes."""
    from odin_nerfstudio.rendering.cpu.surfel_warm import warm_up as warm

    return warm(announce)
