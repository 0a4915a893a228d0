"""A run's own times, replayed under a barrier, against runs whose every moment is known."""

from __future__ import annotations

import numpy as np
import pytest

from odin_nerfstudio.runtime.barrier_estimate import BarrierEstimate, estimate, pack_timeline
from odin_nerfstudio.runtime.telemetry import Telemetry

STEPS, KEPT, PUBLICATION, TRANSFER = 40, 25, 0.002, 0.01


class Run:
    """Two ranks with known work, with a barrier or without any wait, on a virtual clock that starts at 100 s."""

    def __init__(self, barrier: bool, paused_at: int = -1, second_clock: float = 0.0, reaction: float = 0.0) -> None:
        self.work = np.random.default_rng(4).exponential(0.1, (STEPS, 2))
        self.ranks = [Telemetry(rank) for rank in range(2)]
        for rank, shift in enumerate((0.0, second_clock)):
            self.ranks[rank].epoch = shift
        at, free, complete = [100.0, 100.0], [0.0, 0.0], [0.0, 0.0]
        for telemetry in self.ranks:
            telemetry.timeline.begin(100.0)
        self.waited = 0.0
        for step in range(STEPS):
            following = list(complete)
            for rank, telemetry in enumerate(self.ranks):
                timeline = telemetry.timeline
                wait = complete[rank] + reaction - at[rank] if barrier and complete[rank] > at[rank] else 0.0
                timeline.reacted(reaction if wait or not barrier else 0.0)
                timeline.spend("wait", wait)
                self.waited += wait / 2
                pause = 5.0 if step == paused_at and rank == 0 else 0.0
                timeline.spend("paused", pause)
                timeline.whole(PUBLICATION)
                timeline.spend("publish", PUBLICATION)
                timeline.spend("gating", 0.0 if barrier else 0.001)
                timeline.spend("after", float(self.work[step, rank]))
                at[rank] += wait + pause + PUBLICATION + self.work[step, rank] + (0.0 if barrier else 0.001)
                timeline.task(step, rank, at[rank])
                free[rank] = max(at[rank], free[rank]) + TRANSFER
                self.ranks[1 - rank].timeline.arrived(step, rank, free[rank])
                following[1 - rank] = free[rank]
            complete = [max(at[rank], following[rank]) for rank in range(2)]
        self.seconds = max(*at, *complete) - 100.0

    def estimate(self) -> BarrierEstimate:
        found = estimate([pack_timeline(telemetry) for telemetry in self.ranks])
        assert found is not None
        return found


@pytest.mark.parametrize("reaction", [0.0, 0.004])
def test_barrier_run_is_its_own_estimate(reaction: float) -> None:
    run = Run(barrier=True, reaction=reaction)
    found = run.estimate()
    assert found.measured == pytest.approx(run.seconds) and found.barrier == pytest.approx(run.seconds)
    assert found.wait == pytest.approx(run.waited) and found.barrier_wait == pytest.approx(run.waited)
    assert found.hidden == pytest.approx(0.0, abs=1e-6)
    assert "Waiting at the barrier took" in found.sentence("barrier")


@pytest.mark.parametrize("shift", [0.0, 7.0])
def test_run_without_waits_tells_the_time_of_the_barrier_run(shift: float) -> None:
    """Also where the clocks of the two ranks' machines differ by seconds."""
    barrier, run = Run(barrier=True, reaction=0.004), Run(barrier=False, second_clock=shift, reaction=0.004)
    found = run.estimate()
    assert found.barrier == pytest.approx(barrier.seconds, rel=1e-3)
    assert found.barrier_wait == pytest.approx(barrier.waited, rel=0.01)
    assert found.hidden == 1.0 and found.gain == pytest.approx(barrier.seconds / run.seconds, rel=0.01)
    assert f"{found.gain:.2f} times as fast" in found.sentence("quality") and "100 %" in found.sentence("quality")


def test_pauses_count_for_neither() -> None:
    plain, paused = Run(barrier=False), Run(barrier=False, paused_at=20)
    assert paused.estimate().barrier == pytest.approx(plain.estimate().barrier, rel=0.02)


def test_latest_steps_only() -> None:
    run = Run(barrier=True)
    for telemetry in run.ranks:
        telemetry.enter("updating", STEPS - 1)
    found = estimate([pack_timeline(telemetry, latest=10) for telemetry in run.ranks])
    assert found is not None and found.steps == 11
    assert estimate([pack_timeline(Telemetry(0)), pack_timeline(Telemetry(1))]) is None


def test_long_runs_keep_their_latest_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    from odin_nerfstudio.runtime.telemetry import Timeline

    monkeypatch.setattr(Timeline, "LIMIT", KEPT)
    run = Run(barrier=True)
    timeline = run.ranks[0].timeline
    width = len(Timeline.TASK_COLUMNS)
    assert len(timeline.tasks) // width <= KEPT and timeline.tasks[-width] == STEPS - 1
    assert timeline.arrivals[0] == timeline.tasks[0]
    assert run.estimate().barrier == pytest.approx(run.estimate().measured, rel=1e-6)
