"""The numbers of planning.memory against real tensors, and the advice on placement that rests on them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from gsplat.strategy import DefaultStrategy
from runtime_toy import ToyPlan
from sharded_toy import Run, SplatScene, make_table
from torch import Tensor

from odin_nerfstudio.planning import memory
from odin_nerfstudio.planning.memory import Footprint, RunShape
from odin_nerfstudio.planning.placement import GROWTH, Footprints, Wish, advise
from odin_nerfstudio.planning.report import make_report
from odin_nerfstudio.planning.rlg import relative_locality_graph
from odin_nerfstudio.planning.schedule import make_plan
from odin_nerfstudio.planning.synthetic import aerial_tracks
from odin_nerfstudio.rendering.device_stages import DeviceSplats
from odin_nerfstudio.rendering.device_surfel_stages import DeviceSurfelSplats
from odin_nerfstudio.rendering.stages import Splats
from odin_nerfstudio.rendering.surfel_stages import SurfelSplats
from odin_nerfstudio.runtime.evidence import EvidenceStore
from odin_nerfstudio.runtime.messages import FRAME_WORDS, Contribution, Section, encode
from odin_nerfstudio.runtime.shadow import ShadowPool
from odin_nerfstudio.runtime.sharded import packets
from odin_nerfstudio.runtime.sharded.balance import row_tensors
from odin_nerfstudio.runtime.sharded.engine import ShardedEngine
from odin_nerfstudio.runtime.sharded.packets import GradientPacket, SplatPacket, encode_gradients, encode_splats
from odin_nerfstudio.runtime.staging import StepStaging
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.throughput import _Scratch
from odin_nerfstudio.tools.device_memory import device_memory

N, DEGREE, LANES = 3200, 1, 4


def size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def table_of(run: Run) -> tuple[SplatScene, RowTable]:
    scene = SplatScene(run)
    strategy = scene.strategy
    assert isinstance(strategy, DefaultStrategy)
    strategy.refine_scale2d_stop_iter = 1
    scene.state = strategy.initialize_state(1.0)
    table = make_table(scene)
    assert table.statistics is not None
    none = torch.empty(0)
    table.statistics.apply(N, none.int(), none, none)
    for name in table.names:
        table.adam_state(name)
    return scene, table


def test_state_is_as_large_as_its_tensors() -> None:
    run = Run(primitives=N, lanes=LANES)
    _, table = table_of(run)
    assert memory.columns(DEGREE) == sum(table.width(name) for name in table.names)
    held = size(row_tensors(table).values()) + size(table.arrays[n] for n in table.arrays.names())
    assert held == N * memory.state_bytes(RunShape(degree=DEGREE)).total
    for name in table.names:
        table.gradient(name)
    held = size(row_tensors(table).values()) + size(table.arrays[n] for n in table.arrays.names())
    assert held == N * memory.state_bytes(RunShape(degree=DEGREE, cuda=True)).total

    scene, table = table_of(run)
    engine = ShardedEngine(ToyPlan(run, 1), table, torch.arange(N, dtype=torch.int32), N, scene)
    held = size([*row_tensors(table).values(), engine.owner.ids, *(table.arrays[n] for n in table.arrays.names())])
    assert held == N * memory.state_bytes(RunShape("sharded", degree=DEGREE)).total
    without = memory.state_bytes(RunShape(degree=DEGREE, strategy="mcmc"))
    assert without.statistics == 0
    assert [memory.columns(d) for d in range(4)] == [14, 23, 38, 59]


def test_work_is_as_large_as_its_tensors() -> None:
    _, table = table_of(Run(primitives=N, lanes=LANES))
    staged = StepStaging(0, list(range(LANES)), [table])
    for lane in staged.lanes:
        lane.candidates = [torch.zeros(N, dtype=torch.uint8)]
    staged.track()
    masks = [m for lane in staged.lanes for m in lane.candidates or []]
    shape = RunShape(views_per_step=LANES, lookahead=0)
    assert size([*masks, *(staged.pending or [])]) == N * memory.tracking_bytes(shape)
    scratch = size(v for v in vars(_Scratch(table)).values())
    assert scratch == N * (memory.tracking_bytes(RunShape(throughput=True)) - memory.tracking_bytes(RunShape()))

    ids = torch.arange(0, N, 2, dtype=torch.int32)
    shadow = ShadowPool(table).take(ids, 0)
    buffers = sum(leaf.untyped_storage().nbytes() for leaf in shadow.leaves.values())
    held = buffers + size([shadow.ids]) + size(leaf[: len(ids)] for leaf in shadow.leaves.values())
    assert held == pytest.approx(len(ids) * memory.shadow_bytes(DEGREE), rel=0.05)

    n, width = len(ids), memory.columns(DEGREE)
    section = Section(ids, n, torch.ones(n, width), torch.empty(0, width), N)
    message = Contribution(0, 0, [section], (ids, torch.ones(n), torch.ones(n)))
    head = FRAME_WORDS + 12
    assert 4 * (len(encode(message, first=True, rest=True)) - head) == n * memory.contribution_bytes(DEGREE)

    kinds: tuple[tuple[memory.Splats, bool, Any], ...] = (
        ("gaussians", False, Splats),
        ("gaussians", True, DeviceSplats),
        ("surfels", False, SurfelSplats),
        ("surfels", True, DeviceSurfelSplats),
    )
    for splats, cuda, kind in kinds:
        splat, gradient = memory.splat_bytes(splats, cuda)
        words = encode_splats(SplatPacket(0, 0, ids, torch.ones(n, kind.columns)))
        assert 4 * (len(words) - FRAME_WORDS - packets._SPLAT_HEAD) == n * (memory.WORD + splat)
        norms = torch.ones(n) if kind.has_norms else None
        words = encode_gradients(GradientPacket(0, 0, n, torch.arange(n), torch.ones(n, kind.gradient_columns), norms))
        bits, head = 4 * -(-n // 32), FRAME_WORDS + packets._GRADIENT_HEAD
        assert 4 * (len(words) - head) == n * gradient + bits

    evidence = EvidenceStore(tail=0.0)
    evidence.learn(table, 0, 0, [(ids, torch.ones(n, table.layout(0).total))])
    assert evidence.bytes == n * memory.EVIDENCE
    largest = max(size([p.detach()]) for p in table.parameters.values())
    assert largest == N * memory.surgery_bytes(DEGREE)


def test_what_fits_and_what_travels() -> None:
    tracks = aerial_tracks(120, points_per_view=400)
    rlg = relative_locality_graph(tracks)
    plan = make_plan(rlg, ranks=8, views_per_step=8)
    advice = advise(tracks, plan, Wish(8e9))
    assert advice.primitives == tracks.points * GROWTH
    for placement, held in advice.memory.items():
        most = advice.most(placement)
        assert held.total(most) <= 0.8 * 8e9 < held.total(int(1.01 * most))
    assert advice.most("sharded") > 4 * advice.most("replicated")
    state = {p: m.state for p, m in advice.memory.items()}
    assert state == {"replicated": 725, "sharded": pytest.approx(729 * 1.2 / 8)}
    # an image covers 12 of about 1,200 square units
    truth = np.diff(tracks.incidence.indptr).mean() / tracks.points / 0.6
    assert truth < advice.footprint.visible < 3 * truth
    scattered = 1 - 1 / 8
    assert advice.footprint.far < 0.7 * scattered
    assert advice.placement == "sharded" and advice.link.sharded < advice.link.replicated < advice.link.dense

    local = advise(tracks, make_plan(rlg, ranks=8, views_per_step=8, order="local"), Wish(8e9))
    assert local.footprint.far < 0.7 * advice.footprint.far and local.link.sharded < 0.7 * advice.link.sharded

    few = Wish(8e9, primitives=1000)
    two = advise(tracks, make_plan(rlg, ranks=2, views_per_step=2), few)
    assert two.placement == "replicated" and "fits on one device up to" in two.advice()
    share, row = two.footprint.visible, 4 + 4 * 59 + 12
    assert two.link.replicated == pytest.approx(2 * share * row)
    large = Wish(8e9, primitives=advice.most("replicated") + 1)
    assert advise(tracks, plan, large).placement == "sharded"
    huge = advise(tracks, plan, Wish(8e9, primitives=10**9))
    assert huge.placement is None and "fit in neither" in huge.advice()
    one = advise(tracks, make_plan(rlg, ranks=1, views_per_step=1), Wish(8e9, primitives=10**9))
    assert "more --ranks" in one.advice() and one.link.replicated == 0
    with pytest.raises(ValueError, match="must be positive"):
        advise(tracks, plan, Wish(0.0))

    bytes_, source, _ = device_memory(2)
    report = make_report(tracks, ranks=2, views_per_step=2, wish=Wish(bytes_, source))
    found = json.loads(json.dumps(report.numbers()))["placement"]
    assert found["device_memory"] == bytes_ > 1e8 and found["replicated"]["state_bytes_per_primitive"] == 725
    labels = dict(report.rows())
    assert source in labels["memory per device"] and "estimated" in labels["expected gaussians"]


def test_footprints_fill_what_sfm_missed() -> None:
    found = Footprints.of(aerial_tracks(30, points_per_view=2000))
    assert found.weight.sum() == pytest.approx(1)
    sparse = Footprints.of(aerial_tracks(30, points_per_view=2000, detection=0.2))
    assert sparse.visible() == pytest.approx(found.visible(), rel=0.15)
    assert memory.rank_memory(RunShape(), Footprint(0.1, 0.0), 10).evidence == 0
