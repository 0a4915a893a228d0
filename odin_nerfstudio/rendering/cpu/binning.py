"""Which splats touch which tile, front to back: a depth sort, then a counting sort into tiles.

A (splat, tile) pair carries a mask of the 4 x 4 blocks that the splat can reach: those that meet the ellipse on which
its alpha is 1/255, inside gsplat's 3-sigma box of whole tiles. Leaving out the others changes no pixel.

Every splat owns a run of slots, one per pair, in which the backward pass leaves its gradients; summing a run in order
gives the same bits on any number of threads, without atomics.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu.layout import (
    BLOCK,
    LOG2_ALPHA_MIN,
    LOG2_E,
    S_CA,
    S_CB,
    S_CC,
    S_LOG2_OPACITY,
    S_RADIUS,
    S_X,
    S_Y,
    TILE,
)
from odin_nerfstudio.rendering.cpu.projection import clamp, tile_range
from odin_nerfstudio.rendering.cpu.simd import count_bits

_f = np.float32
_ZERO, _TWO = _f(0), _f(2)
_BLOCKS = TILE // BLOCK  # blocks along a tile's side
_BLOCK = _f(BLOCK)
_FIRST, _LAST = _f(0.5), _f(BLOCK - 0.5)  # first and last pixel centre of a block
# The outline is widened by these (pixels, and a share of its extent) so that rounding never cuts off a pixel.
_PAD, _PAD_SHARE, _PAD_LEVEL = _f(0.01), _f(1e-4), _f(1e-3)
_FAR_AWAY = _f(1e9)

_RADIX_BITS = 11
_RADIX = 1 << _RADIX_BITS


@njit(nogil=True, cache=True)
def depth_order(rows, depths, order, keys, spare_order, spare_keys):
    """Fill `order` (V,) int32 with the visible splats front to back, ties by index: a radix sort of the depths' bits.

    `rows` (V,) int64 picks from `depths` (N,) int32, the bits of positive float32 (which sort like the floats).
    `keys`, `spare_order`, `spare_keys` are scratch, (V,) int32.
    """
    count = rows.shape[0]
    histogram = np.zeros((3, _RADIX), np.int64)
    for v in range(count):
        key = depths[rows[v]]
        keys[v] = key
        order[v] = v
        histogram[0, key & (_RADIX - 1)] += 1
        histogram[1, (key >> _RADIX_BITS) & (_RADIX - 1)] += 1
        histogram[2, (key >> (2 * _RADIX_BITS)) & (_RADIX - 1)] += 1
    for digit in range(3):
        total = 0
        for k in range(_RADIX):
            total, histogram[digit, k] = total + histogram[digit, k], total
    _radix_pass(0, keys, order, spare_keys, spare_order, histogram[0])
    _radix_pass(_RADIX_BITS, spare_keys, spare_order, keys, order, histogram[1])
    _radix_pass(2 * _RADIX_BITS, keys, order, spare_keys, spare_order, histogram[2])
    order[:] = spare_order


@njit(nogil=True, cache=True)
def _radix_pass(shift, keys, order, new_keys, new_order, position):
    for v in range(keys.shape[0]):
        key = keys[v]
        digit = (key >> shift) & (_RADIX - 1)
        p = position[digit]
        position[digit] = p + 1
        new_keys[p] = key
        new_order[p] = order[v]


@njit(nogil=True, cache=True, error_model="numpy")
def emit(
    first,
    end,
    order,
    splats,
    capacity,
    width,
    height,
    slot_start,
    slot_end,
    pair_tile,
    pair_mask,
    tile_pairs,
    tile_blocks,
):
    """List the pairs of the splats ``order[first:end]``, in that order, from slot ``capacity[first]`` on.

    Writes each pair's tile (int32) and block mask (uint16), each splat's run of slots ``[slot_start, slot_end)`` (V,),
    and counts pairs and blocks per tile into `tile_pairs`, `tile_blocks` (T,) int64.
    """
    tiles_x = (width + TILE - 1) // TILE
    tiles_y = (height + TILE - 1) // TILE
    last_column = _f((width + BLOCK - 1) // BLOCK - 1)
    last_row = _f((height + BLOCK - 1) // BLOCK - 1)
    low = np.empty(_BLOCKS, np.int64)
    high = np.empty(_BLOCKS, np.int64)
    slot = capacity[first]
    for rank in range(first, end):
        v = order[rank]
        slot_start[v] = slot
        slot_end[v] = slot
        if capacity[rank + 1] == capacity[rank]:
            continue
        mx, my, radius = splats[v, S_X], splats[v, S_Y], splats[v, S_RADIUS]
        a, b, c = splats[v, S_CA], splats[v, S_CB], splats[v, S_CC]
        # The outline is a dx^2 + 2 b dx dy + c dy^2 = level.
        level = (splats[v, S_LOG2_OPACITY] - LOG2_ALPHA_MIN) * (_TWO / LOG2_E) + _PAD_LEVEL
        determinant = _f(np.float64(a) * np.float64(c) - np.float64(b) * np.float64(b))
        bounded = determinant > _ZERO and a > _ZERO and c > _ZERO
        extent_x = np.sqrt(c * level / determinant) if bounded else _FAR_AWAY
        extent_y = np.sqrt(a * level / determinant) if bounded else _FAR_AWAY
        turn = -b / c * extent_x if bounded else _ZERO  # dy at the rightmost point
        pad_x = _PAD + _PAD_SHARE * extent_x
        reach_y = extent_y + _PAD + _PAD_SHARE * extent_y
        x0, x1 = tile_range(mx, radius, tiles_x)
        y0, y1 = tile_range(my, radius, tiles_y)
        columns_from, columns_to = x0 * _BLOCKS, min(x1 * _BLOCKS - 1, np.int64(last_column))
        row_from = max(y0 * _BLOCKS, np.int64(clamp(np.ceil((my - reach_y - _LAST) / _BLOCK), _ZERO, last_row + 1)))
        row_to = min(y1 * _BLOCKS - 1, np.int64(clamp(np.floor((my + reach_y - _FIRST) / _BLOCK), _f(-1), last_row)))
        for ty in range(row_from // _BLOCKS, row_to // _BLOCKS + 1):
            nearest, farthest = columns_to + 1, columns_from - 1
            for k in range(_BLOCKS):
                row = ty * _BLOCKS + k
                low[k] = 0
                high[k] = -1
                if row < row_from or row > row_to:
                    continue
                left, right = -_FAR_AWAY, _FAR_AWAY
                if bounded:
                    # The outline is convex: over a strip of rows it is widest where the strip is nearest its extremes.
                    top, bottom = _f(row * BLOCK) + _FIRST - my, _f(row * BLOCK) + _LAST - my
                    d = clamp(clamp(turn, top, bottom), -extent_y, extent_y)
                    right = (np.sqrt(max(a * level - determinant * d * d, _ZERO)) - b * d) / a + pad_x
                    d = clamp(clamp(-turn, top, bottom), -extent_y, extent_y)
                    left = (-np.sqrt(max(a * level - determinant * d * d, _ZERO)) - b * d) / a - pad_x
                i0 = np.int64(clamp(np.ceil((mx + left - _LAST) / _BLOCK), _ZERO, last_column + 1))
                i1 = np.int64(clamp(np.floor((mx + right - _FIRST) / _BLOCK), _f(-1), last_column))
                i0, i1 = max(i0, columns_from), min(i1, columns_to)
                if i0 <= i1:
                    low[k], high[k] = i0, i1
                    nearest, farthest = min(nearest, i0), max(farthest, i1)
            for tx in range(nearest // _BLOCKS, farthest // _BLOCKS + 1):
                mask = 0
                for k in range(_BLOCKS):
                    i0, i1 = max(low[k] - tx * _BLOCKS, 0), min(high[k] - tx * _BLOCKS, _BLOCKS - 1)
                    if i0 <= i1:
                        mask |= ((2 << i1) - (1 << i0)) << (_BLOCKS * k)
                if mask != 0:
                    tile = ty * tiles_x + tx
                    pair_tile[slot] = tile
                    pair_mask[slot] = mask
                    slot += 1
                    tile_pairs[tile] += 1
                    tile_blocks[tile] += count_bits(mask)
        slot_end[v] = slot


@njit(nogil=True, cache=True)
def tile_offsets(chunk_pairs, chunk_blocks, tile_start, block_start):
    """Turn counts per (chunk, tile) into offsets: where each tile's pairs and blocks start, (T + 1,) int64, and, in
    place of `chunk_pairs`, where each chunk's share of a tile starts.
    """
    chunks, tiles = chunk_pairs.shape
    pairs = 0
    blocks = 0
    for t in range(tiles):
        tile_start[t] = pairs
        block_start[t] = blocks
        for k in range(chunks):
            pairs, chunk_pairs[k, t] = pairs + chunk_pairs[k, t], pairs
            blocks += chunk_blocks[k, t]
    tile_start[tiles] = pairs
    block_start[tiles] = blocks


@njit(nogil=True, cache=True)
def scatter(
    first, end, order, slot_start, slot_end, shift, listed_tile, listed_mask, position, pair_splat, pair_mask, pair_slot
):
    """Move the pairs of the splats ``order[first:end]`` into their tiles' lists.

    `position` (T,) is where this chunk's share of each tile starts; `shift` is the number of unused slots before the
    chunk, which the runs of slots are moved down by.
    """
    for rank in range(first, end):
        v = order[rank]
        start, stop = slot_start[v], slot_end[v]
        for slot in range(start, stop):
            tile = listed_tile[slot]
            p = position[tile]
            position[tile] = p + 1
            pair_splat[p] = v
            pair_mask[p] = listed_mask[slot]
            pair_slot[p] = slot - shift
        slot_start[v] = start - shift
        slot_end[v] = stop - shift
