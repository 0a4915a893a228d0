"""Ranks that die, stall, raise or hang: the others end and name the rank, the step and what they awaited."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_toy import Toy, run_ranks
from sharded_toy import Run, run_sharded

from odin_nerfstudio.runtime.blame import who_stalls
from odin_nerfstudio.runtime.faults import EXIT_CODE, FaultLimits
from odin_nerfstudio.runtime.status import RankStatus
from odin_nerfstudio.runtime.transport import Activity, PeerReport

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


def test_with_sharded_primitives_it_is_not_one_that_waits_itself_that_is_named(tmp_path: Path) -> None:
    run = Run(primitives=300, lanes=3, fault="hang:2:6", stall=3.0)
    outcome = run_sharded(3, tmp_path, {"run": run})
    assert outcome.codes == [EXIT_CODE] * 3, outcome.errors
    for rank in (0, 1):
        culprit, text = outcome.failures[rank]
        assert culprit == 2, text
        assert "rank 2 has not contributed for 3 s, though its process answers (at its step 6, updating)" in text
        assert "noticed at step" in text and "waiting for step" in text


def test_blame_follows_those_that_wait() -> None:
    reports = {rank: PeerReport(7, Activity.TRAINING, True) for rank in range(1, 5)}
    doing = {
        1: RankStatus(1, 8, "waiting", "raw", [(7, 2), (7, 0)], 9.0),
        2: RankStatus(2, 7, "waiting", "raw", [(6, 3)], 9.0),
        3: RankStatus(3, 6, "computing", seconds=9.5),
        4: RankStatus(4, 7, "updating", seconds=0.1),
    }
    found = who_stalls(0, {1}, doing, reports, 9.0)
    assert found is not None and found[0] == 3 and "for 9 s" in found[1] and "computing" in found[1]
    assert (who_stalls(0, {1, 4}, doing, reports, 9.0) or [0])[0] == 3  # the one that has been at it for longest
    assert (who_stalls(0, (), doing, reports, 9.0) or [0])[0] == 3  # nobody in particular is awaited
    del doing[3]
    assert (who_stalls(0, {1}, doing, reports, 9.0) or [0])[0] == 3  # it does not even answer, though it is alive
    reports[3] = PeerReport(6, Activity.TRAINING, False)
    assert who_stalls(0, {1}, doing, reports, 9.0) is None  # stopped or gone: its silence will be noticed
    doing = {1: RankStatus(1, 8, "waiting", "raw", [(7, 0)], 9.0)}
    assert (who_stalls(0, {1}, doing, reports, 9.0) or [0])[0] == 1  # all wait for each other


def test_a_rank_that_raises_in_set_up_is_named(tmp_path: Path) -> None:
    codes, failures = failures_of(tmp_path, Toy(**{**vars(SMALL), "fault": "setup"}))
    assert codes == [EXIT_CODE, 1, EXIT_CODE]
    assert failures[0][0] == failures[2][0] == 1
    assert "no such capture" in failures[0][1]


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="three heartbeats"):
        FaultLimits(stall=1.0, heartbeat=1.0)
