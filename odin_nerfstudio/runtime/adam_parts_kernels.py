"""Numba kernel of one Adam step whose gradient is a sum of parts, assembled chunk by chunk in the cache.

A dense gradient table would be scattered into, read and cleared: three passes over memory for a gradient that is zero
in most rows. Here a chunk of rows gets its gradient in a small buffer just before it is stepped.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from odin_nerfstudio.runtime.adam_kernels import (
    chunk_live_columns,
    moments_flat,
    moments_rows,
    update_flat,
    update_rows,
)
from odin_nerfstudio.runtime.addresses import pointer_to

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


float32_at, int32_at = pointer_to(types.float32), pointer_to(types.int32)

UNSORTED = -1


@numba.njit(**_OPTIONS)
def _assemble(parts, at, g, columns, start, stop):  # type: ignore[no-untyped-def]
    """g = sum of the parts' rows start .. stop - 1, in the order of the parts; 1 if any, 0 if none, or UNSORTED."""
    any_row = 0
    for q in range(parts.shape[0]):
        ids = int32_at(parts[q, 0])
        values = float32_at(parts[q, 1])
        count, stride, width = parts[q, 2], parts[q, 3], parts[q, 4]
        k = at[q]
        while k < count and ids[k] < stop:
            i = np.int64(ids[k]) - start
            if i < 0:
                return UNSORTED
            for c in range(width):
                g[i * columns + c] += values[k * stride + c]
            k += 1
        if k != at[q]:
            any_row = 1
        at[q] = k
    return any_row


@numba.njit(**_OPTIONS)
def advance(p, m, v, mask, parts, at, state, numbers, fused1, fused2, root, g, ids, moments, roots, start, stop):  # type: ignore[no-untyped-def]
    """Finish the previous chunk, whose square roots are in `roots` by now, and begin rows start .. stop - 1.

    Args: p, m, v: parameter and moments. [N, C] float32. mask: rows to step. [N] uint8, or [0] for all. parts: address
    of ids (ascending), address of values, count, floats from row to row, width, of each part. [P, 5] int64. at: next
    row of each part, advanced. [P] int64. state: (start, rows, live columns, whether all of the chunk's rows, whether
    g holds values) of the previous chunk, updated. [5] int64. numbers: 1 - b1, b2, 1 - b2, root of the second bias
    correction, eps, minus the step size. [6] float32. g: gradient of a chunk, zero at first. ids: [rows a chunk]
    int32. moments, roots: [floats a chunk].

    Returns: floats in `roots` that need their square root, or UNSORTED.
    """
    columns = p.shape[1]
    begun, rows, live = state[0], state[1], state[2]
    if rows * live > 0:
        if state[3]:
            a, b = begun * columns, (begun + rows) * columns
            update_flat(p.reshape(-1)[a:b], m.reshape(-1)[a:b], roots, numbers[5], numbers[3], numbers[4])
        else:
            steps = np.full(columns, numbers[5], np.float32)
            update_rows(p, ids[:rows], live, steps, numbers[3], numbers[4], moments, roots)
    state[1] = 0
    if start >= stop:
        return 0
    if state[4]:
        g[:] = 0
    state[4] = _assemble(parts, at, g, columns, start, stop)
    if state[4] == UNSORTED:
        return UNSORTED
    rows = 0
    if mask.shape[0]:
        for i in range(start, stop):
            if mask[i] != 0:
                ids[rows] = i
                rows += 1
        if rows == 0:
            return 0
    whole = mask.shape[0] == 0 or rows == stop - start
    if whole:
        rows = stop - start
        for k in range(rows):
            ids[k] = start + k
    local = ids[:rows] - np.int32(start)
    table = g[: (stop - start) * columns].reshape((stop - start, columns))
    live = columns
    if numbers[4] > 0 and np.isfinite(numbers[5]):  # inactive columns are an identity only where 0 / eps is a number
        bits = np.uint32
        seen = np.empty(columns, np.uint32)
        live = chunk_live_columns(m.view(bits), v.view(bits), table.view(bits), ids[:rows], local, seen)
    whole = whole and live == columns
    if whole:
        a, b = start * columns, stop * columns
        moments_flat(
            m.reshape(-1)[a:b], v.reshape(-1)[a:b], g, numbers[0], numbers[1], numbers[2], fused1, fused2, root, roots
        )
    elif live > 0:
        moments_rows(
            m, v, table, ids[:rows], local, live, numbers[0], numbers[1], numbers[2], fused1, fused2, root, moments,
            roots,
        )  # fmt: skip
    state[0], state[1], state[2], state[3] = start, rows, live, whole
    return rows * live
