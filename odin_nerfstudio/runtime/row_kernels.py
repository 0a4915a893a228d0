"""Numba kernels over rows on the CPU: gather, pack, scatter, pending counts. `rows` holds their torch twins.

All release the interpreter lock, so that the threads that send and receive go on meanwhile.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


@numba.njit(**_OPTIONS)
def mask_to_ids(mask, ids):  # type: ignore[no-untyped-def]
    """Rows whose mask byte is not zero, ascending, into ids (large enough); returns how many."""
    n = 0
    for i in range(mask.shape[0]):
        if mask[i] != 0:
            ids[n] = i
            n += 1
    return n


@numba.njit(**_OPTIONS)
def gather(source, ids, out):  # type: ignore[no-untyped-def]
    """out[k] = source[ids[k]]. source [N, C], ids [n], out [>= n, C]."""
    for k in range(ids.shape[0]):
        i = ids[k]
        for c in range(source.shape[1]):
            out[k, c] = source[i, c]


@numba.njit(**_OPTIONS)
def flag_rows(gradient, width, flags):  # type: ignore[no-untyped-def]
    """Raise bit 1 of flags[k] where row k has a non-zero among its first `width` columns, bit 2 where a non-finite one.

    gradient [>= n, C], flags [n] uint8.
    """
    for k in range(flags.shape[0]):
        f = flags[k]
        for c in range(width):
            x = gradient[k, c]
            if x != 0:  # true for NaN
                f |= 1
                if x - x != 0:  # infinity or NaN
                    f |= 2
        flags[k] = f


@numba.njit(**_OPTIONS)
def any_beyond(gradient, width, n):  # type: ignore[no-untyped-def]
    """Whether the first n rows have a non-zero value right of the first `width` columns."""
    for k in range(n):
        for c in range(width, gradient.shape[1]):
            if gradient[k, c] != 0:
                return True
    return False


@numba.njit(**_OPTIONS)
def order_active(flags, ids, first, order):  # type: ignore[no-untyped-def]
    """Positions k with flags[k] & 1, those with first[ids[k]] != 0 in front, ascending within each part.

    Returns (number of positions, number in front). order [n] int32 is filled.
    """
    n = 0
    for k in range(flags.shape[0]):
        if flags[k] & 1 and first[ids[k]] != 0:
            order[n] = k
            n += 1
    front = n
    for k in range(flags.shape[0]):
        if flags[k] & 1 and first[ids[k]] == 0:
            order[n] = k
            n += 1
    return n, front


@numba.njit(**_OPTIONS)
def pack(gradient, order, width, out, offset):  # type: ignore[no-untyped-def]
    """out[k, offset : offset + width] = gradient[order[k], : width]."""
    for k in range(order.shape[0]):
        j = order[k]
        for c in range(width):
            out[k, offset + c] = gradient[j, c]


@numba.njit(**_OPTIONS)
def scatter_add(target, ids, rows, offset, width):  # type: ignore[no-untyped-def]
    """target[ids[k], : width] += rows[k, offset : offset + width]. Ids are unique within a call."""
    for k in range(ids.shape[0]):
        i = ids[k]
        for c in range(width):
            target[i, c] += rows[k, offset + c]


@numba.njit(**_OPTIONS)
def scatter_add_masked(target, ids, rows, offset, width, mask):  # type: ignore[no-untyped-def]
    """`scatter_add` of the rows whose mask[ids[k]] is not zero."""
    for k in range(ids.shape[0]):
        i = ids[k]
        if mask[i] != 0:
            for c in range(width):
                target[i, c] += rows[k, offset + c]


@numba.njit(**_OPTIONS)
def clear(target, ids, width):  # type: ignore[no-untyped-def]
    """target[ids[k], : width] = 0."""
    for k in range(ids.shape[0]):
        i = ids[k]
        for c in range(width):
            target[i, c] = 0


@numba.njit(**_OPTIONS)
def clear_masked(target, ids, width, mask):  # type: ignore[no-untyped-def]
    """`clear` of the rows whose mask[ids[k]] is not zero."""
    for k in range(ids.shape[0]):
        i = ids[k]
        if mask[i] != 0:
            for c in range(width):
                target[i, c] = 0


@numba.njit(**_OPTIONS)
def publishable(versions, step, pending, out):  # type: ignore[no-untyped-def]
    """out[i] = versions[i] == step and pending[i] == 0; returns the number of ones."""
    n = 0
    for i in range(versions.shape[0]):
        yes = versions[i] == step and pending[i] == 0
        out[i] = yes
        n += yes
    return n


@numba.njit(**_OPTIONS)
def set_versions(versions, mask, value):  # type: ignore[no-untyped-def]
    """versions[i] = value where mask[i] is not zero."""
    for i in range(versions.shape[0]):
        if mask[i] != 0:
            versions[i] = value


@numba.njit(**_OPTIONS)
def count_older(versions, ids, step):  # type: ignore[no-untyped-def]
    """Number of ids whose version is below step."""
    n = 0
    for k in range(ids.shape[0]):
        n += versions[ids[k]] < step
    return n


@numba.njit(**_OPTIONS)
def count_newer(versions, ids, step):  # type: ignore[no-untyped-def]
    """Number of ids whose version is above step."""
    n = 0
    for k in range(ids.shape[0]):
        n += versions[ids[k]] > step
    return n


@numba.njit(**_OPTIONS)
def blocked(versions, ids, step, pending, out):  # type: ignore[no-untyped-def]
    """Ids whose update of `step` is not applied and still pending, into out (as long as ids); returns how many."""
    n = 0
    for k in range(ids.shape[0]):
        i = ids[k]
        if versions[i] <= step and pending[i] != 0:
            out[n] = i
            n += 1
    return n


@numba.njit(**_OPTIONS)
def add_counts(pending, ids, amount):  # type: ignore[no-untyped-def]
    """pending[ids[k]] += amount. uint8 counts of at most 255 lanes."""
    for k in range(ids.shape[0]):
        pending[ids[k]] = np.uint8(np.int64(pending[ids[k]]) + amount)


@numba.njit(**_OPTIONS)
def any_outside(mask, ids):  # type: ignore[no-untyped-def]
    """Number of ids whose mask byte is zero."""
    n = 0
    for k in range(ids.shape[0]):
        n += mask[ids[k]] == 0
    return n
