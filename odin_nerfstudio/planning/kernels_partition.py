"""Numba kernels that make a partition's sizes exact. Integers only, so that results are the same on every machine."""

from __future__ import annotations

import numba
import numpy as np


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
    views = part.shape[0]
    affinity = part_affinity(indptr, neighbours, weight, part, parts)
    room = capacity.copy()
    for v in range(views):
        if part[v] >= 0:
            room[part[v]] -= 1
    for p in range(parts):
        while room[p] < 0:
            worst = -1
            for v in range(views):
                if part[v] == p and (worst < 0 or affinity[v, p] < affinity[worst, p]):
                    worst = v
            _move(worst, -1, indptr, neighbours, weight, part, affinity, room)
    while True:
        best, best_part = -1, -1
        for v in range(views):
            if part[v] >= 0:
                continue
            for p in range(parts):
                if room[p] > 0 and (best < 0 or affinity[v, p] > affinity[best, best_part]):
                    best, best_part = v, p
        if best < 0:
            break
        _move(best, best_part, indptr, neighbours, weight, part, affinity, room)
