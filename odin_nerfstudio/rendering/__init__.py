"""Rendering: gsplat on CUDA, the package's own rasterizers of equal meaning on the CPU.

Importing this module is cheap; gsplat or the CPU kernels are loaded by the first call that needs them.
"""

from odin_nerfstudio.rendering.rasterizer import rasterization, set_render_threads, warm_up
from odin_nerfstudio.rendering.surfels import rasterization_2dgs, warm_up_surfels

__all__ = ["rasterization", "rasterization_2dgs", "set_render_threads", "warm_up", "warm_up_surfels"]
