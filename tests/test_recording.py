"""Recordings of real trainings, and the commands that use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_toy import Scene, Toy, make_engine, render_task
from training import sample_scene, small_config, train

from odin_nerfstudio.glue.record_views import record_checkpoint
from odin_nerfstudio.runtime.recorder import Recorder, gradient_mass
from odin_nerfstudio.runtime.recording import Recording, load_recording
from odin_nerfstudio.runtime.transport import LocalTransport
from odin_nerfstudio.tools.plan import PlanCommand
from odin_nerfstudio.tools.simulate import SimulateCommand


def test_a_recorder_follows_surgery() -> None:
    """Sets of every view's last visit, in today's rows, as another visit of the same state would give them."""
    toy = Toy(lanes=1, steps=45)
    scene = Scene(toy)
    engine = make_engine(toy, scene, LocalTransport())
    recorder = Recorder(engine)
    messages: list[Any] = []
    take = recorder.task
    recorder.task = lambda *args: (messages.append(args[2]), take(*args))[1]  # type: ignore[method-assign]
    for step in range(toy.steps):
        for task in engine.tasks(step):
            render_task(scene, engine, task)
        engine.publish(step)
        if scene.structural(step):
            engine.structural(step, scene.surgery(step), scene.state)
    engine.drain()
    recording = recorder.part()
    assert recording.primitives == engine.tables[0].count == len(recording.row_sizes) != toy.primitives
    assert set(recording.sets) == set(range(toy.views)) and recording.structural_every == toy.refine_every
    assert len(recording.tasks) == len(recording.steps) == toy.steps and recording.overheads.mark > 0
    assert (recording.column("compute") > 0).all()
    assert (recording.column("active") <= recording.column("candidates")).all()
    for sets in recording.sets.values():
        assert sets.mass.sum() == pytest.approx(1, abs=1e-5) and (np.diff(sets.active) > 0).all()
        assert set(sets.active) <= set(sets.candidates) and sets.candidates.max() < recording.primitives
    # surgery splits and prunes, but what a view saw still lies in its window
    means = scene.parameters["means"].detach().numpy()
    for view, sets in recording.sets.items():
        assert np.abs(means[sets.active, 0] - scene.center(view)).max() < 2.5
    section, layout = messages[-1].tables[0], engine.tables[0].layout(44)
    ids, mass = gradient_mass(section, layout, ["opacities"])
    rows = np.concatenate([section.first_rows.numpy(), section.rest_rows.numpy()])
    offset = next(o for name, o, _ in layout.columns() if name == "opacities")
    size = np.abs(rows[:, offset])[np.argsort(section.ids.numpy())]
    np.testing.assert_allclose(mass.numpy(), size / size.sum(), rtol=1e-5)
    assert ids.tolist() == sorted(section.ids.tolist())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Recording]:
    """A dataset, the recording of a training on it, and the training's configuration."""
    scene = sample_scene(tmp_path_factory.mktemp("scene"), "city", views=14, points=1200)
    folder = tmp_path_factory.mktemp("outputs")
    trainer = train(small_config(scene, folder, 60, pipeline__odin__record=folder / "recorded"))
    return scene, folder / "recorded", trainer.base_dir / "config.yml", load_recording(folder / "recorded")


def test_a_training_and_its_checkpoint_are_recorded(recorded: Any, tmp_path: Path) -> None:
    """The sets of the checkpoint's views are those of the training, but for what their last visits did not yet see."""
    _, _, config, live = recorded
    again = record_checkpoint(config, tmp_path / "again", repeats=1)
    assert load_recording(tmp_path / "again").text == again.text and "checkpoint at step 59" in again.text["how"]
    assert live.views == again.views == len(live.sets) == len(again.sets) and live.primitives == again.primitives
    assert live.text["source"] == "tracks" and live.text["scene"] == "city" and live.columns == again.columns
    assert len(live.tasks) == 60 and len(again.tasks) == live.views and again.overheads.publish > 0
    overlaps, masses = [], []
    for view, sets in again.sets.items():
        other = live.sets[view]
        assert len(sets.active) <= len(sets.candidates) and sets.visible <= len(sets.candidates)
        overlaps.append(len(np.intersect1d(sets.active, other.active)) / len(sets.active))
        weight = np.zeros((2, live.primitives))
        weight[0, sets.active], weight[1, other.active] = sets.mass, other.mass
        masses.append(weight.min(0).sum())
    assert np.mean(overlaps) > 0.9 and np.mean(masses) > 0.4


@pytest.mark.parametrize(
    "method, sizes",
    [("odin-2dgs", (96, 80, 0)), ("odin-splatfacto-mcmc", (48, 40, 4))],
)
def test_every_method_can_be_simulated_sharded(
    recorded: Any, method: str, sizes: tuple[int, int, int], tmp_path: Path, capsys: Any
) -> None:
    """Its two stages are measured, and what travels is as large as its splats are."""
    trainer = train(small_config(recorded[0], tmp_path, 12, method=method))
    stages = record_checkpoint(trainer.base_dir / "config.yml", tmp_path / "recorded", repeats=1).stages
    assert stages is not None and stages.project.row > 0 and stages.back.row > 0 and 0.05 <= stages.pixels <= 1
    assert (stages.splat_bytes, stages.gradient_bytes, stages.norm_bytes) == sizes
    assert load_recording(tmp_path / "recorded").stages == stages
    SimulateCommand(trace=tmp_path / "recorded", ranks=2, link=["1Gbit/s,1ms"], placement="sharded").run()
    assert "throughput" in capsys.readouterr().out


def test_commands_simulate_a_recording(recorded: Any, tmp_path: Path, capsys: Any) -> None:
    scene, folder, _, live = recorded
    numbers = tmp_path / "simulated.json"
    SimulateCommand(
        trace=folder, ranks=4, link=["1Gbit/s,1ms"], epochs=1.5, json=numbers, plot=tmp_path / "simulated.png"
    ).run()
    text = capsys.readouterr().out
    assert "city: 4 devices" in text and "0.125 GB/s each way" in text and f"{live.primitives:,} primitives" in text
    rows = json.loads(numbers.read_text())["rows"]
    assert [(r["order"], r["mode"]) for r in rows] == [
        (order, mode) for order in ("rlg", "random") for mode in ("barrier", "quality", "throughput")
    ]
    for row in rows:
        assert 0.97 <= row["ratio_to_barrier"] <= row["ceiling"] * 1.01 and row["hidden_share"] <= 1
    assert (tmp_path / "simulated.png").stat().st_size > 10_000

    PlanCommand(scene, ranks=4, json=tmp_path / "plan.json").run()
    PlanCommand(scene, ranks=4, trace=folder, link="1Gbit/s,1ms", json=tmp_path / "traced.json").run()
    text = capsys.readouterr().out
    assert "simulated, not measured" in text and "observed points stand for primitives" in text
    plans = [json.loads((tmp_path / name).read_text())["gain"] for name in ("plan.json", "traced.json")]
    assert plans[0]["ceiling"] == pytest.approx(1.25, abs=0.02)
    for gain in plans:
        assert 0.97 <= gain["quality"] <= gain["throughput"] * 1.02 <= gain["ceiling"] * 1.03
    with pytest.raises(ValueError, match=r"--trace .* another dataset"):
        other = sample_scene(tmp_path, "city", views=8, size="32x24")
        PlanCommand(other, ranks=4, trace=folder).run()
    with pytest.raises(ValueError, match="--link needs --trace"):
        PlanCommand(scene, ranks=4, link="pcie4").run()
