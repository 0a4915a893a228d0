"""Sharded primitives with real processes: every run equals the replicated one, whatever mode and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runtime_toy import same
from sharded_toy import Run, collected, replicated, run_sharded, sharded
from sharded_toy import dataclasses as dc

from odin_nerfstudio.planning.shards import assign, divide, imbalance, parts_for
from odin_nerfstudio.runtime.row_watch import CONFLICTS
from odin_nerfstudio.runtime.sharded.numbering import SEGMENTS, Masks, new_ids
from odin_nerfstudio.runtime.sharded.owner import Owner
from odin_nerfstudio.runtime.sharded.packets import (
    GradientPacket,
    SplatPacket,
    decode_gradients,
    decode_splats,
    encode_gradients,
    encode_splats,
)
from odin_nerfstudio.runtime.sharded.staging import OwnerStaging
from odin_nerfstudio.runtime.transport import LocalTransport

USUAL = Run(primitives=300)
OTHER = Run(
    lanes=3, views=4, primitives=200, empty_view=True, scattered=True, absgrad=False, antialiased=True, steps=14
)  # fmt: skip
COPIED = Run(primitives=300, steps=16, refine_every=5, relocates=True, scattered=True)
FLAT = Run(primitives=300, steps=16, refine_every=5, surfels=True)
STOPPED = 11
"""Steps of a run that is told at step 3 to stop: owners run ahead, so it takes a while."""
RUNS = {
    1: {
        "usual-quality": USUAL,
        "usual-barrier": dc.replace(USUAL, mode="barrier"),
        "other-quality": OTHER,
        "copied-quality": COPIED,
        "flat-quality": FLAT,
    },
    2: {
        "usual-quality": dc.replace(USUAL, jitter=0.003, watch=True),
        "usual-barrier": dc.replace(USUAL, mode="barrier"),
        "other-quality": dc.replace(OTHER, jitter=0.003),
        "copied-quality": dc.replace(COPIED, jitter=0.003, watch=True),
        "flat-quality": dc.replace(FLAT, jitter=0.003, watch=True),
        "late-flat": dc.replace(FLAT, mode="throughput", jitter=0.003, max_overlap=0.8, max_impact=0.3),
        "stopped": dc.replace(USUAL, jitter=0.003, stop_at=3),
        "late": dc.replace(USUAL, mode="throughput", jitter=0.003, max_overlap=0.8, max_impact=0.3),
    },
    3: {
        "usual-quality": dc.replace(USUAL, jitter=0.003, lookahead=1, imbalance=0.02, scattered=True, watch=True),
        "other-barrier": dc.replace(OTHER, mode="barrier"),
        "copied-quality": dc.replace(COPIED, jitter=0.003, imbalance=0.02, lookahead=1),
        "flat-quality": dc.replace(FLAT, jitter=0.003, imbalance=0.02, scattered=True, local=True),
        "late": dc.replace(COPIED, mode="throughput", jitter=0.003, max_overlap=0.8, max_impact=0.3),
    },
    4: {
        "usual-quality": dc.replace(USUAL, jitter=0.003),
        "copied-barrier": dc.replace(COPIED, mode="barrier", scattered=False),
        "flat-barrier": dc.replace(FLAT, mode="barrier"),
    },
}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    barrier = {"mode": "barrier"}
    return {
        "usual": replicated(dc.replace(USUAL, **barrier), LocalTransport()),
        "other": replicated(dc.replace(OTHER, **barrier), LocalTransport()),
        "copied": replicated(dc.replace(COPIED, **barrier), LocalTransport()),
        "flat": replicated(dc.replace(FLAT, **barrier), LocalTransport()),
        "stopped": replicated(dc.replace(USUAL, steps=STOPPED, **barrier), LocalTransport()),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sharded_equals_replicated(ranks: int, tmp_path: Path, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    outcome = run_sharded(ranks, tmp_path, RUNS[ranks])
    assert outcome.codes == [0] * ranks, (outcome.errors, outcome.failures)
    for name in RUNS[ranks]:
        found = collected(tmp_path / name)
        if RUNS[ranks][name].mode == "throughput":  # at its drains every gradient has been applied exactly once
            assert bool(torch.isfinite(found["means"]).all())
        else:
            assert same(found, expected[name.split("-")[0]]) == [], name
        totals = json.loads((tmp_path / name / "totals.json").read_text())
        assert sum(t["sent"] for t in totals) == sum(t["received"] for t in totals)
        steps = STOPPED if name == "stopped" else RUNS[ranks][name].steps
        assert sum(t["tasks"] for t in totals) == steps * RUNS[ranks][name].lanes


def test_densification_happens(expected: dict[str, dict[str, torch.Tensor]]) -> None:
    assert len(expected["usual"]["means"]) != USUAL.primitives
    assert len(expected["copied"]["means"]) > COPIED.primitives
    assert len(expected["flat"]["means"]) != FLAT.primitives


def test_only_pending_rows_count_as_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a gate is closed, other rows that have not been published yet are none that the view waits for."""
    attempt, found = Owner._try, []

    def watched(owner: Owner, staged: OwnerStaging, number: int) -> None:
        owner.watch.values(CONFLICTS, owner.low)  # somebody looks
        known = len(owner.watch._refused)
        attempt(owner, staged, number)
        if len(owner.watch._refused) > known:
            ids, waits = owner._candidate_ids(staged, number).long(), owner.watch._refused[staged.step, number]
            earlier = [owner.staging(step).pending for step in range(owner.low, staged.step)]
            counts = [pending[0][ids] for pending in earlier if pending is not None]
            found.append((waits, torch.stack(counts).sum(0) > 0))

    monkeypatch.setattr(Owner, "_try", watched)
    sharded(dc.replace(USUAL, lanes=3), LocalTransport())
    assert len(found) > 5 and any(bool(waits.any()) and not bool(waits.all()) for waits, _ in found)
    assert all(torch.equal(waits, pending) for waits, pending in found)


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    outcome = run_sharded(2, tmp_path, {"run": dc.replace(USUAL, fault="kill:1:6", stall=20.0)})
    assert outcome.codes[0] == 75 and outcome.failures[0][0] == 1, (outcome.errors, outcome.failures)


def test_packets_come_back() -> None:
    g = torch.Generator().manual_seed(0)
    sent = SplatPacket(7, 2, torch.tensor([3, 8, 40], dtype=torch.int32), torch.randn(3, 11, generator=g))
    got = decode_splats(encode_splats(sent))
    assert (got.step, got.lane) == (7, 2) and torch.equal(got.ids, sent.ids) and torch.equal(got.splats, sent.splats)
    for norms in (None, torch.rand(3, generator=g)):
        rows = torch.tensor([0, 31, 69])
        back = GradientPacket(7, 2, 70, rows, torch.randn(3, 10, generator=g), norms)
        found = decode_gradients(encode_gradients(back))
        assert torch.equal(found.rows, rows) and torch.equal(found.gradients, back.gradients) and found.count == 70
        assert (found.norms is None) == (norms is None)
        assert norms is None or found.norms is None or torch.equal(found.norms, norms)
    with pytest.raises(RuntimeError, match="words"):
        decode_splats(encode_splats(sent)[:-1])


def test_new_rows_are_numbered_as_one_model_would() -> None:
    rng = np.random.default_rng(1)
    total = 300
    # (segment, parent) of the rows that survive, in gsplat's order
    alive = [(s, p) for s in range(SEGMENTS) for p in sorted(rng.choice(total, 90, replace=False))]
    owner = rng.integers(0, 3, total)
    masks, mine = Masks(SEGMENTS, total), []
    for rank in range(3):
        rows = [(s, p) for s, p in alive if owner[p] == rank]
        mine.append((torch.tensor([s for s, _ in rows]), torch.tensor([p for _, p in rows])))
        for segment in range(SEGMENTS):
            masks.set(segment, torch.tensor([p for s, p in rows if s == segment], dtype=torch.int64))
    numbers = {key: k for k, key in enumerate(alive)}
    for segments, parents in mine:
        ids, count = new_ids(masks, segments, parents)
        assert count == len(alive)
        assert ids.tolist() == [numbers[(s, p)] for s, p in zip(segments.tolist(), parents.tolist())]
        assert ids.tolist() == sorted(ids.tolist())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 64])
def test_shards_are_balanced_and_compact(ranks: int) -> None:
    points = np.random.default_rng(0).normal(size=(6400, 3)) * [30, 10, 1]
    tree = divide(points, ranks)
    owner = tree.owner(points)
    counts = np.bincount(owner, minlength=ranks)
    assert len(counts) == ranks and imbalance(counts.tolist()) < 0.02
    if ranks == 2:  # cut across the longest side
        assert points[owner == 0, 0].max() <= points[owner == 1, 0].min()
    swapped = tree.for_ranks(np.arange(ranks)[::-1])
    assert np.array_equal(swapped.owner(points), ranks - 1 - owner)


def test_parts_go_where_they_are_seen() -> None:
    assert assign(np.array([[1.0, 5.0], [4.0, 3.0]])).tolist() == [1, 0]
    several = np.array([[9.0, 0.0], [0.0, 1.0], [8.0, 7.0], [8.0, 6.0]])  # two parts for each rank, not three for one
    assert assign(several).tolist() == [0, 1, 1, 0]
    assert [parts_for(*given) for given in ((4, 1000, False), (4, 1000, True), (4, 9, True), (1, 9, True))] == [
        4,
        32,
        8,
        1,
    ]
    with pytest.raises(ValueError, match="cannot be divided"):
        divide(np.zeros((1, 3)), 2)
