"""From the columns in which a surfel travels between ranks back to its record and its outline, bit for bit."""

from __future__ import annotations

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu.cache import kernel_cache
from odin_nerfstudio.rendering.cpu.layout import (
    LOG2_ALPHA_MIN,
    S_LOG2_OPACITY,
    S_P,
    S_Q,
    S_R,
    S_RADIUS,
    S_X,
    S_Y,
    SPLAT,
)
from odin_nerfstudio.rendering.cpu.surfel_layout import (
    G_COLOUR,
    G_DEPTH,
    G_EXPONENT,
    G_NORMAL,
    G_Y,
    R_C,
    R_COLOUR,
    R_LOG2_OPACITY,
    R_NORMAL,
    R_OPACITY,
    R_X,
    R_Y,
    RECORD,
)
from odin_nerfstudio.rendering.cpu.wire import WIRE_SOURCES, tiles_reached

_COLOURS = 3
# A travelling surfel: these columns of its record, then depth, radius and the ellipse of its outline.
OF_RECORD = np.array(
    [*range(R_C + 3), R_OPACITY, *range(R_COLOUR, R_COLOUR + _COLOURS), *range(R_NORMAL, R_NORMAL + 3)]
)
OF_OUTLINE = np.array([S_P, S_Q, S_R])
W_DEPTH = len(OF_RECORD)
W_RADIUS = W_DEPTH + 1
W_OUTLINE = W_DEPTH + 2
WIRE = W_OUTLINE + len(OF_OUTLINE)
# Its gradient: these columns of a row of sums, all but the absolute ones.
OF_SUMS = np.array(
    [*range(G_Y + 1), G_EXPONENT, *range(G_COLOUR, G_COLOUR + 4), G_DEPTH, *range(G_NORMAL, G_NORMAL + 3)]
)

with kernel_cache((*WIRE_SOURCES, "surfel_layout", "surfel_wire")):

    @njit(nogil=True, cache=True, error_model="numpy")
    def restore(wire, depth_channel, width, height, records, outlines, radii, means2d, depths, tile_bound):
        """Fill `records` (V, 32), `outlines` (V, 16), `radii` (V,) int32, `means2d` (V, 2), `depths` (V,) and
        `tile_bound` (V,) int32, as `surfel_projection.shade` does, from `wire` (V, 23).
        """
        for v in range(wire.shape[0]):
            record, outline = records[v], outlines[v]
            for k in range(RECORD):
                record[k] = np.float32(0)
            for k in range(SPLAT):
                outline[k] = np.float32(0)
            for k in range(W_DEPTH):
                record[OF_RECORD[k]] = wire[v, k]
            depths[v] = wire[v, W_DEPTH]
            if depth_channel >= 0:
                record[R_COLOUR + depth_channel] = depths[v]
            x, y, radius = record[R_X], record[R_Y], wire[v, W_RADIUS]
            radii[v] = np.int32(radius)
            means2d[v, 0] = x
            means2d[v, 1] = y
            record[R_LOG2_OPACITY], tile_bound[v] = tiles_reached(record[R_OPACITY], x, y, radius, width, height)
            if record[R_LOG2_OPACITY] >= LOG2_ALPHA_MIN:
                outline[S_X] = x
                outline[S_Y] = y
                outline[S_RADIUS] = radius
                outline[S_LOG2_OPACITY] = LOG2_ALPHA_MIN + np.float32(1)
                for k in range(W_RADIUS + 1, WIRE):
                    outline[OF_OUTLINE[k - W_OUTLINE]] = wire[v, k]
