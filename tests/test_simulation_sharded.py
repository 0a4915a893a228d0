"""The simulator with sharded primitives: hand-computed times, conservation, order of the modes, determinism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fixed_plan import Fixed
from scipy import sparse

from odin_nerfstudio.planning.rlg import Rlg
from odin_nerfstudio.runtime.recording import Overheads, ViewSets
from odin_nerfstudio.runtime.stage_costs import Linear, StageCosts
from odin_nerfstudio.simulation.clock import Clock
from odin_nerfstudio.simulation.cluster import MODES, Setup, plan_of
from odin_nerfstudio.simulation.fabric import Fabric, FabricNetwork
from odin_nerfstudio.simulation.network import Link
from odin_nerfstudio.simulation.scene import Scene
from odin_nerfstudio.simulation.sharded import ShardedOutcome, compare_sharded, simulate_sharded
from odin_nerfstudio.simulation.shards import Cut, ShardedScene

HEADER = 4 * 22
SPLAT_BYTES, GRADIENT_BYTES = 60, 30
FREE = Link("free", float("inf"), 0.0)


def scene_with(sets: list[Any], seconds: list[float], rows: int, **stages: Any) -> ShardedScene:
    """Rows along a line; views see windows of it."""
    views, known = len(sets), {}
    for view, one in enumerate(sets):
        ids = np.array(sorted(one), np.int32)
        mass = np.full(len(ids), 1 / len(ids), np.float32)
        known[view] = ViewSets(ids, ids, np.ones(len(ids), np.int32), mass, len(ids))
    member = np.zeros((views, rows), np.float32)
    for view, one in enumerate(sets):
        member[view, list(one)] = 1
    shared = member @ member.T / member.sum(1)
    np.fill_diagonal(shared, 0)
    rlg = Rlg(sparse.csr_matrix(shared), np.zeros(views, bool), member.sum(1).astype(np.int64))
    scene = Scene(known, np.ones(rows, np.int32), np.array(seconds), np.ones(1), 14, False, Overheads(), 0, rlg)
    means = np.stack([np.arange(rows), np.zeros(rows), np.zeros(rows)], 1).astype(np.float32)
    return ShardedScene(scene, means, StageCosts(**stages))


def run(sharded: ShardedScene, table: Any, mode: Any, link: Any = FREE, ranks: int = 2, **more: Any) -> ShardedOutcome:
    table = np.array(table)
    setup = Setup(ranks, table.shape[1], link, **more)
    return simulate_sharded(sharded, Fixed(table, ranks), setup, mode)


HALVES = [range(0, 40), range(60, 100)]


def test_each_rank_owns_what_its_views_see() -> None:
    sharded = scene_with(HALVES, [1.0, 1.0], 100)
    cut = Cut(sharded, Fixed([[1, 0]], 2), 2, 1)
    assert set(cut.owner[:45]) == {1} and set(cut.owner[55:]) == {0} and abs(cut.primitives() - 50).max() <= 1
    assert cut.active(0).tolist() == [0, 40] and cut.sets(0, 1).active.tolist() == list(range(40))
    assert len(cut.sets(1, 1).candidates) == 0


def test_one_rank_takes_the_sum_of_all_work() -> None:
    costs = {"project": Linear(0.1, 0.001), "back": Linear(0.2, 0.002), "merge": Linear(0.01), "split": Linear(0.02)}
    sharded = scene_with(HALVES, [1.0, 2.0], 100, pixels=0.5, **costs)
    for mode in MODES:
        outcome = run(sharded, [[0, 1]] * 4, mode, ranks=1)
        work = 4 * (1.5 + 2 * (0.1 + 0.2 + 40 * 0.003 + 0.03))
        assert outcome.seconds == pytest.approx(work) and outcome.busy == (pytest.approx(work),)
        assert outcome.sent == 0 and outcome.packets == (0, 0)


def test_far_owners_hold_nobody_up() -> None:
    """Each view lies in the shard of its rank: a barrier steps with the slower one, quality runs ahead."""
    sharded = scene_with([*HALVES, *HALVES], [3.0, 1.0, 1.0, 3.0], 100)
    table = [[0, 1], [2, 3]] * 3
    assert run(sharded, table, "barrier").seconds == pytest.approx(6 * 3)
    assert run(sharded, table, "quality").seconds == pytest.approx(3 * 4)


def test_messages_take_their_time_twice() -> None:
    """Views swapped: each rank renders what the other owns. One way there, one back, then the next step."""
    sharded = scene_with(HALVES, [1.0, 1.0], 100, splat_bytes=SPLAT_BYTES, gradient_bytes=GRADIENT_BYTES)
    plan = Fixed([[0, 1], [1, 0]], 2)
    outcome = simulate_sharded(sharded, plan, Setup(2, 2, Link("slow", 1e4, 0.5)), "barrier")
    far = 2 * (HEADER + 40 * SPLAT_BYTES + HEADER + 40 / 8 + 40 * GRADIENT_BYTES)
    assert outcome.sent == pytest.approx(far + 2 * HEADER)
    there, back, notice = (
        (HEADER + 40 * SPLAT_BYTES) / 1e4 + 0.5,
        (HEADER + 40 / 8 + 40 * GRADIENT_BYTES) / 1e4 + 0.5,
        HEADER / 1e4 + 0.5,
    )
    assert outcome.seconds == pytest.approx(notice + 1 + there + 1 + back)


def random_scene(seed: int, views: int = 16, rows: int = 400) -> ShardedScene:
    drawn = np.random.default_rng(seed)
    starts = drawn.integers(0, rows - 60, views)
    sets = [{*range(s, s + 60), *drawn.integers(0, rows, 2).tolist()} for s in starts]
    costs = {"project": Linear(0.0, 0.001), "back": Linear(0.0, 0.001), "pixels": 0.8}
    return scene_with(list(sets), (0.5 + drawn.random(views)).tolist(), rows, **costs)


def test_everything_arrives_and_modes_are_ordered() -> None:
    link = Fabric("two", Link("inside", 1e5, 1e-3), Link("between", 2e4, 1e-2), 2, shared=True)
    sharded = random_scene(0)
    setup = Setup(ranks=4, link=link, epochs=2, least_steps=8, skew=0.2)
    outcomes = compare_sharded(sharded, setup, orders=["rlg"])
    times = [o.seconds for o in outcomes]
    assert times[1] <= times[0] * 1.001 and times[2] <= times[1] * 1.02
    assert 0 < outcomes[2].delayed <= outcomes[2].tasks  # each view once, however many owners read late for it
    for outcome in outcomes:
        assert outcome.tasks == 4 * outcome.steps and outcome.packets[0] == outcome.packets[1]
        assert max(b + w for b, w in zip(outcome.busy, outcome.wait)) <= outcome.seconds * (1 + 1e-9)
    plan = plan_of(sharded.scene, setup, "rlg")
    assert simulate_sharded(sharded, plan, setup, "throughput", "rlg") == outcomes[2]


def test_in_local_order_ranks_own_what_they_see() -> None:
    sharded, setup = random_scene(0, views=64, rows=1600), Setup(ranks=4, link=FREE, epochs=1)
    rlg, local = compare_sharded(sharded, setup, ["barrier"], ["rlg", "local"])
    assert local.sent < 0.5 * rlg.sent and local.tasks == rlg.tasks


def test_structural_steps_are_fences() -> None:
    sharded = scene_with(HALVES * 2, [3.0, 1.0, 1.0, 3.0], 100)
    sharded.scene.overheads, sharded.scene.structural_every = Overheads(structural=0.5), 1
    assert run(sharded, [[0, 1], [2, 3]] * 3, "quality").seconds == pytest.approx(6 * 3.5)


def test_fabric_shares_the_card_of_a_node() -> None:
    """Two ranks of a node send 100 bytes to two ranks of another at 100 bytes/s: 2 s together, 0.1 s inside a node."""
    clock, seen = Clock(), []
    fabric = Fabric("test", Link("inside", 1e4, 0.0), Link("between", 1e3, 0.5), 2, shared=True)
    network = FabricNetwork(clock, fabric, lambda a, b, m: seen.append((round(clock.now, 9), a, b)))
    network.send(0, 2, 1000, None)
    network.send(1, 3, 1000, None)
    network.send(0, 1, 1000, None)
    network.send(0, 3, 100, None)  # small: not shared
    clock.run()
    assert seen == [(0.1, 0, 1), (0.6, 0, 3), (2.5, 0, 2), (2.5, 1, 3)]
