"""Numba kernels of one Adam step whose gradient is a sum of parts: one pass over memory, block by block.

A dense gradient table would be scattered into, read and cleared: three passes over memory for a gradient that is zero
in most rows. Here a block of rows, small enough for the first-level cache, gets its gradient in a buffer just before
it is stepped, and the square root is taken inside (`adam_roots`), so that parameter and moments pass once.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from odin_nerfstudio.runtime.adam_kernels import first_moment, second_moment
from odin_nerfstudio.runtime.adam_roots import roots
from odin_nerfstudio.runtime.addresses import add_floats, move_words, pointer_to

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

BLOCK = 1024
"""Floats of a block: parameter, moments, gradient and roots are 20 KiB."""

int32_at = pointer_to(types.int32)
_ZERO = np.float32(0)


@numba.njit(**_OPTIONS)
def live_columns(m, v):  # type: ignore[no-untyped-def]
    """One more than the last column with a bit in any row of m or v; 0 if there is none. m, v: [N, C] uint32."""
    columns = m.shape[1]
    live = 0
    for i in range(m.shape[0]):
        for c in range(columns - 1, live - 1, -1):
            if (m[i, c] | v[i, c]) != 0:
                live = c + 1
                break
        if live == columns:
            break
    return live


@numba.njit(**_OPTIONS)
def _assemble(parts, at, g, live, start, stop):  # type: ignore[no-untyped-def]
    """g += the parts' rows start .. stop - 1, in the order of the parts; 1 if any, 0 if none, or -1: ids not ascending.

    g: [rows, live] flattened float32.
    """
    any_row = 0
    sums = g.ctypes.data
    for q in range(parts.shape[0]):
        ids = int32_at(parts[q, 0])
        values = parts[q, 1]
        count, stride, width = parts[q, 2], parts[q, 3], parts[q, 4]
        first = at[q]
        k = first
        while k < count and ids[k] < stop:
            i = np.int64(ids[k]) - start
            if i < 0:
                return -1
            add_floats(values + 4 * stride * k, sums + 4 * live * i, width)
            k += 1
        if k != first:
            any_row = 1
            at[q] = k
    return any_row


@numba.njit(**_OPTIONS)
def _moments(m, v, g, w1, b2, w2, fused1, fused2, any_gradient):  # type: ignore[no-untyped-def]
    """Both moments of a block, in place. [n] float32 each."""
    if any_gradient:
        for k in range(m.shape[0]):
            x = second_moment(v[k], g[k], b2, w2, fused2)
            m[k] = first_moment(m[k], g[k], w1, fused1)
            v[k] = x
    else:
        for k in range(m.shape[0]):
            m[k] = first_moment(m[k], _ZERO, w1, fused1)
            v[k] = second_moment(v[k], _ZERO, b2, w2, fused2)


@numba.njit(**_OPTIONS)
def _update(p, m, root, a, c2, eps):  # type: ignore[no-untyped-def]
    """Parameters of a block, in place. [n] float32 each; a is minus the bias-corrected step size."""
    for k in range(p.shape[0]):
        p[k] += (a * m[k]) / (root[k] / c2 + eps)


@numba.njit(**_OPTIONS)
def _take(table, ids, live, out):  # type: ignore[no-untyped-def]
    """out = the first `live` columns of rows ids, side by side. table [N, C], out [>= n * live]."""
    source, target, width = table.ctypes.data, out.ctypes.data, 4 * table.shape[1]
    for k in range(ids.shape[0]):
        move_words(source + width * ids[k], target + 4 * live * k, live)


@numba.njit(**_OPTIONS)
def _put(table, ids, live, values):  # type: ignore[no-untyped-def]
    """The reverse of `_take`."""
    target, source, width = table.ctypes.data, values.ctypes.data, 4 * table.shape[1]
    for k in range(ids.shape[0]):
        move_words(source + 4 * live * k, target + width * ids[k], live)


@numba.njit(**_OPTIONS)
def step_range(p, m, v, live, mask, parts, at, numbers, fused1, fused2, recipe, begin, end):  # type: ignore[no-untyped-def]
    """One Adam step of rows begin .. end - 1.

    Args: p, m, v: parameter and moments. [N, C] float32. live: columns to step. mask: rows to step. [N] uint8, or [0]
    for all. parts: address of ids (ascending), address of values, count, floats from row to row, width (at most live),
    of each part. [P, 5] int64. at: next row of each part. [P] int64. numbers: 1 - b1, b2, 1 - b2, root of the second
    bias correction, eps, minus the step size. [6] float32. fused1, fused2, recipe: how torch rounds.

    Returns: whether the ids of each part ascended.
    """
    columns = p.shape[1]
    if live == 0:
        return True
    per_block = max(1, BLOCK // live // 16 * 16)  # whole vectors
    floats = (per_block * live + 15) // 16 * 16
    g, root = np.zeros(floats, np.float32), np.empty(floats, np.float32)
    bp, bm, bv = np.zeros(floats, np.float32), np.zeros(floats, np.float32), np.zeros(floats, np.float32)
    ids, others = np.empty(per_block + 1, np.int32), np.empty(per_block + 1, np.int32)
    w1, b2, w2, c2, eps, a = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    flat_p, flat_m, flat_v = p.reshape(-1), m.reshape(-1), v.reshape(-1)
    for start in range(begin, end, per_block):
        stop = min(start + per_block, end)
        some = _assemble(parts, at, g, live, start, stop)
        if some < 0:
            return False
        rows = stop - start
        left = 0
        if mask.shape[0]:
            rows = 0
            for i in range(start, stop):
                ids[rows] = i
                others[left] = i
                rows += mask[i] != 0
                left += mask[i] == 0
        n = rows * live
        whole = (stop - start) * columns
        if rows > left and live == columns and whole % 16 == 0:
            # in place, all rows; the few that are not wanted are put back
            x, y = start * columns, stop * columns
            kept = others[:left]
            _take(m, kept, live, bm)
            _take(v, kept, live, bv)
            _take(p, kept, live, bp)
            _moments(flat_m[x:y], flat_v[x:y], g, w1, b2, w2, fused1, fused2, some)
            roots(flat_v[x:y], root, whole, recipe)
            _update(flat_p[x:y], flat_m[x:y], root, a, c2, eps)
            _put(m, kept, live, bm)
            _put(v, kept, live, bv)
            _put(p, kept, live, bp)
        elif rows > 0:
            if mask.shape[0] == 0:
                for k in range(rows):
                    ids[k] = start + k
            elif some and rows < stop - start:
                sums = g.ctypes.data
                for k in range(rows):
                    move_words(sums + 4 * live * (ids[k] - start), sums + 4 * live * k, live)
            here = ids[:rows]
            _take(m, here, live, bm)
            _take(v, here, live, bv)
            _take(p, here, live, bp)
            _moments(bm[:n], bv[:n], g, w1, b2, w2, fused1, fused2, some)
            roots(bv, root, n, recipe)
            _update(bp[:n], bm[:n], root, a, c2, eps)
            _put(m, here, live, bm)
            _put(v, here, live, bv)
            _put(p, here, live, bp)
        if some:
            g[:] = 0
    return True
