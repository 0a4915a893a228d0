"""Balanced min-cut partitions of the views: METIS finds the cut, then sizes are made exact."""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.planning.graph import ONE, PairGraph


def partition_views(graph: PairGraph, capacity: np.ndarray, seed: int) -> np.ndarray:
    """Divide the views into parts of given sizes so that views which share points tend to stay together.

    Args:
        graph: Edges between the views.
        capacity: Views that each part takes, sum at most V. (parts,) int64
        seed: Seeds METIS.

    Returns:
        Part of each view; -1 for the V - sum(capacity) views left over. (V,) int32
    """
    capacity = np.asarray(capacity, dtype=np.int64)
    part = np.full(graph.views, -1, np.int32)
    if int(capacity.sum()) == 0:
        return part
    from odin_nerfstudio.planning import kernels_partition

    weight = graph.written + graph.read
    if len(capacity) > 1:
        part = _metis(graph, weight, capacity, seed)
    kernels_partition.fit_capacities(graph.indptr, graph.neighbours, weight, part, capacity)
    return part


def _metis(graph: PairGraph, weight: np.ndarray, capacity: np.ndarray, seed: int) -> np.ndarray:
    import pymetis

    # METIS takes 32-bit weights, wants them positive, and sums them over the graph.
    shrink = max(int(weight.sum()) >> 30, ONE >> 10)
    edge_weights = np.maximum(weight // shrink, 1)
    options = pymetis.Options(seed=seed & 0x7FFFFFFF)
    filled = np.flatnonzero(capacity)
    share = capacity[filled] / capacity.sum()
    if len(filled) == 1:
        return np.full(graph.views, filled[0], np.int32)
    _, part = pymetis.part_graph(
        len(filled),
        xadj=graph.indptr.tolist(),
        adjncy=graph.neighbours.tolist(),
        eweights=edge_weights.tolist(),
        tpwgts=(share / share.sum()).tolist(),
        recursive=len(filled) <= 8,
        options=options,
    )
    return filled[np.asarray(part)].astype(np.int32)
