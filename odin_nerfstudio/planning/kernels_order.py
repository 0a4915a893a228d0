"""Numba kernels of the ordering search: simulated annealing on integers.

Acceptance is Metropolis' rule, exp(-delta / temperature) > uniform, written as delta < temperature * E with E drawn
from a table of the exponential distribution. Sums, comparisons and random numbers are integers: the search takes the
same path on every machine. Nothing here runs in parallel.

Throughout, ``lag_weight[d]`` weighs a conflict between tasks d steps apart (entry 0: within one step), ``written[k]``
and ``read[k]`` are the weights of v -> neighbours[k] and neighbours[k] -> v for the edges k of v.
"""

from __future__ import annotations

import numba
import numpy as np

TABLE = 1024


@numba.njit(cache=True, nogil=True)
def _random(state):
    """Next 64 random bits (SplitMix64). state: (1,) uint64"""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    x = state[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def _below(state, n):
    """A random integer in [0, n), n < 2**31."""
    return np.int64(((_random(state) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@numba.njit(cache=True, nogil=True)
def _temperature(first, i, total):
    """Falls from ``first`` to 0 with the square of what is left."""
    left = ((total - i) << 10) // total
    return (first * left * left) >> 20


@numba.njit(cache=True, nogil=True)
def _lag_cost(gap, written, read, lag_weight):
    """Cost of an edge whose neighbour runs ``gap`` steps before its owner."""
    if gap > 0:
        return read * lag_weight[gap] if gap < lag_weight.shape[0] else 0
    if gap < 0:
        return written * lag_weight[-gap] if -gap < lag_weight.shape[0] else 0
    return (written + read) * lag_weight[0]


@numba.njit(cache=True, nogil=True)
def _placed_cost(v, step, rank, without, indptr, neighbours, written, read, step_of, rank_of, gap_weight):
    """Conflicts of view v with all but ``without`` if it ran in this step on this rank."""
    total = np.int64(0)
    zero = gap_weight.shape[0] // 2
    for k in range(indptr[v], indptr[v + 1]):
        u = neighbours[k]
        if u != without and rank_of[u] != rank:
            gap = step - step_of[u]
            total += read[k] * gap_weight[zero + gap] + written[k] * gap_weight[zero - gap]
    return total


@numba.njit(cache=True, nogil=True)
def _pair_change(v, u, gap, indptr, neighbours, written, read, gap_weight):
    """Change of the cost between v and u on different ranks as they change places, v going ``gap`` steps onwards."""
    zero = gap_weight.shape[0] // 2
    for k in range(indptr[v], indptr[v + 1]):
        if neighbours[k] == u:
            return (read[k] - written[k]) * (gap_weight[zero + gap] - gap_weight[zero - gap])
    return 0


@numba.njit(cache=True, nogil=True)
def _balance_change(shift, s, r, t, q, step_load, cell_load, balance):
    """Change of the cost of balance as rank r's load in step s grows by ``shift``, and rank q's in step t shrinks."""
    change = cell_load.shape[1] * 2 * shift * (cell_load[s, r] - cell_load[t, q] + shift)
    if s != t:
        change -= 2 * shift * (step_load[s] - step_load[t] + shift)
    return balance * change


@numba.njit(cache=True, nogil=True)
def anneal_slots(
    order, slot_step, slot_rank, free_ranks, rank_start, rank_slots, step_load, cell_load, load, balance,
    indptr, neighbours, written, read, step_of, rank_of, gap_weight, near, exponential, proposals, first, state,
):  # fmt: skip
    """Exchange the views of random pairs of slots. Costs are taken from the graph, without a table, so memory is small
    and ranks may change.

    order, slot_step, slot_rank: (n,) view, step and rank of each slot; order, step_of, rank_of and step_load are
        updated.
    free_ranks: Whether views may change rank; else the pairs are of one rank, whose slots are
        rank_slots[rank_start[r]:rank_start[r + 1]].
    gap_weight: Weight of a conflict by the steps from writer to reader, see :func:`ordering.gap_weights`.
    step_load, cell_load, load, balance: Load of each step (steps,), of each rank in it (steps, R), and of each view.
        A step costs balance * (R * sum over ranks of their load² - (load of the step)²), R² times their variance.
    near: (V, 2 e) extra cost of a view in one of the first (column c < e: c steps after the first) or last steps
        (column e + c: c steps before the last), or no columns.
    first: Temperature at the start; if negative, -first / 1024 times the mean change of cost.
    """
    slots = order.shape[0]
    temperature_sum = np.int64(0)
    sampled = np.int64(0)
    warmup = min(np.int64(256), proposals)
    low = slot_step[0]
    high = slot_step[slots - 1]
    edge = near.shape[1] // 2
    temperature = np.int64(0)
    i = -warmup
    while i < proposals:
        a = _below(state, slots)
        if free_ranks:
            b = _below(state, slots)
        else:
            r = slot_rank[a]
            b = rank_slots[rank_start[r] + _below(state, rank_start[r + 1] - rank_start[r])]
        i += 1
        s, t = slot_step[a], slot_step[b]
        r, q = slot_rank[a], slot_rank[b]
        if s == t and (r == q or not free_ranks):
            continue
        v, u = order[a], order[b]
        delta = (
            _placed_cost(v, t, q, u, indptr, neighbours, written, read, step_of, rank_of, gap_weight)
            + _placed_cost(u, s, r, v, indptr, neighbours, written, read, step_of, rank_of, gap_weight)
            - _placed_cost(v, s, r, u, indptr, neighbours, written, read, step_of, rank_of, gap_weight)
            - _placed_cost(u, t, q, v, indptr, neighbours, written, read, step_of, rank_of, gap_weight)
        )
        if r != q and s != t:
            delta += _pair_change(v, u, t - s, indptr, neighbours, written, read, gap_weight)
        shift = load[u] - load[v]
        if s != t or r != q:
            delta += _balance_change(shift, s - low, r, t - low, q, step_load, cell_load, balance)
        for e in range(edge):
            if s - low == e:
                delta += near[u, e] - near[v, e]
            if t - low == e:
                delta += near[v, e] - near[u, e]
            if high - s == e:
                delta += near[u, edge + e] - near[v, edge + e]
            if high - t == e:
                delta += near[v, edge + e] - near[u, edge + e]
        if i <= 0:  # measure what a change costs before cooling from a share of it
            temperature_sum += abs(delta)
            sampled += 1
            if i == 0 and first < 0:
                first = (temperature_sum * -first) // (sampled * 1024)
            continue
        temperature = _temperature(first, i, proposals)
        if delta * TABLE > temperature * exponential[_below(state, TABLE)]:
            continue
        order[a], order[b] = u, v
        step_of[v], step_of[u] = t, s
        rank_of[v], rank_of[u] = q, r
        cell_load[s - low, r] += shift
        cell_load[t - low, q] -= shift
        step_load[s - low] += shift
        step_load[t - low] -= shift


@numba.njit(cache=True, nogil=True)
def _spread_cost(profile, v, s, sign, low, rank, indptr, neighbours, written, read, rank_of, lag_weight):
    """Add (sign 1) or take away (sign -1) what view v in step s costs the views of other ranks."""
    steps = profile.shape[1]
    lags = lag_weight.shape[0]
    at = s - low
    for k in range(indptr[v], indptr[v + 1]):
        u = neighbours[k]
        if rank_of[u] == rank:
            continue
        forward, backward = sign * written[k], sign * read[k]
        if lag_weight[0] != 0:
            profile[u, at] += (forward + backward) * lag_weight[0]
        for d in range(1, lags):
            if at + d < steps:
                profile[u, at + d] += forward * lag_weight[d]
            if at - d >= 0:
                profile[u, at - d] += backward * lag_weight[d]


@numba.njit(cache=True, nogil=True)
def fill_profile(profile, low, indptr, neighbours, written, read, step_of, rank_of, lag_weight):
    """profile[v, s - low] += conflicts of view v with views of other ranks if it ran in step s. (V, steps) int64"""
    for v in range(step_of.shape[0]):
        if rank_of[v] >= 0:
            _spread_cost(profile, v, step_of[v], 1, low, rank_of[v], indptr, neighbours, written, read, rank_of,
                         lag_weight)  # fmt: skip


@numba.njit(cache=True, nogil=True)
def anneal_profile(
    order, slot_step, slot_rank, rank_start, rank_slots, step_load, cell_load, load, balance,
    indptr, neighbours, written, read, step_of, rank_of, lag_weight, profile, exponential, proposals, first, state,
):  # fmt: skip
    """As anneal_slots with fixed ranks, with the cost of every view in every step kept in ``profile``: a proposal costs
    four look-ups, since views of one rank do not conflict; only accepted ones touch the graph."""
    slots = order.shape[0]
    low = slot_step[0]
    warmup = min(np.int64(256), proposals)
    total = np.int64(0)
    i = -warmup
    while i < proposals:
        a = _below(state, slots)
        r = slot_rank[a]
        b = rank_slots[rank_start[r] + _below(state, rank_start[r + 1] - rank_start[r])]
        i += 1
        s, t = slot_step[a], slot_step[b]
        v, u = order[a], order[b]
        shift = load[u] - load[v]
        delta = (
            profile[v, t - low] - profile[v, s - low] + profile[u, s - low] - profile[u, t - low]
            + _balance_change(shift, s - low, r, t - low, r, step_load, cell_load, balance)
        )  # fmt: skip
        if s == t:
            continue
        if i <= 0:
            total += abs(delta)
            if i == 0 and first < 0:
                first = (total * -first) // (warmup * 1024)
            continue
        if delta * TABLE > _temperature(first, i, proposals) * exponential[_below(state, TABLE)]:
            continue
        _spread_cost(profile, v, s, -1, low, r, indptr, neighbours, written, read, rank_of, lag_weight)
        _spread_cost(profile, u, t, -1, low, r, indptr, neighbours, written, read, rank_of, lag_weight)
        _spread_cost(profile, v, t, 1, low, r, indptr, neighbours, written, read, rank_of, lag_weight)
        _spread_cost(profile, u, s, 1, low, r, indptr, neighbours, written, read, rank_of, lag_weight)
        order[a], order[b] = u, v
        step_of[v], step_of[u] = t, s
        cell_load[s - low, r] += shift
        cell_load[t - low, r] -= shift
        step_load[s - low] += shift
        step_load[t - low] -= shift


@numba.njit(cache=True, nogil=True)
def total_cost(indptr, neighbours, written, step_of, rank_of, gap_weight, step_load, cell_load, balance):
    """The objective: weighted conflicts between views of different ranks, and the balance of steps."""
    total = np.int64(0)
    zero = gap_weight.shape[0] // 2
    for v in range(step_of.shape[0]):
        for k in range(indptr[v], indptr[v + 1]):
            u = neighbours[k]
            if rank_of[u] != rank_of[v]:
                total += written[k] * gap_weight[zero + step_of[u] - step_of[v]]
    for s in range(step_load.shape[0]):
        total -= balance * step_load[s] * step_load[s]
        for r in range(cell_load.shape[1]):
            total += balance * cell_load.shape[1] * cell_load[s, r] * cell_load[s, r]
    return total


@numba.njit(cache=True, nogil=True)
def edge_cost(views, steps, ranks, indptr, neighbours, written, read, rank_of, first_step, lag_weight, repeat, cost):
    """Cost of each view in some steps next to another epoch whose tasks are settled.

    cost[v, c] (step first_step + c) += conflicts with the given tasks of ranks other than rank_of[v]. A view that is
    itself among the tasks pays ``repeat`` in the same step, and a whole conflict at a distance, whatever its rank.
    """
    columns = cost.shape[1]
    for i in range(views.shape[0]):
        u = views[i]
        for c in range(columns):
            gap = first_step + c - steps[i]  # how many steps the task lies before the column
            if abs(gap) >= lag_weight.shape[0]:
                continue
            cost[u, c] += repeat if gap == 0 else lag_weight[abs(gap)] * (repeat // 8 // lag_weight[1])
            for k in range(indptr[u], indptr[u + 1]):
                v = neighbours[k]
                if rank_of[v] != ranks[i]:
                    cost[v, c] += _lag_cost(-gap, written[k], read[k], lag_weight)
