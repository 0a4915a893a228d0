"""Ranks that die, stall, raise or hang: the others end and name the rank, the step and what they awaited."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_toy import Toy, run_ranks

from odin_nerfstudio.runtime.faults import EXIT_CODE, FaultLimits

SMALL = Toy(primitives=200, steps=200, lanes=3, jitter=0.002, refine_every=10**6, reset_every=10**6)


def failures_of(tmp_path: Path, toy: Toy, ranks: int = 3) -> tuple[list[int | None], dict[int, tuple[int, str]]]:
    outcome = run_ranks(ranks, tmp_path, {"run": toy})
    assert None not in outcome.codes, f"ranks still ran: {outcome.codes}"
    return outcome.codes, outcome.failures


@pytest.mark.parametrize("mode", ["barrier", "quality"])
def test_a_killed_rank_is_named(tmp_path: Path, mode: str) -> None:
    codes, failures = failures_of(tmp_path, Toy(**{**vars(SMALL), "fault": "kill:1:20", "mode": mode}))
    assert codes == [EXIT_CODE, -9, EXIT_CODE]
    for text in (failures[0], failures[2]):
        assert text[0] == 1
        assert "rank 1 died or lost its connection" in text[1]
        assert "noticed at step" in text[1]
    assert any("waiting for step" in text for _, text in failures.values())


def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    codes, failures = failures_of(tmp_path, Toy(**{**vars(SMALL), "fault": "stop:2:20", "stall": 4.0}))
    assert codes == [EXIT_CODE, EXIT_CODE, -9]  # the stopped process would have stayed behind
    assert {rank for rank, _ in failures.values()} == {2}
    assert any("has stalled" in text for _, text in failures.values())


def test_a_rank_that_raises_is_named_with_its_reason(tmp_path: Path) -> None:
    codes, failures = failures_of(tmp_path, Toy(**{**vars(SMALL), "fault": "raise:0:20"}))
    assert codes == [1, EXIT_CODE, EXIT_CODE]
    for rank in (1, 2):
        assert failures[rank][0] == 0
        assert "raised RuntimeError: the picture is broken" in failures[rank][1]


def test_a_rank_that_hangs_but_answers_is_named(tmp_path: Path) -> None:
    codes, failures = failures_of(tmp_path, Toy(**{**vars(SMALL), "fault": "hang:1:20", "stall": 4.0}))
    assert codes == [EXIT_CODE] * 3  # the hanging rank is ended by its own deadline
    assert failures[0][0] == failures[2][0] == 1
    assert any("though its process answers" in text for _, text in failures.values())


def test_a_rank_that_raises_in_set_up_is_named(tmp_path: Path) -> None:
    codes, failures = failures_of(tmp_path, Toy(**{**vars(SMALL), "fault": "setup"}))
    assert codes == [EXIT_CODE, 1, EXIT_CODE]
    assert failures[0][0] == failures[2][0] == 1
    assert "no such capture" in failures[0][1]


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="three heartbeats"):
        FaultLimits(stall=1.0, heartbeat=1.0)
