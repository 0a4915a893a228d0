"""Scalars of a run as nerfstudio's writers get them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nerfstudio.configs import base_config
from nerfstudio.utils import writer

from odin_nerfstudio.glue.report import DELAYED, HIDDEN, VIEWS, WAIT, StepScalars, waiting_sentence
from odin_nerfstudio.runtime.gate import DelayedRead
from odin_nerfstudio.runtime.telemetry import StepRecord

assert base_config, "imported before the writer, which it imports itself"


def engine_of(ranks: int, knows_barrier: bool) -> Any:
    return SimpleNamespace(
        transport=SimpleNamespace(world_size=ranks, rank=0),
        plan=SimpleNamespace(views_per_step=ranks),
        policy=SimpleNamespace(max_delay=2),
        board=SimpleNamespace(estimate=lambda: None, ask=lambda with_timeline: None),
        current=0,
        knows_barrier=knows_barrier,
    )


@pytest.mark.parametrize("knows_barrier", [True, False])
def test_wandb_gets_all_scalars_in_the_order_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_barrier: bool
) -> None:
    """W&B leaves out what comes with an earlier step than something before; steps are published late."""
    logged: list[tuple[int, str, float]] = []

    def log(values: dict[str, float], step: int) -> None:
        logged.extend((step, name, value) for name, value in values.items())

    monkeypatch.setitem(sys.modules, "wandb", cast(Any, SimpleNamespace(init=lambda **_: None, log=log)))
    monkeypatch.setattr(writer, "EVENT_WRITERS", [writer.WandbWriter(tmp_path, "run")])
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    engine = engine_of(2, knows_barrier)
    scalars = StepScalars(engine)
    for step in range(12):
        if step >= 3:
            late = [DelayedRead(view=0, rows=7, delay=1, mass=0.1, peak=0.1)] if step == 4 else []
            scalars(StepRecord(step - 3, wait={("raw", 1): 0.25}, tasks=1, sent=100, delayed=late))
        engine.current = step + 1
        writer.put_scalar("Train Loss", 1.0, step)
        if step % 5 == 0:
            scalars.write(step)
        writer.write_out_storage()
    steps = [step for step, _, _ in logged]
    assert steps == sorted(steps)
    found = {name: value for step, name, value in logged if step == 5}
    assert found[VIEWS] > 0 and found[WAIT] == 1.0 and found[DELAYED] == pytest.approx(1 / 3)
    assert (HIDDEN in found) == knows_barrier
    assert found["Odin wait ms/raw rank 1"] == 250 and found["Odin bytes per step/sent"] == 100
    assert found["Odin rows per step/delayed"] == pytest.approx(7 / 3)


def test_what_is_said_of_waits_where_no_barrier_is_estimated() -> None:
    totals = [{"elapsed": 10.0, "wait": 1.0}, {"elapsed": 10.0, "wait": 3.0}]
    assert "took 20 % of this run; without any wait it could be at most 1.25 times" in waiting_sentence(
        totals, "barrier"
    )
    assert "In quality mode 20 % of this run was waiting" in waiting_sentence(totals, "quality")
