"""Compile or load every kernel ahead of the first view."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from odin_nerfstudio.rendering.cpu.autograd import rasterize
from odin_nerfstudio.rendering.cpu.cache import cache_folder, is_cached, mark_cached

_lock = threading.Lock()
_warm = False


def warm_up(announce: Callable[[str], None] = print) -> float:
    """Make all kernels ready; returns the seconds that it took (0.0 from the second call on).

    Where they are not cached yet, `announce` gets a line before the compilation and one after it.
    """
    global _warm
    with _lock:
        if _warm:
            return 0.0
        start = time.perf_counter()
        remark = cache_folder()[1]
        if remark:
            announce(remark)
        cold = not is_cached()
        if cold:
            announce("Compiling the CPU rasterizer for this processor, once; this takes up to a minute ...")
        _render_everything()
        if cold:
            mark_cached()
        seconds = time.perf_counter() - start
        if cold:
            announce(f"Compiled the CPU rasterizer in {seconds:.1f} s.")
        _warm = True
        return seconds


def _render_everything() -> None:
    """One primitive, both channel counts, forward and backward: that reaches every kernel with its only signature."""
    Ks = torch.tensor([[[16.0, 0.0, 8.0], [0.0, 16.0, 8.0], [0.0, 0.0, 1.0]]])
    with torch.enable_grad():
        for render_mode in ("RGB", "RGB+D"):
            means = torch.tensor([[0.0, 0.0, 1.0]], requires_grad=True)
            backgrounds = torch.zeros(1, 3, requires_grad=True)
            image, alphas, _ = rasterize(
                means,
                quats=torch.tensor([[1.0, 0.0, 0.0, 0.0]]),
                scales=torch.full((1, 3), 0.1),
                opacities=torch.tensor([0.5]),
                colors=torch.zeros(1, 1, 3),
                viewmats=torch.eye(4)[None],
                Ks=Ks,
                width=16,
                height=16,
                near_plane=0.01,
                far_plane=1e10,
                radius_clip=0.0,
                eps2d=0.3,
                sh_degree=0,
                backgrounds=backgrounds,
                render_mode=render_mode,
                absgrad=True,
                rasterize_mode="classic",
            )
            (image.sum() + alphas.sum()).backward()
