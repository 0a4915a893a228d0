"""Numba kernels over rows on the CPU: gather, pack, scatter, pending counts. `rows` holds their torch twins.

All release the interpreter lock, so that the threads that send and receive go on meanwhile.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from odin_nerfstudio.runtime.addresses import move_words, pointer_to

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

uint32_at = pointer_to(types.uint32)


@numba.njit(**_OPTIONS)
def mask_to_ids(mask, ids):  # type: ignore[no-untyped-def]
    """Rows whose mask byte is not zero, ascending, into ids (as long as the mask and one more); returns how many."""
    n = 0
    whole = mask.shape[0] // 8
    words = mask[: 8 * whole].view(np.uint64)
    for w in range(whole):
        if words[w] != 0:  # a view sees little of a large model
            for i in range(8 * w, 8 * w + 8):  # without a branch, which would be guessed wrong too often
                ids[n] = i
                n += mask[i] != 0
    for i in range(8 * whole, mask.shape[0]):
        ids[n] = i
        n += mask[i] != 0
    return n


@numba.njit(**_OPTIONS)
def gather(source, ids, out):  # type: ignore[no-untyped-def]
    """out[k] = the leading columns of source[ids[k]]. source [N, C], ids [n], out [>= n, <= C] of 4-byte words."""
    here, there = source.ctypes.data, out.ctypes.data
    width, columns = 4 * source.shape[1], out.shape[1]
    for k in range(ids.shape[0]):
        move_words(here + width * ids[k], there + 4 * columns * k, columns)


@numba.njit(**_OPTIONS)
def any_beyond(gradient, width, n):  # type: ignore[no-untyped-def]
    """Whether the first n rows have a non-zero value right of the first `width` columns."""
    for k in range(n):
        for c in range(width, gradient.shape[1]):
            if gradient[k, c] != 0:
                return True
    return False


@numba.njit(**_OPTIONS)
def pack_active(leaves, ids, first, wanted, out, out_ids, begin):  # type: ignore[no-untyped-def]
    """Rows with a non-zero in any leaf's gradient, their columns side by side, to out[begin:], their ids to out_ids.

    A row is copied and looked at in one pass, and left to be overwritten by the next if it proves to be zero.

    Args: leaves: address of the gradient (0: zero), floats from row to row, width, of each leaf. [P, 3] int64. ids:
    row of the table of each row of the leaves. [n] int32. first: [N] uint8; only rows with (first != 0) == wanted
    count; empty: all do. out: [>= n + 1, sum of the widths] float32 as uint32. out_ids: [>= n] int32.

    Returns: (end of what was written, whether a value is not finite).
    """
    total = out.shape[1]
    flat = out.reshape(-1)
    end = begin
    bad = False
    for k in range(ids.shape[0]):
        if first.shape[0] and (first[ids[k]] != 0) != wanted:
            continue
        largest = np.uint32(0)
        at = np.uint64(end * total)
        for q in range(leaves.shape[0]):
            width = np.uint64(leaves[q, 2])
            if leaves[q, 0] == 0:
                for c in range(width):
                    flat[at + c] = 0
            else:
                source = uint32_at(leaves[q, 0] + 4 * k * leaves[q, 1])
                for c in range(width):
                    x = source[c]
                    flat[at + c] = x
                    largest = max(largest, x & np.uint32(0x7FFFFFFF))
            at += width
        if largest != 0:
            out_ids[end] = ids[k]
            end += 1
            bad |= largest >= np.uint32(0x7F800000)  # infinity or NaN
    return end, bad


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
def fill_at(target, ids, value):  # type: ignore[no-untyped-def]
    """target[ids[k]] = value."""
    for k in range(ids.shape[0]):
        target[ids[k]] = value


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


@numba.njit(**_OPTIONS)
def add_statistics(gradients, counts, largest, ids, norms, radii):  # type: ignore[no-untyped-def]
    """Add one view to densification statistics. gradients, counts, largest (or [0]): [N] float32; ids, unique: [n]."""
    for k in range(ids.shape[0]):
        i = ids[k]
        gradients[i] += norms[k]
        counts[i] += np.float32(1)
        if largest.shape[0]:
            largest[i] = max(largest[i], radii[k])
