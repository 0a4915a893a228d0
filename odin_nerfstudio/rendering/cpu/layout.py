"""Layouts shared by the kernels: columns of the packed arrays, block geometry, and constants of the method.

Pixels are handled in tiles of 16 x 16 (gsplat's, which its 3-sigma boxes are snapped to). A tile is sixteen blocks of
4 x 4 pixels, numbered row by row; a block is one vector of sixteen lanes, also row by row. A sixteen-bit mask names the
blocks of a tile that a splat can reach.
"""

from __future__ import annotations

import numpy as np

TILE = 16  # pixels along a tile's side
BLOCK = 4  # pixels along a block's side
TILE_PIXELS = TILE * TILE

ALPHA_MAX = np.float32(0.999)  # alpha is clamped to this
LOG2_ALPHA_MIN = np.float32(-7.994353436858858)  # log2(1/255): fainter contributions are skipped
TRANSMITTANCE_MIN = np.float32(1e-4)  # a pixel ends before its transmittance would fall to this
LOG2_E = np.float32(1.4426950408889634)

# Splat record, one row per visible primitive: 16 float32, one cache line.
S_X, S_Y = 0, 1  # mean in pixels
# Whitening: u = P dx + Q dy, w = R dy, so that u^2 + w^2 is the exponent of the splat's falloff in base 2. Its terms
# are squares, so nothing cancels, however thin the splat. (P, Q; 0, R) is the scaled Cholesky factor of the conic.
S_P, S_Q, S_R = 2, 3, 4
S_OPACITY = 5
S_COLOUR = 6  # four channels, unused ones zero
S_LOG2_OPACITY = 10
S_RADIUS = 11
SPLAT = 16

# Gradient row, 16 float32, with the record's columns; but in place of the whitening it holds the gradient of the 2D
# covariance (entries xx, xy, yy of the symmetric matrix), and behind the colours the absolute sums of the mean's.
G_XX, G_XY, G_YY = 2, 3, 4
G_ABS_X, G_ABS_Y = 10, 11

# Pair record, int32: one (splat, tile).
P_SPLAT, P_SLOT = 0, 1
P_REACHABLE, P_TAKEN = 2, 3  # masks of blocks: those that the splat can reach, and those that it contributed to
PAIR = 4

# Camera record, float32: see `projection.camera_record`.
C_ROTATION = 0  # 9, world to camera, row by row
C_TRANSLATION = 9  # 3
C_FX, C_FY, C_CX, C_CY = 12, 13, 14, 15
C_WIDTH, C_HEIGHT = 16, 17
C_X_LOW, C_X_HIGH, C_Y_LOW, C_Y_HIGH = 18, 19, 20, 21  # clamp of x/z and y/z in the Jacobian
C_EPS2D, C_NEAR, C_FAR, C_RADIUS_CLIP = 22, 23, 24, 25
C_POSITION = 26  # 3, camera centre in the world
CAMERA = 32
