"""The simulator: hand-computed times, order of the modes, determinism, and recordings that come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixed_plan import Fixed
from scipy import sparse

from odin_nerfstudio.planning.rlg import Rlg
from odin_nerfstudio.runtime.patience import BLOCK
from odin_nerfstudio.runtime.recording import (
    Overheads,
    Recording,
    ViewSets,
    compress,
    load_recording,
    merge,
    save_recording,
    spatial_blocks,
)
from odin_nerfstudio.simulation.clock import Clock
from odin_nerfstudio.simulation.cluster import MODES, Outcome, Setup, compare, plan_of, simulate
from odin_nerfstudio.simulation.network import Link, Network, parse_link
from odin_nerfstudio.simulation.scene import Scene, scene_of

COLUMNS = 14
HEADER = 4 * 28


def sets_of(rows: Any) -> ViewSets:
    ids = np.array(sorted(rows), np.int32)
    mass = np.full(len(ids), 1 / max(1, len(ids)), np.float32)
    return ViewSets(ids, ids, np.ones(len(ids), np.int32), mass, len(ids))


def scene_with(sets: list[Any], seconds: list[float], rows: int = 100, **more: Any) -> Scene:
    views = len(sets)
    rlg = Rlg(sparse.csr_matrix((views, views), dtype=np.float32), np.zeros(views, bool), np.ones(views, np.int64))
    values: dict[str, Any] = {"overheads": Overheads(), "structural_every": 0, "statistics": False} | more
    return Scene(
        dict(enumerate(map(sets_of, sets))), np.ones(rows, np.int32), np.array(seconds), np.ones(1), COLUMNS,
        rlg=rlg, **values,
    )  # fmt: skip


def run(scene: Scene, table: Any, mode: Any, bandwidth: float = float("inf"), **more: Any) -> Outcome:
    ranks = more.pop("ranks", 2)
    table = np.array(table)
    setup = Setup(ranks, table.shape[1], Link("test", bandwidth, more.pop("latency", 0.0)), **more)
    return simulate(scene, Fixed(table, ranks), setup, mode)


DISJOINT = [range(0, 10), range(10, 20)]
SAME = [range(0, 10), range(0, 10)]
LONG_SHORT = [[0, 1]] * 6
"""Rank 0 always renders view 0, rank 1 view 1."""


def test_disjoint_views_wait_for_nothing_but_the_look_ahead() -> None:
    """Times 3 and 2: a barrier steps every 3 s; without conflicts a rank goes on, at most two steps ahead."""
    scene = scene_with(DISJOINT, [3.0, 2.0])
    barrier = run(scene, LONG_SHORT, "barrier")
    assert barrier.seconds == pytest.approx(18) and barrier.wait == pytest.approx((0, 5 + 1))
    quality = run(scene, LONG_SHORT, "quality")
    # ready for step 3 at 6 (step 0 is complete at 3), 4 at 8 (1: 6), 5 at 10 (2: 9); done at 12, then drains
    assert quality.seconds == pytest.approx(18) and quality.waits == {"drain": pytest.approx(6)}
    lengthy = run(scene_with(DISJOINT, [3.0, 1.0]), LONG_SHORT, "quality")
    # step 3 at 3 waits for nothing (step 0 is in); step 4 at 4 for step 1 (6); step 5 at 7 for step 2 (9); end at 10
    assert lengthy.waits == {"drain": pytest.approx(8), "lookahead": pytest.approx(2 + 2)}


def test_skew_that_changes_sides_is_hidden_without_conflicts() -> None:
    scene = scene_with([*DISJOINT, *DISJOINT], [3.0, 1.0, 1.0, 3.0])
    table = [[0, 1], [2, 3]] * 3
    assert run(scene, table, "barrier").seconds == pytest.approx(18)
    assert run(scene, table, "quality").seconds == pytest.approx(12)


def test_identical_views_make_every_mode_a_barrier() -> None:
    scene = scene_with([*SAME, *SAME], [3.0, 1.0, 1.0, 3.0])
    table = [[0, 1], [2, 3]] * 3
    times = {mode: run(scene, table, mode, bandwidth=1e3).seconds for mode in MODES}
    assert times["quality"] == times["barrier"] == times["throughput"] > 18


def test_times_with_a_link_by_hand() -> None:
    """10 rows of 14 columns and their ids, and a header, over 1 kB/s with 0.1 s latency; each task takes 1 s."""
    message = (HEADER + 10 * (4 + 4 * COLUMNS)) / 1e3
    step = 1 + message + 0.1
    barrier = run(scene_with(DISJOINT, [1.0, 1.0]), LONG_SHORT, "barrier", 1e3, latency=0.1)
    assert barrier.seconds == pytest.approx(6 * step) and barrier.wait_share == pytest.approx(1 - 1 / step)
    # hidden: messages (0.71 s) are shorter than tasks, so only the last one is waited for
    quality = run(scene_with(DISJOINT, [1.0, 1.0]), LONG_SHORT, "quality", 1e3, latency=0.1)
    # two messages: ids and no rows first, since nobody reads them next; 10 ids, 10 rows, two headers
    assert quality.seconds == pytest.approx(6 + message + 0.1)
    assert barrier.sent == 12 * 1e3 * message and quality.sent == barrier.sent + 10 * HEADER


def test_only_rows_that_are_read_next_are_awaited() -> None:
    """Views share 1 row of 10: message 1 brings it with the ids, and message 2 is not awaited."""
    scene = scene_with([range(0, 10), range(9, 19)], [1.0, 1.0])
    first = (HEADER + 10 * 4 + 4 * COLUMNS) / 1e3
    second = (HEADER + 9 * 4 * COLUMNS) / 1e3
    quality = run(scene, [[0, 1]] * 2, "quality", 1e3)
    # the last step's contribution comes in one message
    assert quality.seconds == pytest.approx(2 + first + max(0, second - 1) + (HEADER + 10 * 60) / 1e3)


def test_throughput_reads_late_what_matters_little() -> None:
    """A row that both views see carries 1 % of either's gradient: quality waits for it, throughput does not."""
    sets = [range(0, 100), range(99, 199)]
    scene = scene_with([*sets, *sets], [3.0, 1.0, 1.0, 3.0], rows=199)
    table = [[0, 1], [2, 3]] * 3
    outcomes = {mode: run(scene, table, mode) for mode in MODES}
    assert outcomes["barrier"].seconds == outcomes["quality"].seconds == pytest.approx(18)
    assert outcomes["throughput"].seconds == pytest.approx(12) and outcomes["throughput"].delayed >= 3
    assert outcomes["quality"].delayed == 0


def test_structural_steps_synchronize() -> None:
    scene = scene_with(
        [*DISJOINT, *DISJOINT], [3.0, 1.0, 1.0, 3.0], overheads=Overheads(structural=0.5), structural_every=1
    )
    outcome = run(scene, [[0, 1], [2, 3]] * 3, "quality")
    assert outcome.seconds == pytest.approx(6 * 3.5) and outcome.waits == {"structural": pytest.approx(12)}


def test_overheads_and_speed() -> None:
    """One rank: every step takes its compute time and all overheads, and all of it scales."""
    costs = Overheads(mark=0.1, acquire=0.2, contribute=0.3, publish=0.4)
    scene = scene_with([range(10)], [1.0], overheads=costs)
    assert run(scene, [[0]] * 4, "barrier", ranks=1).seconds == pytest.approx(8)
    assert run(scene.faster(4), [[0]] * 4, "quality", ranks=1).seconds == pytest.approx(2)
    slow = Overheads(react=0.25)  # at every wait, and that for the last contribution
    one_waits = run(scene_with(DISJOINT, [1.0, 0.5], overheads=slow), LONG_SHORT, "barrier")
    both_wait = run(scene_with(DISJOINT, [1.0, 1.0], overheads=slow), LONG_SHORT, "barrier", latency=0.1)
    assert one_waits.seconds == pytest.approx(6.25) and both_wait.seconds == pytest.approx(6 * (1 + 0.1 + 0.25))


def test_ranks_wait_for_whole_steps_where_parts_cost_more() -> None:
    """Publishing some rows costs 0.4 s, messages come 0.05 s after a task's end: once ranks have compared whole steps
    with parts (`runtime.patience`), every further step takes what it takes with a barrier."""
    scene = scene_with(DISJOINT, [1.0, 1.0], overheads=Overheads(sweep=0.4, publish=0.01))

    def seconds(mode: Any, steps: int, **more: Any) -> Outcome:
        return run(scene, [[0, 1]] * steps, mode, latency=0.05, **more)

    compared = 2 * BLOCK
    eager = seconds("quality", compared + 20, linger=False)
    patient = seconds("quality", compared + 20)
    assert "linger" not in eager.waits and patient.waits["linger"] == pytest.approx(2 * (BLOCK + 20) * 0.05, rel=0.2)
    assert patient.seconds < eager.seconds - 20 * 0.3
    a_step = patient.seconds - seconds("quality", compared + 19).seconds
    assert a_step == pytest.approx(seconds("barrier", 20).seconds - seconds("barrier", 19).seconds)


def test_a_mode_is_compared_as_it_runs_once_it_knows_what_parts_cost() -> None:
    """A short simulation is no place for finding that out: what would be slower than a barrier is one."""
    scene = scene_with(DISJOINT, [1.0, 1.0], overheads=Overheads(sweep=0.4, publish=0.01))
    setup = Setup(ranks=2, link=Link("far", 1e9, 0.05), epochs=1e-9, least_steps=20)
    barrier, patient = compare(scene, setup, ["quality"], ["rlg"])
    eager = compare(scene, replace(setup, linger=False), ["quality"], ["rlg"])[1]
    assert patient.seconds == pytest.approx(barrier.seconds) and eager.seconds > barrier.seconds + 20 * 0.2


def random_scene(seed: int, views: int = 12, rows: int = 300) -> Scene:
    """Views that see windows of a strip, each with a few rows from anywhere."""
    drawn = np.random.default_rng(seed)
    starts = drawn.integers(0, rows - 60, views)
    sets = [{*range(s, s + 60), *drawn.integers(0, rows, 2).tolist()} for s in starts]
    member = np.zeros((views, rows), np.float32)
    for v, one in enumerate(sets):
        member[v, list(one)] = 1
    shared = member @ member.T / member.sum(1)
    np.fill_diagonal(shared, 0)
    scene = scene_with(list(sets), (0.5 + drawn.random(views)).tolist(), rows)
    scene.rlg = Rlg(sparse.csr_matrix(shared.astype(np.float32)), np.zeros(views, bool), np.full(views, 60))
    return scene


@pytest.mark.parametrize("reduce", ["never", "always"])
def test_modes_are_ordered_and_runs_repeat(reduce: Any) -> None:
    """Seconds of throughput <= quality <= barrier, within what another order of arrivals makes; equal on repetition."""
    for seed in range(3):
        scene = random_scene(seed)
        setup = Setup(ranks=3, link=Link("slow", 2e5, 1e-3), epochs=4, seed=seed, skew=0.2, reduce=reduce)
        outcomes = compare(scene, setup)
        for rlg in (outcomes[:3], outcomes[3:]):
            times = [o.seconds for o in rlg]
            assert [o.mode for o in rlg] == list(MODES) and {o.tasks for o in rlg} == {90}
            assert times[1] <= times[0] * 1.001 and times[2] <= times[1] * 1.01
        again = simulate(scene, plan_of(scene, setup, "rlg"), replace(setup, linger=False), "throughput", "rlg")
        assert again == outcomes[2]


def test_look_ahead_bounds_a_rank_without_tasks() -> None:
    table = [[0, 1], [0, -1], [0, -1], [0, -1], [0, 1]]
    outcome = run(scene_with(DISJOINT, [2.0, 1.0]), table, "quality")
    assert outcome.tasks == 7 and outcome.seconds == pytest.approx(10)


def test_network_shares_cards_and_keeps_order() -> None:
    """100 bytes/s: two messages that leave one card get half each; two to one peer go one after the other."""
    clock = Clock()
    seen: list[tuple[float, int, int, str]] = []
    network = Network(clock, 3, Link("test", 100.0, 0.5), lambda a, b, m: seen.append((round(clock.now, 9), a, b, m)))
    network.send(0, 1, 100, "first")
    network.send(0, 1, 50, "second")
    network.send(0, 2, 50, "other")
    network.send(2, 1, 10, "crowd")
    clock.run()
    # 0->1 and 0->2 at 50 (2->1 also, into card 1): crowd done at 0.2; other at 1.0; first has 50 left then, at 100
    assert seen == [(0.7, 2, 1, "crowd"), (1.5, 0, 2, "other"), (2.0, 0, 1, "first"), (2.5, 0, 1, "second")]


def test_a_shaped_link_lets_a_burst_through_when_it_was_idle() -> None:
    """100 bytes/s and a bucket of 60: full at first, empty after a message, full again after 0.6 s of rest."""
    clock = Clock()
    seen: list[float] = []
    network = Network(clock, 2, Link("shaped", 100.0, 0.0, 60.0), lambda a, b, m: seen.append(round(clock.now, 9)))
    for time in (0.0, 0.1, 2.0):
        clock.at(time, lambda: network.send(0, 1, 100, "message"))
    clock.run()
    assert seen == [0.4, 1.4, 2.4]


def test_links_by_name_and_by_figures() -> None:
    assert parse_link("nvlink").bandwidth == 300e9
    assert parse_link("800Mbit/s") == Link("800Mbit/s", 1e8, 0.0)
    assert parse_link("25GB/s,2ms") == Link("25GB/s,2ms", 25e9, 2e-3)
    for wrong in ("fast", "0GB/s", "1..2GB/s", "3 apples/s"):
        with pytest.raises(ValueError, match="100gbe"):
            parse_link(wrong)


def example(views: int = 4, primitives: int = 500) -> Recording:
    drawn = np.random.default_rng(1)
    sets = {}
    for view in range(views):
        candidates = np.flatnonzero(drawn.random(primitives) < 0.4).astype(np.int32)
        active = candidates[drawn.random(len(candidates)) < 0.7]
        mass = drawn.random(len(active)).astype(np.float32)
        sets[view] = ViewSets(candidates, active, np.ones(len(active), np.int32), mass / mass.sum(), len(active) + 3)
    tasks = np.array([[s, 0, s % views, 0, 9, 8, 7, 0, primitives, 1.0 + (s % views), s] for s in range(3 * views)])
    steps = np.array([[s, 0, 1, 0.1, 0.2, 0.3, 0.0, 0.0] for s in range(3 * views)])
    graph = {
        "indptr": np.array([0, 1, 1, 1, 1]), "indices": np.array([1]), "data": np.array([0.5], np.float32),
        "unknown": np.zeros(views, bool), "sizes": np.full(views, 5),
    }  # fmt: skip
    return Recording(
        primitives, np.ones(primitives, np.int32), COLUMNS, views, sets, tasks, steps, Overheads(mark=0.01), 100,
        rlg=graph, text={"mode": "quality", "how": "test", "source": "tracks"},
    )  # fmt: skip


def test_a_recording_comes_back(tmp_path: Path) -> None:
    before = example()
    save_recording(before, tmp_path / "run" / "recording.npz")
    after = load_recording(tmp_path / "run")
    for name, value in vars(before).items():
        if name not in ("sets", "rlg", "tasks", "steps", "row_sizes", "means"):
            assert getattr(after, name) == value, name
    for name in ("tasks", "steps", "row_sizes"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    assert after.sets.keys() == before.sets.keys() and after.rlg.keys() == before.rlg.keys()
    for view, sets in before.sets.items():
        for name, value in vars(sets).items():
            np.testing.assert_array_equal(getattr(after.sets[view], name), value)
    scene = scene_of(after)
    assert scene.seconds.tolist() == [1.0, 2.0, 3.0, 4.0] and set(scene.residuals) == {1.0}
    assert scene.rlg.between(np.array(0), np.array(1)) == 0.5
    (tmp_path / "other.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"other\.npz is no recording"):
        load_recording(tmp_path / "other.npz")


def test_blocks_hold_neighbours_and_keep_sums() -> None:
    before = example()
    means = np.random.default_rng(2).random((500, 3))
    after = compress(before, means, 64)
    assert after.row_sizes.tolist() == [64] * 7 + [52]
    of = spatial_blocks(means, 64)
    assert np.mean([means[of == b].std(0).prod() for b in range(7)]) < 0.3 * means.std(0).prod()
    for view, sets in after.sets.items():
        exact = before.sets[view]
        assert sets.counts.sum() == len(exact.active) and sets.mass.sum() == pytest.approx(1, abs=1e-5)
        assert set(sets.candidates) == set(of[exact.candidates]) and set(sets.active) == set(of[exact.active])
    assert compress(before, means) is before
    # conflicts of blocks are no fewer than those of primitives
    setup = Setup(ranks=2, link=parse_link("none"), least_steps=8, epochs=1, structural_every=0)
    times = [compare(scene_of(r), setup, ["quality"], ["random"])[1].seconds for r in (before, after)]
    assert times[1] >= times[0] * 0.999


def test_ranks_parts_are_joined_by_the_last_visit() -> None:
    whole = example()
    parts = []
    for rank in range(2):
        mine = whole.tasks[rank * 6 : rank * 6 + 6].copy()
        seen = set(mine[:, 2].astype(int).tolist())
        sets = {v: s for v, s in whole.sets.items() if v in seen}
        if rank == 0:
            sets = {v: ViewSets(s.candidates[:1], s.active[:1], s.counts[:1], s.mass[:1], 0) for v, s in sets.items()}
        parts.append(Recording(**{**vars(whole), "tasks": mine, "sets": sets, "rlg": {} if rank else whole.rlg}))
    joined = merge(parts)
    assert len(joined.tasks) == 12 and joined.rlg is whole.rlg
    for view in range(4):
        np.testing.assert_array_equal(joined.sets[view].active, whole.sets[view].active)


def test_what_is_missing_is_named() -> None:
    recording = example()
    del recording.sets[2]
    with pytest.raises(ValueError, match=r"1 of 4 views were not recorded \(2\).*odin-simulate record"):
        scene_of(recording)
    with pytest.raises(ValueError, match="2 ranks need"):
        Setup(ranks=2, views_per_step=1)
