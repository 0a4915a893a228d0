"""Rendering: gsplat on CUDA, the package's own rasterizer of equal meaning on the CPU.

Importing this module is cheap; gsplat or the CPU kernels are loaded by the first call that needs them.
"""

from odin_nerfstudio.rendering.rasterizer import rasterization, set_render_threads, warm_up

__all__ = ["rasterization", "set_render_threads", "warm_up"]
