"""Which rank a view belongs to: a balanced min-cut partition of the RLG.

A view stays with its rank over all epochs, so that a rank caches its own images only, and conflicts between views of
one rank are free. METIS finds the cut; sizes are then made exact and pairs swapped while the cut shrinks.
"""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.planning.graph import ONE, PairGraph

REFINE_LIMIT = 4000
"""Views above which the pairwise refinement, quadratic in them, is left out."""


def partition_views(graph: PairGraph, capacity: np.ndarray, load: np.ndarray, seed: int) -> np.ndarray:
    """Rank of each view.

    Args:
        graph: Edges between the views.
        capacity: Views that each rank takes, sum at most V. (R,) int64
        load: Cost of each view, integers with a mean of about 1,000. (V,) int64
        seed: Seeds METIS.

    Returns:
        Rank of each view; -1 for the V - sum(capacity) views left over. (V,) int32
    """
    ranks = len(capacity)
    part = np.full(graph.views, -1, np.int32)
    if int(capacity.sum()) == 0:
        return part
    if ranks == 1:
        # The views that are left over matter little; the last ones are as good as any.
        part[: int(capacity[0])] = 0
        return part
    from odin_nerfstudio.planning import kernels

    weight = graph.written + graph.read
    part = _metis(graph, weight, capacity, seed)
    kernels.fit_capacities(graph.indptr, graph.neighbours, weight, part, np.asarray(capacity, np.int64))
    if graph.views <= REFINE_LIMIT:
        kernels.refine_parts(graph.indptr, graph.neighbours, weight, part, ranks, load, 0, 8)
    return part


def _metis(graph: PairGraph, weight: np.ndarray, capacity: np.ndarray, seed: int) -> np.ndarray:
    import pymetis

    # METIS takes 32-bit weights, wants them positive, and sums them over the graph.
    shrink = max(1, int(weight.sum()) >> 30, ONE >> 10)
    edge_weights = np.maximum(weight // shrink, 1)
    options = pymetis.Options(seed=seed & 0x7FFFFFFF, ufactor=1, ncuts=4 if graph.views < 2000 else 1)
    _, part = pymetis.part_graph(
        len(capacity),
        xadj=graph.indptr.tolist(),
        adjncy=graph.neighbours.tolist(),
        eweights=edge_weights.tolist(),
        tpwgts=(capacity / capacity.sum()).tolist(),
        recursive=len(capacity) <= 8,
        options=options,
    )
    return np.asarray(part, dtype=np.int32)
