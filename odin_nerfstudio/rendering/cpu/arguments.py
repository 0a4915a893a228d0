"""Checks of the arguments of `rasterization`. The kernels read memory without checking bounds, so these are exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RENDER_MODES = ("RGB", "D", "ED", "RGB+D", "RGB+ED")
MAX_CHANNELS = 4
MAX_SH_DEGREE = 3


def check_tensor(name: str, value: Any, shape: tuple[int | None, ...], meaning: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor {meaning}, got {type(value).__name__}")
    if value.device.type != "cpu":
        raise ValueError(f"{name}: is on {value.device}; all inputs must be on the CPU, or all on one CUDA device")
    if value.dtype != torch.float32:
        raise ValueError(f"{name}: must be float32, got {value.dtype}")
    if value.dim() != len(shape) or any(want is not None and want != got for want, got in zip(shape, value.shape)):
        raise ValueError(f"{name}: must have shape {meaning}, got {tuple(value.shape)}")


def _positive_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
        raise ValueError(f"{name}: must be an integer from 1 to 65536, got {value!r}")


def check(
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
    packed: bool,
    tile_size: int,
    backgrounds: Tensor | None,
    render_mode: str,
    sparse_grad: bool,
    rasterize_mode: str,
    distributed: bool,
    camera_model: str,
    covars: Tensor | None,
) -> None:
    """Raise a ValueError that names the first argument that the CPU rasterizer cannot take."""
    for name, value, only in (
        ("packed", packed, False),
        ("sparse_grad", sparse_grad, False),
        ("distributed", distributed, False),
        ("covars", covars, None),
        ("camera_model", camera_model, "pinhole"),
        ("tile_size", tile_size, 16),
    ):
        if value is not only and value != only:
            raise ValueError(f"{name}: the CPU rasterizer supports {only!r} only; got {_brief(value)}")
    check_tensor("means", means, (None, 3), "[N, 3]")
    n = means.shape[0]
    check_tensor("quats", quats, (n, 4), f"[N, 4] with N = {n}")
    check_tensor("scales", scales, (n, 3), f"[N, 3] with N = {n}")
    check_tensor("opacities", opacities, (n,), f"[N] with N = {n}")
    check_tensor("viewmats", viewmats, (None, 4, 4), "[C, 4, 4]")
    c = viewmats.shape[0]
    check_tensor("Ks", Ks, (c, 3, 3), f"[C, 3, 3] with C = {c}")
    _positive_int("width", width)
    _positive_int("height", height)
    if render_mode not in RENDER_MODES:
        raise ValueError(f"render_mode: must be one of {', '.join(RENDER_MODES)}, got {render_mode!r}")
    if rasterize_mode not in ("classic", "antialiased"):
        raise ValueError(f"rasterize_mode: must be classic or antialiased, got {rasterize_mode!r}")
    if not near_plane >= 0.0:
        raise ValueError(f"near_plane: must not be negative, got {near_plane}")
    if not far_plane >= near_plane:
        raise ValueError(f"far_plane: must not be below near_plane, got {far_plane}")
    if not radius_clip >= 0.0:
        raise ValueError(f"radius_clip: must not be negative, got {radius_clip}")
    if not eps2d >= 0.0:
        raise ValueError(f"eps2d: must not be negative, got {eps2d}")
    _check_colors(colors, n, c, sh_degree, render_mode)
    if backgrounds is not None:
        expected = 1 if render_mode in ("D", "ED") else colors.shape[-1]
        shape = (c, None) if render_mode in ("D", "ED") else (c, expected)
        check_tensor("backgrounds", backgrounds, shape, f"[C, {expected}] with C = {c}")


def _check_colors(colors: Any, n: int, c: int, sh_degree: int | None, render_mode: str) -> None:
    if not isinstance(colors, Tensor):
        raise ValueError(f"colors: expected a tensor, got {type(colors).__name__}")
    trailing: tuple[int | None, ...]
    if sh_degree is None:
        trailing, text = (None,), "[N, D] or [C, N, D]"
    else:
        if isinstance(sh_degree, bool) or not isinstance(sh_degree, int) or not 0 <= sh_degree <= MAX_SH_DEGREE:
            raise ValueError(f"sh_degree: must be None or an integer from 0 to {MAX_SH_DEGREE}, got {sh_degree!r}")
        trailing, text = (None, 3), "[N, K, 3] or [C, N, K, 3]"
    leading = (c, n) if colors.dim() == len(trailing) + 2 else (n,)
    check_tensor("colors", colors, (*leading, *trailing), f"{text} with N = {n}, C = {c}")
    if sh_degree is not None and (sh_degree + 1) ** 2 > colors.shape[-2]:
        raise ValueError(
            f"colors: sh_degree {sh_degree} needs {(sh_degree + 1) ** 2} coefficients, got {colors.shape[-2]}"
        )
    if sh_degree is None and render_mode not in ("D", "ED"):
        depth = 1 if render_mode in ("RGB+D", "RGB+ED") else 0
        if not 1 <= colors.shape[-1] <= MAX_CHANNELS - depth:
            raise ValueError(
                f"colors: the CPU rasterizer renders 1 to {MAX_CHANNELS} channels, depth included;"
                f" got {colors.shape[-1]} with render_mode {render_mode}"
            )


def _brief(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
