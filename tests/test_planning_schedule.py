"""What every plan must hold, and how good the searched ones are."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_toy import tracks_of

from odin_nerfstudio.planning.graph import pair_graph
from odin_nerfstudio.planning.ordering import Search
from odin_nerfstudio.planning.plan_file import load_plan, save_plan
from odin_nerfstudio.planning.prediction import predict
from odin_nerfstudio.planning.rlg import Rlg, relative_locality_graph
from odin_nerfstudio.planning.schedule import ORDERS, Plan, make_plan
from odin_nerfstudio.planning.slots import epoch_slots
from odin_nerfstudio.planning.synthetic import aerial_tracks
from odin_nerfstudio.planning.tracks import find_model, tracks_for_dataset

FEW = settings(max_examples=12, deadline=None)


def random_rlg(views: int, seed: int, density: float = 0.3) -> Rlg:
    return relative_locality_graph(tracks_of(np.random.default_rng(seed).random((views, 24)) < density))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    views, lanes = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    return make_plan(
        random_rlg(views, draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 0.1, 0.5]))),
        ranks=draw(st.integers(1, lanes)), plan_ranks=draw(st.integers(1, lanes)), views_per_step=lanes,
        seed=draw(st.integers(-5, 2**40)), order=draw(st.sampled_from(ORDERS)),
        max_delay=draw(st.integers(0, 5)), diversity=draw(st.sampled_from([0.0, 0.2, 1.0])),
    )  # fmt: skip


@FEW
@given(plans(), st.integers(0, 40))
def test_every_view_once_an_epoch_on_its_rank(plan: Plan, epoch: int) -> None:
    assert sorted(plan.epoch_order(epoch)) == list(range(plan.views))
    slots = [divmod(epoch * plan.views + i, plan.views_per_step) for i in range(plan.views)]
    assert sorted(plan.view(s, lane) for s, lane in slots) == list(range(plan.views))
    cached = [set(plan.views_of_rank(r)) for r in range(plan.ranks)]
    for step, lane in slots:
        assert plan.view(step, lane) in cached[plan.rank(step, lane)]
        assert plan.epoch_of(step, lane) == epoch


@FEW
@given(plans())
def test_lanes_are_shared_out_evenly(plan: Plan) -> None:
    lanes = [plan.lanes_of_rank(r) for r in range(plan.ranks)]
    assert sorted(np.concatenate(lanes)) == list(range(plan.views_per_step))
    assert max(map(len, lanes)) - min(map(len, lanes)) <= 1
    assert all(plan.rank(3, lane) == r for r, own in enumerate(lanes) for lane in own)


@FEW
@given(plans(), st.integers(0, 60))
def test_a_step_holds_a_view_once_if_views_suffice(plan: Plan, step: int) -> None:
    views = plan.views_of_step(step)
    np.testing.assert_array_equal(views, [plan.view(step, lane) for lane in range(plan.views_per_step)])
    if plan.views >= 4 * plan.views_per_step:
        assert len(set(views)) == len(views)


@FEW
@given(st.integers(2, 40), st.integers(2, 8), st.integers(0, 50), st.sampled_from(ORDERS))
def test_any_step_is_the_same_however_it_is_reached(views: int, lanes: int, step: int, order) -> None:
    def fresh() -> Plan:
        return make_plan(random_rlg(views, 1), ranks=2, views_per_step=lanes, seed=4, order=order)

    forward = fresh()
    table = [forward.views_of_step(s) for s in range(51)]
    np.testing.assert_array_equal(fresh().views_of_step(step), table[step])
    assert fresh().fingerprint() == forward.fingerprint()


@pytest.mark.parametrize("order", ORDERS)
def test_executing_ranks_do_not_change_the_views(order) -> None:
    rlg = random_rlg(37, 3)
    made = make_plan(rlg, ranks=4, views_per_step=4, order=order)
    for ranks in (1, 2, 3):
        other = make_plan(rlg, ranks=ranks, plan_ranks=4, views_per_step=4, order=order)
        assert other.fingerprint() == made.fingerprint() == made.for_ranks(ranks).fingerprint()
        for step in range(30):
            np.testing.assert_array_equal(other.views_of_step(step), made.views_of_step(step))
            np.testing.assert_array_equal(made.for_ranks(ranks).step(step).ranks, other.step(step).ranks)
    cached = [made.views_of_rank(r) for r in range(4)]
    if order != "random":  # nearly disjoint: only the 37 % 4 views that move between ranks are cached by all
        assert sum(map(len, cached)) == 36 + 4


def test_lanes_go_on_to_the_next_rank_and_views_stay(tmp_path: Path) -> None:
    """Over as many turns as ranks, every rank runs every lane equally often."""
    rlg = random_rlg(37, 3)
    kept, turned = (make_plan(rlg, ranks=4, views_per_step=8, turn_every=every) for every in (0, 3))
    for step in range(24):
        np.testing.assert_array_equal(kept.views_of_step(step), turned.views_of_step(step))
        expected = [(kept.rank(step, lane) + step // 3) % 4 for lane in range(8)]
        assert [turned.rank(step, lane) for lane in range(8)] == expected == turned.step(step).ranks.tolist()
    assert {sum(turned.rank(s, lane) == 1 for s in range(12)) for lane in range(8)} == {3}
    assert all(len(turned.views_of_rank(r)) == 37 for r in range(4))
    assert turned.fingerprint() != kept.fingerprint()
    save_plan(turned, tmp_path / "plan.npz")
    assert load_plan(tmp_path / "plan.npz").rank(3, 0) == turned.rank(3, 0) == 1
    with pytest.raises(ValueError, match="turn_every"):
        make_plan(rlg, ranks=4, views_per_step=8, turn_every=-1)


def test_epochs_and_seeds_differ() -> None:
    rlg = random_rlg(40, 0)
    for order in ORDERS:
        plan, other = (make_plan(rlg, ranks=4, views_per_step=4, seed=s, order=order) for s in (0, 1))
        epochs = [tuple(plan.epoch_order(e)) for e in range(20)]
        assert len(set(epochs)) >= 18 and all(a != b for a, b in pairwise(epochs))
        assert tuple(other.epoch_order(0)) != epochs[0]


def test_one_rank_shuffles() -> None:
    plan = make_plan(random_rlg(30, 0), ranks=1, views_per_step=1)
    first, second = plan.epoch_order(0), plan.epoch_order(1)
    assert abs(np.corrcoef(np.argsort(first), np.argsort(second))[0, 1]) < 0.6
    assert len(plan.views_of_rank(0)) == 30
    assert not plan.step(5).conflict.any() and (plan.step(5).window == 3).all()


def test_conflicts_by_hand() -> None:
    seen = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
    rlg = relative_locality_graph(tracks_of(seen))
    plan = make_plan(rlg, ranks=2, views_per_step=2, max_delay=1, order="random")
    full = rlg.between(np.arange(4)[:, None], np.arange(4)[None, :])
    for step in range(8):
        got = plan.step(step)
        for lane in range(2):
            weights = [full[plan.view(step - d, 1 - lane), got.views[lane]] if step >= d else 0.0 for d in (1, 2)]
            np.testing.assert_allclose(got.conflict[lane], weights)
            assert got.pending[lane] == pytest.approx(min(1.0, sum(weights)))
            assert got.window[lane] == (0 if weights[0] > 0 else 1 if weights[1] > 0 else 2)
    prediction = predict(plan, 0, 8)
    steps = [plan.step(s) for s in range(8)]
    assert prediction.conflict[0] == pytest.approx(np.mean([s.conflict[:, 0] for s in steps[1:]]))
    assert prediction.conflict[1] == pytest.approx(np.mean([s.conflict[:, 1] for s in steps[2:]]))
    assert prediction.overlap == pytest.approx(np.mean([s.window for s in steps[2:]]))


@FEW
@given(st.integers(4, 24), st.integers(2, 4), st.integers(0, 99), st.booleans())
def test_search_counts_what_it_claims(views: int, lanes: int, seed: int, free: bool) -> None:
    """The search's running sums against the objective by loops: an order may only get better at zero temperature."""
    rlg = random_rlg(views, seed)
    weights = np.array([1, 16, 4, 1], np.int64)
    search = Search.make(pair_graph(rlg), np.random.default_rng(seed).integers(1, 3000, views), weights, lanes)
    slots = epoch_slots(0, views, lanes, lanes)
    start = np.random.default_rng(seed).permutation(views)
    assert search.cost(start, slots) == by_loops(search, start, slots)
    end = search.anneal(start, slots, proposals=4000, heat=0.0, key=(seed,), free_ranks=free)
    assert sorted(end) == list(range(views))
    assert search.cost(end, slots) <= search.cost(start, slots)
    if not free:
        np.testing.assert_array_equal(rank_of_views(end, slots), rank_of_views(start, slots))
        if views <= 6:  # no exchange of two views of one rank is left that would help
            for a in range(views):
                for b in range(a):
                    if slots.rank[a] == slots.rank[b]:
                        swapped = end.copy()
                        swapped[[a, b]] = swapped[[b, a]]
                        assert search.cost(swapped, slots) >= search.cost(end, slots)


def rank_of_views(order: np.ndarray, slots) -> np.ndarray:
    out = np.empty(len(order), int)
    out[order] = slots.rank
    return out


def by_loops(search: Search, order: np.ndarray, slots) -> int:
    graph, total = search.graph, 0
    dense = np.zeros((len(order), len(order)), np.int64)
    rows = np.repeat(np.arange(len(order)), np.diff(graph.indptr))
    dense[rows, graph.neighbours] = graph.written
    for a, u in enumerate(order):
        for b, v in enumerate(order):
            gap = slots.step[b] - slots.step[a]
            if slots.rank[a] != slots.rank[b] and 0 <= gap < len(search.lag_weight):
                total += dense[u, v] * search.lag_weight[gap]
    loads = np.zeros((int(slots.step[-1]) + 1, int(slots.rank.max()) + 1))
    np.add.at(loads, (slots.step, slots.rank), search.load[order])
    deviation = loads - loads.mean(axis=1, keepdims=True)
    return round(total + search.balance * loads.shape[1] * float((deviation**2).sum()))


@pytest.mark.parametrize(
    ("name", "ranks", "most"), [("caliterra", 4, 0.5), ("caliterra", 8, 0.5), ("flowerpot", 4, 0.75)]
)
def test_order_beats_random_on_real_captures(captures: Path, name: str, ranks: int, most: float) -> None:
    model = find_model(captures / name)
    assert model is not None
    names = sorted(p.name for p in (captures / name / "images").iterdir())
    rlg = relative_locality_graph(tracks_for_dataset([n for i, n in enumerate(names) if i % 8], model))
    ours = predict(make_plan(rlg, ranks=ranks, views_per_step=ranks))
    random = [predict(make_plan(rlg, ranks=ranks, views_per_step=ranks, order="random", seed=s)) for s in range(10)]
    assert ours.conflict[0] <= most * np.mean([p.conflict[0] for p in random])
    assert ours.imbalance <= np.mean([p.imbalance for p in random])


def test_unlike_costs_are_levelled_within_steps() -> None:
    rlg = relative_locality_graph(aerial_tracks(120, points_per_view=60))
    cost = np.where(np.arange(120) % 3 == 0, 5.0, 1.0)
    ours, random = (predict(make_plan(rlg, ranks=4, views_per_step=4, cost=cost, order=o)) for o in ("rlg", "random"))
    assert ours.imbalance < 0.8 * random.imbalance


def test_plan_file_round_trip(tmp_path: Path) -> None:
    plan = make_plan(random_rlg(23, 0), ranks=2, views_per_step=4, epochs=6, seed=9)
    save_plan(plan, tmp_path / "plan.npz", epochs=2)
    again = load_plan(tmp_path / "plan.npz")
    assert again.fingerprint() == plan.fingerprint() and again.steps == plan.steps == 35
    for step in range(35):
        np.testing.assert_array_equal(again.views_of_step(step), plan.views_of_step(step))
    with pytest.raises(ValueError, match="outside the plan"):
        again.view(35, 0)
    save_plan(plan, tmp_path / "plan.json", epochs=1)
    with pytest.raises(ValueError, match="not a plan"):
        load_plan(tmp_path / "plan.json")


def test_plan_does_not_depend_on_the_process(tmp_path: Path) -> None:
    """Another process, with another hash seed and thread count, makes the same plan."""
    code = (
        "import numpy as np;"
        "from odin_nerfstudio.planning import synthetic, rlg, schedule;"
        "g = rlg.relative_locality_graph(synthetic.aerial_tracks(50, points_per_view=40));"
        "p = schedule.make_plan(g, ranks=4, views_per_step=4);"
        "print(p.fingerprint(), [int(p.view(77, l)) for l in range(4)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": str(k), "OMP_NUM_THREADS": str(k), "PATH": ""},
            capture_output=True, text=True, check=True,
        ).stdout
        for k in (1, 2)
    }  # fmt: skip
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 5}, "ranks must be between 1 and views_per_step"),
        ({"ranks": 0}, "ranks must be between"),
        ({"plan_ranks": 9}, "plan_ranks must be between"),
        ({"views_per_step": 0}, "views_per_step"),
        ({"order": "greedy"}, "order"),
        ({"max_delay": -1}, "max_delay"),
        ({"epochs": 1, "steps": 1}, "not both"),
        ({"cost": np.array([1.0, np.nan])}, "cost must hold"),
        ({"diversity": -1.0}, "diversity"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments: dict[str, Any] = {"ranks": 2, "views_per_step": 4}
        make_plan(random_rlg(6, 0), **(arguments | change))


def test_planning_imports_neither_nerfstudio_nor_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, odin_nerfstudio.planning as p;"
        "[importlib.import_module(f'{p.__name__}.{m.name}') for m in pkgutil.iter_modules(p.__path__)];"
        "assert not {'torch', 'nerfstudio', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
