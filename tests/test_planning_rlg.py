"""The Relative Locality Graph against its definition, and how it must behave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_toy import tracks_of

from odin_nerfstudio.planning.rlg import Rlg, relative_locality_graph

FEW = settings(max_examples=60, deadline=None)


@st.composite
def incidences(draw: st.DrawFn) -> np.ndarray:
    views, points = draw(st.integers(1, 9)), draw(st.integers(0, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.random((views, points)) < draw(st.floats(0.0, 1.0))


def by_definition(seen: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Weights by loops; 1 where a view without points takes part, and on the diagonal."""
    views = len(seen)
    value = seen.astype(float) if importance is None else np.where(seen, importance, 0.0)
    out = np.ones((views, views))
    for u in range(views):
        for v in range(views):
            if u != v and seen[u].any() and seen[v].any():
                total = value[v].sum()
                out[u, v] = value[v][seen[u] & seen[v]].sum() / total if total else 0.0
    return out


def all_pairs(rlg: Rlg) -> np.ndarray:
    views = np.arange(rlg.views)
    return rlg.between(views[:, None], views[None, :])


@FEW
@given(incidences())
def test_weights_are_the_definition(seen: np.ndarray) -> None:
    rlg = relative_locality_graph(tracks_of(seen))
    expected = by_definition(seen)
    np.testing.assert_allclose(all_pairs(rlg), expected, atol=1e-6)
    np.testing.assert_array_equal(rlg.unknown, ~seen.any(axis=1))
    assert rlg.weights.dtype == np.float32 and (rlg.weights.data > 0).all()
    if rlg.views > 1:
        off = ~np.eye(rlg.views, dtype=bool)
        statistics = rlg.statistics()
        assert statistics["mean"] == pytest.approx(expected[off].mean(), abs=1e-6)
        assert statistics["zero_share"] == pytest.approx((expected[off] == 0).mean(), abs=1e-9)


@FEW
@given(incidences(), st.integers(0, 2**32 - 1))
def test_importance_is_the_share_of_the_reader(seen: np.ndarray, seed: int) -> None:
    weight = np.random.default_rng(seed).random(seen.shape).astype(np.float32)
    tracks = tracks_of(seen)
    rows = np.repeat(np.arange(len(seen)), np.diff(tracks.incidence.indptr))
    rlg = relative_locality_graph(tracks, importance=weight[rows, tracks.incidence.indices])
    np.testing.assert_allclose(all_pairs(rlg), by_definition(seen, weight.astype(float)), atol=1e-5)


@FEW
@given(incidences())
def test_nothing_shared_is_mutual(seen: np.ndarray) -> None:
    pairs = all_pairs(relative_locality_graph(tracks_of(seen)))
    np.testing.assert_array_equal(pairs == 0, (pairs == 0).T)


@FEW
@given(incidences(), st.data())
def test_another_shared_point_never_lowers_a_weight(seen: np.ndarray, data: st.DataObject) -> None:
    views = len(seen)
    u, v = data.draw(st.integers(0, views - 1)), data.draw(st.integers(0, views - 1))
    before = all_pairs(relative_locality_graph(tracks_of(seen)))
    point = np.zeros((views, 1), bool)
    point[[u, v]] = True
    after = all_pairs(relative_locality_graph(tracks_of(np.hstack([seen, point]))))
    assert after[u, v] >= before[u, v] - 1e-6 or not seen[[u, v]].any(axis=1).all()


def test_weights_are_directed() -> None:
    seen = np.array([[1, 1, 1, 1], [0, 0, 0, 1]], bool)  # an overview, and a close-up within it
    weights = relative_locality_graph(tracks_of(seen)).weights.toarray()
    assert (weights[0, 1], weights[1, 0]) == (1.0, 0.25)


def test_importance_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="one per observation"):
        relative_locality_graph(tracks_of(np.ones((2, 2), bool)), importance=np.ones(3))
