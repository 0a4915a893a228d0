"""Numba kernels of one Adam step whose gradient is a sum of parts: one pass over memory, block by block.

A dense gradient table would be scattered into, read and cleared: three passes over memory for a gradient that is zero
in most rows. Here a block of rows, small enough for the first-level cache, gets its gradient in a buffer just before
it is stepped, and the square root is taken inside (`adam_roots`), so that parameter and moments pass once.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import carray, types  # pyright: ignore[reportPrivateImportUsage]

from odin_nerfstudio.runtime.adam_kernels import first_moment, second_moment
from odin_nerfstudio.runtime.adam_roots import roots
from odin_nerfstudio.runtime.addresses import add_floats, move_words, pointer_to

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

BLOCK = 1024
"""Floats of a block: parameter, moments, gradient and roots are 20 KiB."""

int32_at = pointer_to(types.int32)
float32_at = pointer_to(types.float32)
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
def _first_at(ids, count, row):  # type: ignore[no-untyped-def]
    """How many of the ascending ids lie before a row. ids: pointer to int32."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(**_OPTIONS)
def _assemble(parts, at, g, live, start, stop, chosen):  # type: ignore[no-untyped-def]
    """g += the parts' rows, in the order of the parts; 1 if any, 0 if none, or -1: ids not ascending.

    Args: parts: see `step_targets`. at: next row of each part; moves on. g: [rows, live] flattened float32; its rows
    are start .. stop - 1, or those of `chosen` (ascending int32, within start .. stop - 1) unless that is empty.
    """
    any_row = 0
    sums = g.ctypes.data
    n = chosen.shape[0]
    for q in range(parts.shape[0]):
        ids = int32_at(parts[q, 0])
        values = parts[q, 1]
        count, stride, width = parts[q, 2], parts[q, 3], parts[q, 4]
        k, j = at[q], 0
        while k < count and ids[k] < stop:
            if k > 0 and ids[k] <= ids[k - 1]:
                return -1
            i = np.int64(ids[k]) - start
            if n > 0:
                while j < n and chosen[j] < ids[k]:
                    j += 1
                i = j if j < n and chosen[j] == ids[k] else -1
            if i >= 0:
                add_floats(values + 4 * stride * k, sums + 4 * live * i, width)
                any_row = 1
            k += 1
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
def _take(table, columns, ids, live, out):  # type: ignore[no-untyped-def]
    """out = the first `live` columns of rows ids, side by side. table [N * columns], out [>= n * live]."""
    source, target, width = table.ctypes.data, out.ctypes.data, 4 * columns
    for k in range(ids.shape[0]):
        move_words(source + width * ids[k], target + 4 * live * k, live)


@numba.njit(**_OPTIONS)
def _put(table, columns, ids, live, values):  # type: ignore[no-untyped-def]
    """The reverse of `_take`."""
    target, source, width = table.ctypes.data, values.ctypes.data, 4 * columns
    for k in range(ids.shape[0]):
        move_words(source + 4 * live * k, target + width * ids[k], live)


@numba.njit(**_OPTIONS)
def _step_target(p, m, v, n, columns, live, parts, numbers, fused1, fused2, recipe, rows, begin, end, limit):  # type: ignore[no-untyped-def]
    """One Adam step of the rows rows[begin] .. rows[end - 1], or begin .. end - 1 where `rows` is empty.

    p, m, v: [N * columns] float32. limit: rows from this one on are left alone. For the rest, see `step_targets`.

    Returns: whether the ids of each part ascended.
    """
    per_block = max(1, BLOCK // live // 16 * 16)  # whole vectors
    floats = (per_block * live + 15) // 16 * 16
    g, root = np.zeros(floats, np.float32), np.empty(floats, np.float32)
    bp, bm, bv = np.zeros(floats, np.float32), np.zeros(floats, np.float32), np.zeros(floats, np.float32)
    every, others = np.empty(per_block, np.int32), np.empty(per_block, np.int32)
    w1, b2, w2, c2, eps, a = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    some_rows = rows.shape[0] > 0
    first = np.int64(rows[begin]) if some_rows else begin
    at = np.empty(parts.shape[0], np.int64)
    for q in range(parts.shape[0]):
        at[q] = _first_at(int32_at(parts[q, 0]), parts[q, 2], first) if begin > 0 else 0
    k = begin
    while k < end:
        start = np.int64(rows[k]) if some_rows else k
        stop = min(start + per_block, limit)
        until = stop
        if some_rows:  # rows up to `until` lie before `stop`
            until = k
            while until < end and rows[until] < stop:
                until += 1
        whole = (stop - start) * columns
        if live == columns and whole % 16 == 0 and 2 * (until - k) > stop - start:
            # most rows of a stretch: in place; the few that are not wanted are put back
            left = 0
            if some_rows:
                i = start
                for j in range(k, until):
                    while i < rows[j]:
                        others[left] = i
                        left += 1
                        i += 1
                    i += 1
                while i < stop:
                    others[left] = i
                    left += 1
                    i += 1
            some = _assemble(parts, at, g, live, start, stop, others[:0])
            if some < 0:
                return False
            x, y = start * columns, stop * columns
            kept = others[:left]
            _take(m, columns, kept, live, bm)
            _take(v, columns, kept, live, bv)
            _take(p, columns, kept, live, bp)
            _moments(m[x:y], v[x:y], g, w1, b2, w2, fused1, fused2, some)
            roots(v[x:y], root, whole, recipe)
            _update(p[x:y], m[x:y], root, a, c2, eps)
            _put(m, columns, kept, live, bm)
            _put(v, columns, kept, live, bv)
            _put(p, columns, kept, live, bp)
        else:
            if some_rows:
                until = min(k + per_block, end)
                here = rows[k:until]
                some = _assemble(parts, at, g, live, start, np.int64(rows[until - 1]) + 1, here)
            else:
                for i in range(start, stop):
                    every[i - start] = i
                here = every[: stop - start]
                some = _assemble(parts, at, g, live, start, stop, others[:0])
            if some < 0:
                return False
            size = here.shape[0] * live
            _take(m, columns, here, live, bm)
            _take(v, columns, here, live, bv)
            _take(p, columns, here, live, bp)
            _moments(bm[:size], bv[:size], g, w1, b2, w2, fused1, fused2, some)
            roots(bv, root, size, recipe)
            _update(bp[:size], bm[:size], root, a, c2, eps)
            _put(m, columns, here, live, bm)
            _put(v, columns, here, live, bv)
            _put(p, columns, here, live, bp)
        if some:
            g[:] = 0
        k = until
    for q in range(parts.shape[0]):
        ids = int32_at(parts[q, 0])
        for j in range(max(at[q], 1), parts[q, 2] if limit == n else 0):
            if ids[j] <= ids[j - 1]:
                return False
    return True


@numba.njit(**_OPTIONS)
def step_targets(targets, numbers, parts, n, fused1, fused2, recipe, rows, begin, end, limit):  # type: ignore[no-untyped-def]
    """One Adam step of some rows of several parameters with N rows each.

    Args: targets: addresses of parameter and both moments ([N, C] float32 each), C, leading columns to step, first part
    and one after the last. [T, 7] int64. numbers: 1 - b1, b2, 1 - b2, root of the second bias correction, eps, minus
    the step size, of each target. [T, 6] float32. parts: address of ids (ascending), address of values, count, floats
    from row to row, width (at most what is stepped), of each part. [P, 5] int64. n: N. fused1, fused2, recipe: how
    torch rounds. rows: rows to step, ascending. int32; empty: all. begin, end: which of the rows. limit: see
    `_step_target`.

    Returns: whether the ids of each part ascended.
    """
    for t in range(targets.shape[0]):
        columns, live = targets[t, 3], targets[t, 4]
        if live == 0 or begin == end:
            continue
        size = (n * columns,)
        p = carray(float32_at(targets[t, 0]), size)
        m = carray(float32_at(targets[t, 1]), size)
        v = carray(float32_at(targets[t, 2]), size)
        mine = parts[targets[t, 5] : targets[t, 6]]
        if not _step_target(
            p, m, v, n, columns, live, mine, numbers[t], fused1, fused2, recipe, rows, begin, end, limit
        ):
            return False
    return True
