"""The surfel kernels, defined with a cache of their own: who trains Gaussians never compiles them."""

from __future__ import annotations

from odin_nerfstudio.rendering.cpu.cache import SURFEL_SOURCES, kernel_cache

with kernel_cache(SURFEL_SOURCES):
    from odin_nerfstudio.rendering.cpu import depth_normals, surfel_gradients, surfel_pixels, surfel_projection

__all__ = ["depth_normals", "surfel_gradients", "surfel_pixels", "surfel_projection"]
