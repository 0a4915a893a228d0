"""The CPU rasterizer: Numba kernels under torch's autograd, of equal meaning as gsplat 1.4.0.

Importing this package imports Numba; `odin_nerfstudio.rendering` does so only when the first CPU view is rendered.
"""

from odin_nerfstudio.rendering.cpu.cache import kernel_cache

with kernel_cache():  # Numba asks where to cache when a kernel is defined, so define them all here
    from odin_nerfstudio.rendering.cpu import binning, gradients, pixels, projection, reduction

__all__ = ["binning", "gradients", "pixels", "projection", "reduction"]
