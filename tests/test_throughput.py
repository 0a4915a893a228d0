"""Throughput mode: delayed reads are bounded and counted (E5), nothing is lost, and without them it equals quality."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import quick_ranks
import torch
from broken_rules import FIRST_VISITS, NEVER, TWICE
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_toy import Toy, replace, run_ranks, same, train

from odin_nerfstudio.runtime import mass
from odin_nerfstudio.runtime.evidence import EvidenceStore, Shares
from odin_nerfstudio.runtime.gate import OPEN, RAW, Gate, QualityPolicy
from odin_nerfstudio.runtime.staging import Phase, StepStaging
from odin_nerfstudio.runtime.store import RowTable, ViewRow
from odin_nerfstudio.runtime.throughput import DelayLimits, ThroughputPolicy
from odin_nerfstudio.runtime.transport import LocalTransport

USUAL = Toy(mode="throughput", views=16, primitives=200, steps=500, refine_every=100, reset_every=200, check=True)
SHORT = replace(USUAL, steps=60, refine_every=20, check=False, jitter=0.003, debug=False)

RUNS = {
    3: {
        "run": replace(USUAL, slow=(1, 0.006)),
        "quality": replace(SHORT, mode="quality"),
        "punctual": replace(SHORT, max_delay=0),
        "careful": replace(SHORT, max_overlap=0.0),
    },
    4: {"run": replace(USUAL, slow=(2, 0.006), max_delay=1, max_impact=1.0)},  # the bound on the whole overlap binds
}
"""By number of ranks; one rank is slowed down at random."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What the runs left behind, by number of ranks."""
    found = {ranks: tmp_path_factory.mktemp(f"ranks-{ranks}") for ranks in RUNS}
    for ranks, folder in found.items():
        outcome = run_ranks(ranks, folder, RUNS[ranks], timeout=600)
        assert outcome.codes == [0] * ranks, (outcome.errors, outcome.failures)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [3, 4])
def test_e5_reads_are_bounded_and_counted_and_nothing_is_lost(ranks: int, folders: dict[int, Path]) -> None:
    folder, toy = folders[ranks] / "run", RUNS[ranks]["run"]
    totals = json.loads((folder / "totals.json").read_text())
    seen = [json.loads((folder / f"reads.{rank}.json").read_text()) for rank in range(ranks)]
    for total, facts in zip(totals, seen):
        assert total.get("delayed_tasks", 0) == facts["late_reads"]
        assert total.get("delayed_rows", 0) == facts["late_rows"]
        assert total.get("delay.max", 0) == facts["worst_delay"]
        assert facts["structural_steps"] == 5
    assert sum(facts["late_reads"] for facts in seen) > 50
    assert max(facts["worst_delay"] for facts in seen) == toy.max_delay
    # a row of one version has the same bits on every rank that read it, late or not: no row is read half-published
    for one in seen:
        for other in seen:
            common = one["bits"].keys() & other["bits"].keys()
            assert len(common) > 10 and all(one["bits"][key] == other["bits"][key] for key in common)


def test_without_delay_or_overlap_it_equals_quality(folders: dict[int, Path]) -> None:
    quality = torch.load(folders[3] / "quality" / "end.pt")
    for name in ("punctual", "careful"):
        assert same(torch.load(folders[3] / name / "end.pt"), quality) == [], name


@pytest.mark.parametrize("rule", [TWICE, NEVER])
def test_the_checker_notices_a_contribution_that_is_applied_twice_or_never(rule: str, tmp_path: Path) -> None:
    toy = replace(USUAL, steps=12, refine_every=10)
    train(toy, LocalTransport(), tmp_path)
    with pytest.raises(AssertionError, match="step 5"):
        train(replace(toy, broken=rule), LocalTransport(), tmp_path)


def test_the_checker_notices_a_first_visit_that_is_admitted(tmp_path: Path) -> None:
    quick_ranks.start_server("quick_ranks")
    toy = replace(USUAL, steps=60, refine_every=20, slow=(1, 0.006), broken=FIRST_VISITS)
    outcome = run_ranks(3, tmp_path, {"run": toy}, start="forkserver")
    assert any("read_checker.py" in text for text in outcome.errors.values()), (outcome.errors, outcome.failures)


@dataclass(frozen=True)
class Case:
    """Steps whose contributions have come in part, a reader, and what is known of views."""

    table: RowTable
    steps: list[StepStaging]
    gate: Gate
    evidence: dict[int, np.ndarray]
    """Dense shares by view; views that are not in it are unknown. [N] float64."""


class Known:
    """Evidence from dense arrays."""

    def __init__(self, dense: dict[int, np.ndarray]) -> None:
        self.dense = dense

    def of(self, view: int) -> Shares | None:
        if view not in self.dense:
            return None
        ids = np.random.default_rng(view).permutation(np.flatnonzero(self.dense[view]))  # order does not matter
        return Shares.of(torch.from_numpy(ids), torch.from_numpy(self.dense[view][ids]))


def make_case(seed: int) -> Case:
    """Two or three incomplete steps on a small table: lanes that have sent nothing, their ids, or everything."""
    rng = np.random.default_rng(seed)
    n, lanes, count = int(rng.integers(1, 60)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    parameters = torch.nn.ParameterDict({"means": torch.nn.Parameter(torch.zeros(n, 3))})
    adam = {"means": torch.optim.Adam([parameters["means"]], lr=0.1)}
    table = RowTable("primitives", parameters, adam, ViewRow(), lambda step: {"means": 0.1})
    table.versions[:] = torch.from_numpy(rng.integers(0, count + 1, n).astype(np.int32))
    steps = []
    for step in range(count):
        staged = StepStaging(step, [step * lanes + lane for lane in range(lanes)], [table])
        for lane in staged.lanes:
            phase = Phase(int(rng.integers(0, 3)))
            lane.candidates = [torch.from_numpy((rng.random(n) < 0.5).astype(np.uint8))]
            if phase != Phase.WAITING:
                within = torch.from_numpy(np.flatnonzero(rng.random(n) < 0.4).astype(np.int32))
                lane.rest, lane.candidates = [within], None
            lane.phase = phase
            if phase == Phase.COMPLETE:
                lane.rest = []
        staged.track()
        steps.append(staged)
    ids = torch.from_numpy(np.flatnonzero(rng.random(n) < 0.7).astype(np.int32))
    reader = count * lanes
    gate = Gate(count, reader, [ids], [table], lambda: steps, lambda staged: None, lookahead=count)
    evidence = {}
    for view in range(reader + 1):
        if rng.random() < 0.8:
            shares = np.exp(rng.normal(0, 2, n)) * (rng.random(n) < 0.6)
            evidence[view] = (shares / max(shares.sum(), 1e-9)).astype(np.float32).astype(np.float64)
    return Case(table, steps, gate, evidence)


def reference(case: Case) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], float]]:
    """Per row, by the definition: its delay (0: not late) and its part of the harm; and each writer's own harm."""
    versions, n = case.table.versions.numpy(), case.table.count
    read = np.zeros(n, bool)
    read[case.gate.ids[0].numpy()] = True
    delay, by_writer = np.zeros(n, int), {}
    for staged in reversed(case.steps):
        for number, lane in enumerate(staged.lanes):
            pending = np.zeros(n, bool)
            if lane.phase == Phase.WAITING and lane.candidates is not None:
                pending = lane.candidates[0].numpy() != 0
            elif lane.phase == Phase.IDS:
                pending[lane.rest[0].numpy()] = True
            waits = read & pending & (versions <= staged.step)
            delay[waits] = case.gate.step - staged.step
            known = case.evidence.get(staged.views[number])
            by_writer[staged.step, number] = np.where(pending, 1.0 if known is None else known, 0.0)
    own = case.evidence.get(case.gate.view, np.ones(n))
    late = delay > 0
    harm = np.where(late, np.minimum(own, sum(by_writer.values())), 0.0)
    return delay, harm, {k: float(np.where(late, np.minimum(own, w), 0.0).sum()) for k, w in by_writer.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(0, 3), st.sampled_from([0.0, 0.05, 0.3, 0.8, 1e9]), st.sampled_from([0.05, 2.0])
)
def test_harm_equals_its_definition(seed: int, max_delay: int, max_overlap: float, max_impact: float) -> None:
    case = make_case(seed)
    policy = ThroughputPolicy(Known(case.evidence), DelayLimits(max_delay, max_overlap, max_impact))
    delay, harm, by_writer = reference(case)
    decision = policy.decide(case.gate)
    assert policy.decide(case.gate) == decision, "nothing is left behind in the buffers"
    with patch.object(mass, "on_cpu", return_value=False):
        twin = policy.decide(case.gate)
    assert (twin.hazard, twin.awaited, twin.rows) == (decision.hazard, decision.awaited, decision.rows)
    if decision.delayed is not None and twin.delayed is not None:
        np.testing.assert_allclose(astuple(twin.delayed), astuple(decision.delayed), rtol=1e-4, atol=1e-7)
    if not max_delay or not max_overlap:
        assert decision == QualityPolicy().decide(case.gate)
    elif not delay.any():
        assert decision == OPEN
    elif delay.max() > max_delay:
        old = (delay > max_delay).sum()
        assert decision.hazard == RAW and old <= decision.rows <= old * len(case.steps)
        assert all(case.gate.step - a.step > max_delay for a in decision.awaited)
    elif abs(harm.sum() - max_overlap) > 0.01 * max_overlap and abs(harm.max() - max_impact) > 0.01 * max_impact:
        if harm.sum() < max_overlap and harm.max() <= max_impact:
            late = decision.delayed
            assert decision.open and late is not None
            assert (late.view, late.rows, late.delay) == (case.gate.view, (delay > 0).sum(), delay.max())
            np.testing.assert_allclose([late.mass, late.peak], [harm.sum(), harm.max()], rtol=0.01)
        else:
            assert decision.hazard == RAW and decision.rows == (harm > 0).sum()
            assert {(a.step, a.lane) for a in decision.awaited} == {k for k, own in by_writer.items() if own > 0}


@pytest.fixture(params=["kernels", "twins"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numba kernels, and the torch operations that other devices use."""
    if request.param == "twins":
        monkeypatch.setattr(mass, "on_cpu", lambda tensor: False)


@pytest.mark.usefixtures("either")
def test_evidence_is_the_share_of_opacity_and_colour() -> None:
    names = {"means": 3, "opacities": 1, "features_dc": 3}
    parameters = torch.nn.ParameterDict({k: torch.nn.Parameter(torch.zeros(400, w)) for k, w in names.items()})
    adam = {k: torch.optim.Adam([p], lr=0.1) for k, p in parameters.items()}
    table = RowTable("primitives", parameters, adam, ViewRow(), lambda step: dict.fromkeys(names, 0.1))
    rng = np.random.default_rng(1)
    parts = []
    for ids in (np.arange(0, 400, 2), np.arange(1, 400, 4)):
        values = rng.normal(size=(len(ids), 7)) * np.exp(rng.normal(size=(len(ids), 1)) * 3)
        parts.append((torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(values.astype(np.float32))))
    expected = np.zeros(400)
    names_of_columns = np.repeat(table.layout(5).names, table.layout(5).widths)
    for ids, values in parts:
        expected[ids.numpy()] = np.abs(values.numpy()[:, names_of_columns != "means"]).sum(1)
    expected /= expected.sum()
    for tail in (0.0, 0.02):
        store = EvidenceStore(tail=tail, largest=1e-3)
        store.learn(table, 5, 7, parts)
        shares = store.of(7)
        assert shares is not None and store.bytes == 6 * len(shares.ids) and store.of(8) is None
        found = np.zeros(400)
        found[shares.ids.numpy()] = shares.values.double().numpy()
        kept = found > 0
        np.testing.assert_allclose(found[kept], expected[kept], rtol=0.01)
        assert expected[~kept].sum() <= tail and expected[~kept].max() < 1e-3
        assert bool(tail) == (kept.sum() < (expected > 0).sum())
        dropped, left = expected[~kept].max(), expected[kept].min()
        assert dropped <= left, "the smallest ones are dropped"


@pytest.mark.usefixtures("either")
def test_evidence_follows_surgery_and_keeps_to_its_memory() -> None:
    store = EvidenceStore(limit=6 * 8)
    store.put(0, Shares.of(torch.tensor([4, 1, 2]), torch.tensor([0.5, 0.25, 0.25])))
    store.put(1, Shares.of(torch.tensor([3]), torch.tensor([1.0])))
    # row 0 and 2 are pruned, 1 is duplicated, 3 stays, 4 is split in two and removed
    store.resize(torch.tensor([1, 3, 1, 4, 4]), 5)
    shares = store.of(0)
    assert shares is not None
    assert dict(zip(shares.ids.tolist(), shares.values.tolist())) == {0: 0.125, 2: 0.125, 3: 0.25, 4: 0.25}
    assert store.bytes == 6 * 5
    store.put(2, Shares.of(torch.arange(4), torch.full((4,), 0.25)))
    assert store.of(2) is None and store.bytes == 6 * 5, "no room: as unknown as at a first visit"
    store.put(0, Shares.of(torch.arange(2), torch.full((2,), 0.5)))
    store.put(2, Shares.of(torch.arange(4), torch.full((4,), 0.25)))
    assert store.of(2) is not None and store.bytes == 6 * 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "throughput", "max_delay": 3}, "max-delay 3 is more than --pipeline.odin.lookahead 2"),
        ({"max_overlap": -0.1}, "max-overlap -0.1 is negative"),
        ({"mode": "throughput", "max_delay": 4, "lookahead": 4}, ""),
        ({"max_delay": 3}, ""),
    ],
)
def test_limits_that_make_no_sense_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    from odin_nerfstudio.glue.job import check_delays
    from odin_nerfstudio.glue.odin_options import OdinOptions

    with pytest.raises(SystemExit, match=words) if words else nullcontext():
        check_delays(OdinOptions(**options))


def test_commands_have_the_policys_limits() -> None:
    from odin_nerfstudio.glue.odin_options import OdinOptions
    from odin_nerfstudio.tools.simulate import SimulateCommand

    limits = DelayLimits()
    for command in (OdinOptions, SimulateCommand):
        assert [getattr(command, name) for name in vars(limits)] == list(vars(limits).values())
