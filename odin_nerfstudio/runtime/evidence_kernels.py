"""Numba kernels of gradient-mass evidence on the CPU; `mass` holds their torch twins.

Shares are kept in 16 bits: the upper half of a float32 (bfloat16), which keeps its range and 8 bits of precision.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

EXPONENTS = 256
"""Values of a float32's exponent field."""


@numba.njit(inline="always")
def _decode(half):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@numba.njit(inline="always")
def _encode(value):  # type: ignore[no-untyped-def]
    return np.uint16((np.float32(value).view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16))


@numba.njit(inline="always")
def _exponent(value):  # type: ignore[no-untyped-def]
    return (np.float32(value).view(np.uint32) >> np.uint32(23)) & np.uint32(255)


@numba.njit(**_OPTIONS)
def row_mass(rows, spans, out):  # type: ignore[no-untyped-def]
    """out[k] = sum of |rows[k, c]| over the columns of the spans. rows [n, C], spans [S, 2]: first column, width."""
    for k in range(rows.shape[0]):
        total = np.float32(0)
        for q in range(spans.shape[0]):
            for c in range(spans[q, 0], spans[q, 0] + spans[q, 1]):
                total += abs(rows[k, c])
        out[k] = total


@numba.njit(**_OPTIONS)
def distil(ids, mass, tail, largest, out_ids, out_shares):  # type: ignore[no-untyped-def]
    """Turn masses into shares of their sum, without the smallest ones; returns how many are left.

    Shares below a power of two are dropped: the largest one, at most `largest`, for which they sum to at most `tail`.
    ids [n] int32, mass [n] float32, out_ids [n] int32, out_shares [n] uint16.
    """
    total = 0.0
    for k in range(mass.shape[0]):
        total += mass[k]
    if total <= 0:
        return 0
    scale = 1.0 / total
    sums = np.zeros(EXPONENTS, np.float64)
    for k in range(mass.shape[0]):
        share = np.float32(mass[k] * scale)
        sums[_exponent(share)] += share
    cut, dropped, bound = 0, 0.0, _exponent(np.float32(largest))
    while cut < bound and dropped + sums[cut] <= tail:
        dropped += sums[cut]
        cut += 1
    n = 0
    for k in range(mass.shape[0]):
        share = np.float32(mass[k] * scale)
        if share > 0 and _exponent(share) >= cut:
            out_ids[n] = ids[k]
            out_shares[n] = _encode(share)
            n += 1
    return n


@numba.njit(**_OPTIONS)
def children_of(parents, starts, children):  # type: ignore[no-untyped-def]
    """New rows of each old row: those of row i are children[starts[i] : starts[i + 1]], ascending. starts [N_old + 1]
    zero."""
    for j in range(parents.shape[0]):
        starts[parents[j] + 1] += 1
    for i in range(1, starts.shape[0]):
        starts[i] += starts[i - 1]
    at = starts.copy()
    for j in range(parents.shape[0]):
        i = parents[j]
        children[at[i]] = j
        at[i] += 1


@numba.njit(**_OPTIONS)
def count_children(ids, starts):  # type: ignore[no-untyped-def]
    """How many new rows come from some old ones."""
    n = 0
    for k in range(ids.shape[0]):
        n += starts[ids[k] + 1] - starts[ids[k]]
    return n


@numba.njit(**_OPTIONS)
def follow(ids, shares, starts, children, out_ids, out_shares):  # type: ignore[no-untyped-def]
    """Give each row's share to its children in equal parts."""
    n = 0
    for k in range(ids.shape[0]):
        begin, end = starts[ids[k]], starts[ids[k] + 1]
        if begin == end:
            continue
        share = shares[k] if end - begin == 1 else _encode(_decode(shares[k]) / np.float32(end - begin))
        for q in range(begin, end):
            out_ids[n] = children[q]
            out_shares[n] = share
            n += 1


@numba.njit(**_OPTIONS)
def mark_late(versions, ids, step, pending, delay, late, out, n):  # type: ignore[no-untyped-def]
    """late[i] = delay for ids that wait for `step` and are not marked yet; appends them to out[n:], returns the end."""
    for k in range(ids.shape[0]):
        i = ids[k]
        if versions[i] <= step and pending[i] != 0 and late[i] == 0:
            late[i] = delay
            out[n] = i
            n += 1
    return n


@numba.njit(**_OPTIONS)
def add_known(total, ids, shares, member):  # type: ignore[no-untyped-def]
    """total[ids[k]] += shares[k] where member[ids[k]] is not zero."""
    for k in range(ids.shape[0]):
        i = ids[k]
        if member[i] != 0:
            total[i] += _decode(shares[k])


@numba.njit(**_OPTIONS)
def add_unknown(total, ids, member):  # type: ignore[no-untyped-def]
    """total[ids[k]] += 1 where member[ids[k]] is not zero."""
    for k in range(ids.shape[0]):
        i = ids[k]
        if member[i] != 0:
            total[i] += np.float32(1)


@numba.njit(**_OPTIONS)
def meets(ids, member, total):  # type: ignore[no-untyped-def]
    """Whether one of the ids has a byte in `member` and a `total` above zero."""
    for k in range(ids.shape[0]):
        i = ids[k]
        if member[i] != 0 and total[i] > 0:
            return True
    return False


@numba.njit(**_OPTIONS)
def overlap_known(ids, shares, late, total):  # type: ignore[no-untyped-def]
    """Over ids marked late: sum of min(share, total), the largest of them, and how many are not zero."""
    harm, peak, n = 0.0, np.float32(0), 0
    for k in range(ids.shape[0]):
        i = ids[k]
        if late[i] != 0 and total[i] > 0:
            least = min(_decode(shares[k]), total[i])
            harm += least
            peak = max(peak, least)
            n += 1
    return harm, peak, n


@numba.njit(**_OPTIONS)
def overlap_unknown(ids, total):  # type: ignore[no-untyped-def]
    """Over the ids: sum of min(1, total), the largest of them, and how many are not zero."""
    harm, peak, n = 0.0, np.float32(0), 0
    for k in range(ids.shape[0]):
        i = ids[k]
        if total[i] > 0:
            least = min(np.float32(1), total[i])
            harm += least
            peak = max(peak, least)
            n += 1
    return harm, peak, n
