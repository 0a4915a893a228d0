"""Numba kernels of the planner. All arithmetic that decides a plan is on integers, so it is exact and has the same
result on every machine; nothing here runs in parallel."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def _u64(data, at):
    value = np.uint64(0)
    for k in range(8):
        value |= np.uint64(data[at + k]) << np.uint64(8 * k)
    return value


@numba.njit(cache=True, nogil=True)
def _u32(data, at):
    return (
        np.int64(data[at])
        | (np.int64(data[at + 1]) << 8)
        | (np.int64(data[at + 2]) << 16)
        | (np.int64(data[at + 3]) << 24)
    )


@numba.njit(cache=True, nogil=True)
def _find(sorted_ids, image_id):
    """Position of ``image_id``, or -1. COLMAP numbers images from 1 without gaps as a rule: try that place first."""
    n = sorted_ids.shape[0]
    if n == 0:
        return -1
    guess = image_id - sorted_ids[0]
    if 0 <= guess < n and sorted_ids[guess] == image_id:
        return guess
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if sorted_ids[middle] < image_id:
            low = middle + 1
        else:
            high = middle
    return low if low < n and sorted_ids[low] == image_id else -1


@numba.njit(cache=True, nogil=True)
def scan_points3d(data, points, sorted_ids, sorted_rows, counts, xyz):
    """First walk over a points3D.bin: observations per view into counts[view + 1], coordinates into xyz.
    Returns the bytes used, or -1 if the file is cut short."""
    last = np.full(counts.shape[0], -1, np.int64)
    bits = np.empty(3, np.uint64)
    at, size = np.int64(8), np.int64(data.shape[0])
    for point in range(points):
        if at + 51 > size:
            return -1
        for k in range(3):
            bits[k] = _u64(data, at + 8 + 8 * k)
        coordinates = bits.view(np.float64)
        for k in range(3):
            xyz[point, k] = coordinates[k]
        track = np.int64(_u64(data, at + 43))
        at += 51
        if track < 0 or track > (size - at) // 8:
            return -1
        for k in range(track):
            found = _find(sorted_ids, _u32(data, at + 8 * k))
            if found >= 0:
                view = sorted_rows[found]
                if last[view] != point:  # a track may list one image twice
                    last[view] = point
                    counts[view + 1] += 1
        at += 8 * track
    return at


@numba.njit(cache=True, nogil=True)
def fill_points3d(data, points, sorted_ids, sorted_rows, cursor, indices):
    """Second walk: point rows of each view, ascending. cursor: where each view's next entry goes (consumed)."""
    last = np.full(cursor.shape[0] + 1, -1, np.int64)
    at = np.int64(8)
    for point in range(points):
        track = np.int64(_u64(data, at + 43))
        at += 51
        for k in range(track):
            found = _find(sorted_ids, _u32(data, at + 8 * k))
            if found >= 0:
                view = sorted_rows[found]
                if last[view] != point:
                    last[view] = point
                    indices[cursor[view]] = point
                    cursor[view] += 1
        at += 8 * track


@numba.njit(cache=True, nogil=True)
def transpose_pattern(indptr, indices, columns):
    """Compressed columns (start per column, ascending rows) of a pattern given by compressed rows, and for every
    column entry its place among the row entries."""
    start = np.zeros(columns + 1, np.int64)
    for k in range(indices.shape[0]):
        start[indices[k] + 1] += 1
    for c in range(columns):
        start[c + 1] += start[c]
    cursor = start[:-1].copy()
    rows = np.empty(indices.shape[0], np.int32)
    for r in range(indptr.shape[0] - 1):
        for k in range(indptr[r], indptr[r + 1]):
            c = indices[k]
            rows[cursor[c]] = r
            cursor[c] += 1
    return start, rows


@numba.njit(cache=True, nogil=True)
def points_by_first_view(indptr, indices, points):
    """The same pattern with the points renumbered by the first view that observes them. Points that are observed
    together then lie together: counting pairs runs several times faster on large models, whose points come in no order
    that the cache likes."""
    views = indptr.shape[0] - 1
    label = np.full(points, -1, np.int32)
    used = 0
    out = np.empty_like(indices)
    for v in range(views):
        for k in range(indptr[v], indptr[v + 1]):
            p = indices[k]
            if label[p] < 0:
                label[p] = used
                used += 1
            out[k] = label[p]
    return out, used


@numba.njit(cache=True, nogil=True)
def shared_points(indptr, indices, start, rows):
    """Compressed rows of the symmetric matrix of shared point counts (diagonal left out, columns ascending)."""
    views = indptr.shape[0] - 1
    count = np.zeros(views, np.int32)
    out_indptr = np.zeros(views + 1, np.int64)
    out_indices = np.empty(max(16, views), np.int32)
    out_counts = np.empty(max(16, views), np.int32)
    touched = np.empty(views, np.int32)
    at = 0
    for u in range(views):
        found = 0
        for k in range(indptr[u], indptr[u + 1]):
            p = indices[k]
            for j in range(start[p], start[p + 1]):
                v = rows[j]
                if count[v] == 0:
                    touched[found] = v
                    found += 1
                count[v] += 1
        if at + found > out_indices.shape[0]:
            size = max(2 * out_indices.shape[0], at + found)
            larger = np.empty(size, np.int32)
            larger[:at] = out_indices[:at]
            out_indices = larger
            larger = np.empty(size, np.int32)
            larger[:at] = out_counts[:at]
            out_counts = larger
        touched[:found].sort()
        for k in range(found):
            v = touched[k]
            if v != u:
                out_indices[at] = v
                out_counts[at] = count[v]
                at += 1
            count[v] = 0
        out_indptr[u + 1] = at
    return out_indptr, out_indices[:at].copy(), out_counts[:at].copy()


@numba.njit(cache=True, nogil=True)
def shared_importance(indptr, indices, importance, start, rows, out_indptr, out_indices, out_values):
    """As shared_points, for the directed sum over the shared points of the *reader's* importance: value[u, v] is the
    sum over points of u and v of importance at (v, point). importance: per observation, in the order of indices."""
    views = indptr.shape[0] - 1
    # Importance in column order, so that the inner loop reads it beside the view.
    cursor = start[:-1].copy()
    by_column = np.empty(indices.shape[0], np.float32)
    for r in range(views):
        for k in range(indptr[r], indptr[r + 1]):
            c = indices[k]
            by_column[cursor[c]] = importance[k]
            cursor[c] += 1
    total = np.zeros(views, np.float64)
    for u in range(views):
        for k in range(indptr[u], indptr[u + 1]):
            p = indices[k]
            for j in range(start[p], start[p + 1]):
                total[rows[j]] += by_column[j]
        for k in range(out_indptr[u], out_indptr[u + 1]):
            out_values[k] = total[out_indices[k]]
        for k in range(indptr[u], indptr[u + 1]):
            p = indices[k]
            for j in range(start[p], start[p + 1]):
                total[rows[j]] = 0.0
