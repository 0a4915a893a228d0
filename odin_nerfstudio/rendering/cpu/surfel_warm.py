"""Compile or load the surfel kernels ahead of the first view."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from odin_nerfstudio.rendering.cpu.cache import SURFEL_SOURCES, is_cached, mark_cached
from odin_nerfstudio.rendering.cpu.surfel_autograd import rasterize
from odin_nerfstudio.rendering.cpu.warm import warm_up as warm_up_shared

_lock = threading.Lock()
_warm = False


def warm_up(announce: Callable[[str], None] = print) -> float:
    """Make all kernels ready; returns the seconds that it took (0.0 from the second call on)."""
    global _warm
    shared = warm_up_shared(announce)  # sorting into tiles is the Gaussians'
    with _lock:
        if _warm:
            return shared
        start = time.perf_counter()
        cold = not is_cached(SURFEL_SOURCES)
        if cold:
            announce("Compiling the CPU rasterizer of surfels for this processor, once; this takes up to a minute ...")
        _render_everything()
        if cold:
            mark_cached(SURFEL_SOURCES)
        seconds = time.perf_counter() - start
        if cold:
            announce(f"Compiled the CPU rasterizer of surfels in {seconds:.1f} s.")
        _warm = True
        return shared + seconds


def _render_everything() -> None:
    """One surfel, forward, and backward without and with geometry: that reaches every kernel."""
    with torch.enable_grad():
        for with_geometry in (False, True):
            image, _, normals, surface, distortion, _, _ = rasterize(
                means=torch.tensor([[0.0, 0.0, 1.0]], requires_grad=True),
                quats=torch.tensor([[1.0, 0.0, 0.0, 0.0]]),
                scales=torch.full((1, 3), 0.1),
                opacities=torch.tensor([0.5]),
                colors=torch.zeros(1, 1, 3),
                viewmats=torch.eye(4)[None],
                Ks=torch.tensor([[[16.0, 0.0, 8.0], [0.0, 16.0, 8.0], [0.0, 0.0, 1.0]]]),
                width=16,
                height=16,
                near_plane=0.01,
                far_plane=1e10,
                radius_clip=0.0,
                sh_degree=0,
                backgrounds=torch.zeros(1, 4, requires_grad=True),
                render_mode="RGB+D",
                absgrad=True,
                depth_mode="expected",
            )
            assert surface is not None
            loss = image.sum()
            if with_geometry:
                loss = loss + normals.sum() + surface.sum() + distortion.sum()
            loss.backward()
