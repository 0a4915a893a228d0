"""Which splats touch which tile, front to back: a depth sort, then a counting sort into tiles.

A (splat, tile) pair carries a mask of the 4 x 4 blocks that the splat can reach: those that meet the ellipse on which
its alpha is 1/255, inside gsplat's 3-sigma box of whole tiles. Leaving out the others changes no pixel.

Every splat owns a run of slots, one per pair, in which the backward pass leaves its gradients; summing a run in order
gives the same bits on any number of threads, without atomics.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu import simd
from odin_nerfstudio.rendering.cpu.layout import (
    BLOCK,
    LOG2_ALPHA_MIN,
    P_REACHABLE,
    P_SLOT,
    P_SPLAT,
    S_LOG2_OPACITY,
    S_P,
    S_Q,
    S_R,
    S_RADIUS,
    S_X,
    S_Y,
    SPLAT,
    TILE,
)
from odin_nerfstudio.rendering.cpu.projection import clamp, tile_range

_f = np.float32
_ZERO, _ONE = _f(0), _f(1)
_BLOCKS = TILE // BLOCK  # blocks along a tile's side
_BLOCK, _PER_BLOCK, _PER_TILE = _f(BLOCK), _f(1 / BLOCK), _f(1 / TILE)
_AHEAD = 12  # splats between asking for a record and using it
_GROUP = simd.LANES  # rows of blocks handled at a time
_SEGMENT = 7  # tiles across, whose blocks fit into the bits of an int32
LANE_NUMBERS = np.arange(simd.LANES, dtype=np.float32)
_FIRST, _LAST = _f(0.5), _f(BLOCK - 0.5)  # first and last pixel centre of a block
# The outline is widened by these (pixels, and a share of its extent) so that rounding never cuts off a pixel.
_PAD, _PAD_SHARE, _PAD_LEVEL = _f(0.01), _f(1e-4), _f(1e-3)

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
    run_end,
    pair_tile,
    pair_mask,
    tile_pairs,
    tile_blocks,
):
    """List the pairs of the splats ``order[first:end]``, in that order, from slot ``capacity[first]`` on.

    Writes each pair's tile (int32) and block mask (uint16) and, by rank, where each splat's run of slots ends; counts
    pairs and blocks per tile into `tile_pairs`, `tile_blocks` (T,) int64.
    """
    tiles_x = (width + TILE - 1) // TILE
    tiles_y = (height + TILE - 1) // TILE
    last_column = _f((width + BLOCK - 1) // BLOCK - 1)
    last_row = _f((height + BLOCK - 1) // BLOCK - 1)
    spans = np.empty(_GROUP, np.int32)
    lane = simd.load(LANE_NUMBERS, 0)
    slot = capacity[first]
    for rank in range(first, end):
        v = order[rank]
        simd.prefetch(splats, np.int64(order[min(rank + _AHEAD, end - 1)]) * SPLAT)
        run_end[rank] = slot
        if capacity[rank + 1] == capacity[rank]:
            continue
        mx, my, radius = splats[v, S_X], splats[v, S_Y], splats[v, S_RADIUS]
        p, q, r = splats[v, S_P], splats[v, S_Q], splats[v, S_R]
        # The outline is u^2 + w^2 = level.
        level = splats[v, S_LOG2_OPACITY] - LOG2_ALPHA_MIN + _PAD_LEVEL
        inverse = _ONE / p
        norm = np.sqrt(q * q + r * r)
        extent_y = np.sqrt(level) / r
        extent_x = extent_y * norm * inverse
        turn = -q / norm * extent_y  # dy at the rightmost point
        pad_x = _PAD + _PAD_SHARE * extent_x
        reach_y = extent_y + _PAD + _PAD_SHARE * extent_y
        x0, x1 = tile_range(mx, radius, tiles_x)
        y0, y1 = tile_range(my, radius, tiles_y)
        row_from = clamp(np.ceil((my - reach_y - _LAST) * _PER_BLOCK), _f(y0 * _BLOCKS), last_row + _ONE)
        row_to = clamp(np.floor((my + reach_y - _FIRST) * _PER_BLOCK), -_ONE, min(_f(y1 * _BLOCKS - 1), last_row))
        left_end, right_end = (mx - pad_x - extent_x) * _PER_TILE, (mx + pad_x + extent_x) * _PER_TILE
        x0 = max(x0, np.int64(clamp(np.floor(left_end), _ZERO, _f(tiles_x))))
        x1 = min(x1, np.int64(clamp(np.floor(right_end), -_ONE, _f(tiles_x))) + 1)
        first_tile, last_tile = np.int64(row_from) // _BLOCKS, np.int64(row_to) // _BLOCKS
        for group in range(first_tile, last_tile + 1, _GROUP // _BLOCKS):
            # Sixteen rows of blocks at a time. The outline is convex: over the strip of a row it is widest where the
            # strip is nearest its extreme points.
            row = lane + _f(group * _BLOCKS)
            top = simd.fma(row, _BLOCK, _FIRST - my)
            bottom = top + (_LAST - _FIRST)
            d = simd.minimum(simd.maximum(turn, top), bottom)
            d = simd.minimum(simd.maximum(d, -extent_y), extent_y)
            w = d * r
            right = simd.square_root(simd.maximum(level - w * w, _ZERO)) - d * q
            d = simd.minimum(simd.maximum(-turn, top), bottom)
            d = simd.minimum(simd.maximum(d, -extent_y), extent_y)
            w = d * r
            left = simd.square_root(simd.maximum(level - w * w, _ZERO)) + d * q
            low = simd.ceiling((mx - pad_x - _LAST - left * inverse) * _PER_BLOCK)
            high = simd.floor((mx + pad_x - _FIRST + right * inverse) * _PER_BLOCK)
            wanted = simd.both(simd.greater_equal(row, row_from), simd.greater_equal(row_to, row))
            for segment in range(x0, x1, _SEGMENT):
                end_tile = min(segment + _SEGMENT, x1)
                base = _f(segment * _BLOCKS)
                final = min(_f(end_tile * _BLOCKS - 1), last_column) - base
                simd.store_spans(spans, 0, simd.maximum(low - base, _ZERO), simd.minimum(high - base, final), wanted)
                for ty in range(group, min(group + _GROUP // _BLOCKS, last_tile + 1)):
                    k = (ty - group) * _BLOCKS
                    # Blocks of one tile row: four spans, a nibble of each per tile.
                    s0, s1, s2, s3 = spans[k], spans[k + 1], spans[k + 2], spans[k + 3]
                    for tx in range(segment, end_tile):
                        mask = (s0 & 15) | ((s1 & 15) << 4) | ((s2 & 15) << 8) | ((s3 & 15) << 12)
                        s0, s1, s2, s3 = s0 >> 4, s1 >> 4, s2 >> 4, s3 >> 4
                        if mask != 0:
                            tile = ty * tiles_x + tx
                            pair_tile[slot] = tile
                            pair_mask[slot] = mask
                            slot += 1
                            tile_pairs[tile] += 1
                            tile_blocks[tile] += simd.count_bits(np.int64(mask))
        run_end[rank] = slot


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
def scatter(first, end, order, capacity, run_end, shift, listed_tile, listed_mask, position, pairs, runs):
    """Move the pairs of the splats ``order[first:end]`` into their tiles' lists, `pairs` (P, 4) int32.

    `position` (T,) is where this chunk's share of each tile starts; `shift` is the number of unused slots before the
    chunk, by which slots are moved down. `runs` (V, 2) int32 gets each splat's run of slots.
    """
    slot = capacity[first]
    for rank in range(first, end):
        v = order[rank]
        runs[v, 0] = slot - shift
        stop = run_end[rank]
        while slot < stop:
            tile = listed_tile[slot]
            p = position[tile]
            position[tile] = p + 1
            pairs[p, P_SPLAT] = v
            pairs[p, P_SLOT] = slot - shift
            pairs[p, P_REACHABLE] = listed_mask[slot]
            slot += 1
        runs[v, 1] = slot - shift
