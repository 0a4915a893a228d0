"""From the columns in which a splat travels between ranks back to its record, bit for bit."""

from __future__ import annotations

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu.cache import kernel_cache
from odin_nerfstudio.rendering.cpu.layout import (
    LOG2_ALPHA_MIN,
    S_COLOUR,
    S_LOG2_OPACITY,
    S_OPACITY,
    S_RADIUS,
    S_X,
    S_Y,
    TILE,
)
from odin_nerfstudio.rendering.cpu.projection import log2, tile_range

WIRE_SOURCES = ("layout", "harmonics", "projection", "wire")
# Columns of a travelling splat: mean in pixels, whitening (3), opacity, colours (3), depth, radius.
W_COLOUR, W_DEPTH, W_RADIUS, WIRE = 6, 9, 10, 11
_COLOURS = 3
_ZERO = np.float32(0)


@njit(inline="always")
def tiles_reached(opacity, x, y, radius, width, height):
    """Logarithm of an opacity to base 2, and how many tiles the box of its splat touches, 0 where it is too faint."""
    log2_opacity = np.float32(-np.inf)
    if opacity > _ZERO:
        log2_opacity = log2(opacity)
        if log2_opacity >= LOG2_ALPHA_MIN:
            x0, x1 = tile_range(x, radius, (width + TILE - 1) // TILE)
            y0, y1 = tile_range(y, radius, (height + TILE - 1) // TILE)
            return log2_opacity, (x1 - x0) * (y1 - y0)
    return log2_opacity, 0


with kernel_cache(WIRE_SOURCES):

    @njit(nogil=True, cache=True, error_model="numpy")
    def restore(wire, depth_channel, width, height, splats, radii, means2d, depths, tile_bound):
        """Fill records `splats` (V, 16), `radii` (V,) int32, `means2d` (V, 2), `depths` (V,) and `tile_bound` (V,)
        int32, as `projection.shade` does, from `wire` (V, 11).
        """
        for v in range(wire.shape[0]):
            for k in range(S_OPACITY + 1):
                splats[v, k] = wire[v, k]
            for k in range(S_OPACITY + 1, 16):
                splats[v, k] = _ZERO
            for k in range(_COLOURS):
                splats[v, S_COLOUR + k] = wire[v, W_COLOUR + k]
            if depth_channel >= 0:
                splats[v, S_COLOUR + depth_channel] = wire[v, W_DEPTH]
            radius = wire[v, W_RADIUS]
            splats[v, S_RADIUS] = radius
            radii[v] = np.int32(radius)
            means2d[v, 0] = wire[v, S_X]
            means2d[v, 1] = wire[v, S_Y]
            depths[v] = wire[v, W_DEPTH]
            reached = tiles_reached(wire[v, S_OPACITY], wire[v, S_X], wire[v, S_Y], radius, width, height)
            splats[v, S_LOG2_OPACITY], tile_bound[v] = reached
