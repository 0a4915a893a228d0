"""The contract (docs/runtime.md) with real processes: every run, whatever its mode and ranks, equals the plain loop.

The plain loop is one process with stock ``torch.optim.Adam``, gradients accumulated over the lanes, and gsplat's stock
strategy fed lane by lane. Equality with it for 1 to 4 ranks in both modes is E1, E2 and E3 at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runtime_toy
import torch
from runtime_toy import Toy, plain_loop, replace, run_ranks, same, snapshot

USUAL = Toy()
FEW_VIEWS = Toy(views=2, primitives=300, steps=25, empty_view=True)
IDLE = Toy(views=3, primitives=300, steps=25, empty_lanes=True, lanes=4)
TWO_LANES = Toy(lanes=2, primitives=300, steps=25)
LARGE = Toy(lanes=2, views=2, primitives=300, steps=3, wide=12000)


def both_modes(name: str, toy: Toy, jitter: float = 0.003) -> dict[str, Toy]:
    return {f"{name}-{mode}": replace(toy, mode=mode, jitter=jitter) for mode in ("barrier", "quality")}


def reduced(name: str, toy: Toy) -> dict[str, Toy]:
    """Both modes with rows summed at their owners, and one run that decides by itself."""
    modes = ("barrier", "quality")
    runs = {f"{name}-sums-{mode}": replace(toy, mode=mode, jitter=0.003, reduce="always") for mode in modes}
    return runs | {f"{name}-auto": replace(toy, jitter=0.003, reduce="auto")}


RUNS = {
    1: both_modes("usual", USUAL, 0.0) | both_modes("idle", IDLE, 0.0),
    2: both_modes("usual", USUAL)
    | both_modes("few", FEW_VIEWS)
    | both_modes("idle", IDLE)
    | both_modes("large", LARGE)
    | reduced("few", FEW_VIEWS),
    3: both_modes("usual", USUAL)
    | {"usual-linger": replace(USUAL, jitter=0.003, linger=True)}
    | {"usual-turning": replace(USUAL, jitter=0.003, turn_every=3)}
    | both_modes("two", TWO_LANES, 0.006)
    | reduced("usual", USUAL)
    | reduced("two", TWO_LANES),
    4: both_modes("usual", replace(USUAL, lookahead=1)) | both_modes("few", FEW_VIEWS) | reduced("usual", USUAL),
}
"""By number of ranks. 3 ranks do not divide 4 lanes; with 2 lanes one of them has nothing to do."""


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    toys = {"usual": USUAL, "few": FEW_VIEWS, "idle": IDLE, "two": TWO_LANES, "large": LARGE}
    return {name: snapshot(plain_loop(toy)) for name, toy in toys.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_run_equals_the_plain_loop(
    ranks: int, tmp_path: Path, expected: dict[str, dict[str, torch.Tensor]]
) -> None:
    outcome = run_ranks(ranks, tmp_path, RUNS[ranks])
    assert outcome.codes == [0] * ranks, (outcome.errors, outcome.failures)
    for name in RUNS[ranks]:
        found = torch.load(tmp_path / name / "end.pt")
        assert same(found, expected[name.split("-")[0]]) == [], name
        totals = json.loads((tmp_path / name / "totals.json").read_text())
        assert [t["rank"] for t in totals] == list(range(ranks))
        assert sum(t["sent"] for t in totals) == sum(t["received"] for t in totals)  # nothing lost, nothing twice
        tasks = sum(t["tasks"] for t in totals)
        toy = RUNS[ranks][name]
        assert tasks == toy.steps * (min(toy.lanes, toy.views) if toy.empty_lanes else toy.lanes)


def test_densification_happens(expected: dict[str, dict[str, torch.Tensor]]) -> None:
    assert len(expected["usual"]["means"]) > USUAL.primitives * 1.2


def test_resume_with_another_number_of_ranks(tmp_path: Path, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    first = run_ranks(2, tmp_path / "a", {"run": replace(USUAL, steps=23, save_at=(23,))})
    assert first.codes == [0, 0], first.errors
    again = replace(USUAL, start_from=str(tmp_path / "a" / "run" / "23.pt"))
    second = run_ranks(3, tmp_path / "b", {"run": again})
    assert second.codes == [0, 0, 0], second.errors
    assert same(torch.load(tmp_path / "b" / "run" / "end.pt"), expected["usual"]) == []


def test_announcements_take_effect_at_one_step(tmp_path: Path) -> None:
    toy = Toy(primitives=200, steps=25, jitter=0.004, announce=True, lanes=3)
    outcome = run_ranks(3, tmp_path, {"run": toy})
    assert outcome.codes == [0, 0, 0], outcome.errors
    heard = json.loads((tmp_path / "run" / "heard.json").read_text())
    assert heard[0] == heard[1] == heard[2]
    assert sorted(word for _, word in heard[0]) == ["hello-0", "hello-1", "hello-2"]


def test_toy_reads_are_complete() -> None:
    """The tests above would mean little if the toy's candidates always were everything."""
    scene = runtime_toy.Scene(USUAL)
    reads = runtime_toy.ToyReads(scene)
    out = torch.zeros(USUAL.primitives, dtype=torch.uint8)
    versions = torch.zeros(USUAL.primitives, dtype=torch.int32)
    shares = [reads.mark(1, view, versions, 0, out) / USUAL.primitives for view in range(USUAL.views)]
    assert 0 < max(shares) < 0.4
