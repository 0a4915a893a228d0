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
def count_neighbours(indptr, indices, start, rows):
    """Per view u, the number of views that share a point with it (itself left out). (V,) int64"""
    views = indptr.shape[0] - 1
    mark = np.full(views, -1, np.int64)
    out = np.zeros(views, np.int64)
    for u in range(views):
        mark[u] = u
        for k in range(indptr[u], indptr[u + 1]):
            p = indices[k]
            for j in range(start[p], start[p + 1]):
                v = rows[j]
                if mark[v] != u:
                    mark[v] = u
                    out[u] += 1
    return out


@numba.njit(cache=True, nogil=True)
def shared_points(indptr, indices, start, rows, out_indptr, out_indices, out_counts):
    """Fill compressed rows of the symmetric matrix of shared point counts (diagonal left out, columns ascending)."""
    views = indptr.shape[0] - 1
    count = np.zeros(views, np.int32)
    for u in range(views):
        begin = out_indptr[u]
        at = begin
        for k in range(indptr[u], indptr[u + 1]):
            p = indices[k]
            for j in range(start[p], start[p + 1]):
                v = rows[j]
                if v == u:
                    continue
                if count[v] == 0:
                    out_indices[at] = v
                    at += 1
                count[v] += 1
        out_indices[begin:at].sort()
        for k in range(begin, at):
            out_counts[k] = count[out_indices[k]]
            count[out_indices[k]] = 0


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


@numba.njit(cache=True, nogil=True)
def add_conflict(members, rank, first_step, indptr, neighbours, written, read, step_of, rank_of, lag_weight, profile):
    """Cost of putting each member into each step, given where the views of the other ranks are.

    profile[i, s - first_step] += sum over tasks u of other ranks of
        weight(u -> v) * lag_weight[d]  if u runs d steps before s (v reads what u wrote), and
        weight(v -> u) * lag_weight[d]  if u runs d steps after s.
    step_of, rank_of: per epoch (previous, this, next) and view; rank -1 where the view does not matter.
    written[k], read[k]: integer weights of v -> neighbours[k] and neighbours[k] -> v.
    """
    steps = profile.shape[1]
    lags = lag_weight.shape[0]
    for i in range(members.shape[0]):
        v = members[i]
        for k in range(indptr[v], indptr[v + 1]):
            u = neighbours[k]
            for epoch in range(3):
                other = rank_of[epoch, u]
                if other < 0 or other == rank:
                    continue
                at = step_of[epoch, u] - first_step
                for d in range(1, lags):
                    if 0 <= at + d < steps:
                        profile[i, at + d] += read[k] * lag_weight[d]
                    if 0 <= at - d < steps:
                        profile[i, at - d] += written[k] * lag_weight[d]


@numba.njit(cache=True, nogil=True)
def part_affinity(indptr, neighbours, weight, part, parts):
    """Sum of edge weights from each view to each part. (V, parts) int64"""
    out = np.zeros((indptr.shape[0] - 1, parts), np.int64)
    for v in range(indptr.shape[0] - 1):
        for k in range(indptr[v], indptr[v + 1]):
            p = part[neighbours[k]]
            if p >= 0:
                out[v, p] += weight[k]
    return out


@numba.njit(cache=True, nogil=True)
def _move(v, target, indptr, neighbours, weight, part, affinity, room):
    old = part[v]
    for k in range(indptr[v], indptr[v + 1]):
        u = neighbours[k]
        if old >= 0:
            affinity[u, old] -= weight[k]
        if target >= 0:
            affinity[u, target] += weight[k]
    if old >= 0:
        room[old] += 1
    if target >= 0:
        room[target] -= 1
    part[v] = target


@numba.njit(cache=True, nogil=True)
def fit_capacities(indptr, neighbours, weight, part, capacity):
    """Make every part hold exactly its capacity: overfull parts release the views that hold to them least, others take
    the released view that holds to them most. What fits nowhere ends as part -1."""
    parts = capacity.shape[0]
    affinity = part_affinity(indptr, neighbours, weight, part, parts)
    room = capacity.copy()
    for v in range(part.shape[0]):
        if part[v] >= 0:
            room[part[v]] -= 1
    for p in range(parts):
        while room[p] < 0:
            worst, worst_value = -1, np.int64(0)
            for v in range(part.shape[0]):
                if part[v] == p:
                    value = 2 * affinity[v, p] - affinity[v].sum()
                    if worst < 0 or value < worst_value:
                        worst, worst_value = v, value
            _move(worst, -1, indptr, neighbours, weight, part, affinity, room)
    while True:
        best, best_part, best_value = -1, -1, np.int64(0)
        for v in range(part.shape[0]):
            if part[v] >= 0:
                continue
            for p in range(parts):
                if room[p] > 0:
                    value = 2 * affinity[v, p] - affinity[v].sum()
                    if best < 0 or value > best_value:
                        best, best_part, best_value = v, p, value
        if best < 0:
            break
        _move(best, best_part, indptr, neighbours, weight, part, affinity, room)


@numba.njit(cache=True, nogil=True)
def _edge(indptr, neighbours, weight, u, v):
    low, high = indptr[u], indptr[u + 1]
    while low < high:
        middle = (low + high) // 2
        if neighbours[middle] < v:
            low = middle + 1
        else:
            high = middle
    return weight[low] if low < indptr[u + 1] and neighbours[low] == v else 0


@numba.njit(cache=True, nogil=True)
def refine_parts(indptr, neighbours, weight, part, parts, load, load_weight, passes):
    """Swap pairs of views between parts while that lowers cut + load_weight * sum over parts of load². Part sizes stay.
    load: integer cost of each view. A view in part -1 may be swapped in too; it counts in no part."""
    views = part.shape[0]
    affinity = part_affinity(indptr, neighbours, weight, part, parts)
    room = np.zeros(parts, np.int64)
    total = np.zeros(parts, np.int64)
    for v in range(views):
        if part[v] >= 0:
            total[part[v]] += load[v]
    for _ in range(passes):
        changed = False
        for v in range(views):
            a = part[v]
            if a < 0:
                continue
            best, best_gain = -1, np.int64(0)
            for u in range(views):
                b = part[u]
                if b == a:
                    continue
                if b < 0:
                    gain = affinity[u, a] - affinity[v, a] - _edge(indptr, neighbours, weight, u, v)
                    after = total[a] + load[u] - load[v]
                    gain -= load_weight * (after * after - total[a] * total[a])
                else:
                    gain = affinity[v, b] - affinity[v, a] + affinity[u, a] - affinity[u, b]
                    change = load[u] - load[v]
                    gain -= load_weight * 2 * change * (total[a] - total[b] + change)
                    if gain > best_gain:
                        gain -= 2 * _edge(indptr, neighbours, weight, u, v)
                if gain > best_gain:
                    best, best_gain = u, gain
            if best >= 0:
                b = part[best]
                total[a] += load[best] - load[v]
                if b >= 0:
                    total[b] += load[v] - load[best]
                _move(v, -1, indptr, neighbours, weight, part, affinity, room)
                _move(best, a, indptr, neighbours, weight, part, affinity, room)
                _move(v, b, indptr, neighbours, weight, part, affinity, room)
                changed = True
        if not changed:
            break
