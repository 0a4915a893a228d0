"""Training with sharded primitives leaves the checkpoints of replicated training, and goes on from them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox
from own_method import odin_glow
from ranks import run_on_ranks
from training import differences, sample_scene, small_config

from odin_nerfstudio.glue.panel_outputs import ShardColors
from odin_nerfstudio.glue.sharding import refusal

STEPS, MIDDLE = 36, 20
OPTIONS: dict[str, Any] = {
    "pipeline__odin__views_per_step": 2,
    "pipeline__odin__order": "local",  # sharded's default, and not replicated's
    "pipeline__model__warmup_length": 10,
    "pipeline__model__refine_every": 10,
    "pipeline__model__use_scale_regularization": True,
    "pipeline__model__rasterize_mode": "antialiased",
    "pipeline__model__output_depth_during_training": True,
    "pipeline__model__background_color": "random",
    "steps_per_save": MIDDLE,
    "save_only_latest_checkpoint": False,
}
SHARDED = {**OPTIONS, "pipeline__odin__placement": "sharded", "steps_per_eval_image": 15}
OTHERS: dict[str, dict[str, Any]] = {
    "mcmc": {
        "method": "odin-splatfacto-mcmc",
        "pipeline__model__max_gs_num": 640,
        "pipeline__model__cull_alpha_thresh": 0.095,  # some are dead after so few steps
    },
    "aa": {"method": "odin-splatfacto-aa", "pipeline__model__smooth_3d": True},
    "views": {
        "pipeline__model__camera_optimizer__mode": "SO3xR3",
        "pipeline__model__use_bilateral_grid": True,
        "pipeline__model__grid_shape": (4, 4, 2),
    },
}
"""Other methods, and what views can have of their own."""
RESUMED = ("aa", "views")
"""Those that checkpoints hold something for that odin-splatfacto's do not."""


def look(trainer: Any) -> None:
    """Renders a view again and again in a thread, as nerfstudio's viewer does; what it saw goes to a file."""
    model, camera = trainer.pipeline.model, trainer.pipeline.datamanager.train_dataset.cameras[0:1]
    seen, colors = trainer.base_dir / "pictures", ShardColors(model, trainer.viewer_state)
    half, nothing = (OrientedBox.from_params((x, 0.0, 0.0), (0.0, 0.0, 0.0), (8.0, 8.0, 8.0)) for x in (4.0, 100.0))

    def render() -> None:
        while True:
            with trainer.train_lock, torch.no_grad():
                model.eval()
                outputs = [model.get_outputs_for_camera(camera, box) for box in (half, nothing, None)]
                writers = colors._render("odin_writer", camera)
                model.train()
            rgb, (some, none, all_of_it) = outputs[-1]["rgb"], [float(o["accumulation"].mean()) for o in outputs]
            assert all_of_it > some > none == 0
            assert rgb.shape == (72, 96, 3) and bool(torch.isfinite(rgb).all())
            blue = writers[..., 2] - writers[..., 0]  # written by rank 0, by rank 1: blue, orange
            both = bool(blue.max() > 0.15 and blue.min() < -0.15)
            with seen.open("a") as file:
                file.write("c" if both else ".")
            time.sleep(0.02)

    threading.Thread(target=render, daemon=True).start()


def load(folder: Path, step: int) -> dict[str, Any]:
    state = torch.load(next(folder.rglob(f"step-{step:09d}.ckpt")), map_location="cpu")
    state["odin"].pop("generators")  # global ones, which nothing of a run depends on; evaluation draws from them
    return state


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sharded")
    scene = sample_scene(base, "city", views=12)
    others = [(scene, base / f"whole-{name}", STEPS, {**OPTIONS, **more}) for name, more in OTHERS.items()]
    run_on_ranks(1, [(scene, base / "whole", STEPS, OPTIONS), *others])
    middle = next((base / "whole").rglob(f"step-{MIDDLE:09d}.ckpt"))
    resumed = {**SHARDED, "load_checkpoint": middle, "pipeline__odin__mode": "barrier"}
    watched = {**SHARDED, "watch": look}
    others = [(scene, base / f"sharded-{name}", STEPS, {**SHARDED, **more}) for name, more in OTHERS.items()]
    for name in RESUMED:
        middle = next((base / f"whole-{name}").rglob(f"step-{MIDDLE:09d}.ckpt"))
        given = {**SHARDED, **OTHERS[name], "load_checkpoint": middle, "pipeline__odin__mode": "barrier"}
        others.append((scene, base / f"resumed-{name}", STEPS - MIDDLE - 1, given))
    whole, rest = (scene, base / "sharded", STEPS, watched), (scene, base / "resumed", STEPS - MIDDLE - 1, resumed)
    run_on_ranks(2, [whole, rest, *others])
    return base


def test_checkpoints_are_those_of_replicated_training(runs: Path) -> None:
    for step in (MIDDLE, STEPS - 1):
        assert differences(load(runs / "sharded", step), load(runs / "whole", step)) == []
    assert not list(runs.rglob("gathered.*"))


def test_a_viewer_gets_its_pictures_meanwhile(runs: Path) -> None:
    seen = next(runs.rglob("pictures")).read_text()
    assert len(seen) >= 2 and "c" in seen  # primitives in the colours of both ranks


def test_goes_on_from_a_checkpoint_of_the_other_placement(runs: Path) -> None:
    end = load(runs / "whole", STEPS - 1)
    assert differences(load(runs / "resumed", STEPS - 1), end) == []
    assert len(end["pipeline"]["_model.gauss_params.means"]) != len(
        load(runs / "whole", MIDDLE)["pipeline"]["_model.gauss_params.means"]
    )


@pytest.mark.parametrize("name", OTHERS)
def test_others_leave_the_same_checkpoints_and_go_on_from_them(runs: Path, name: str) -> None:
    whole = {step: load(runs / f"whole-{name}", step) for step in (MIDDLE, STEPS - 1)}
    for step in whole:
        assert differences(load(runs / f"sharded-{name}", step), whole[step]) == []
    if name in RESUMED:
        assert differences(load(runs / f"resumed-{name}", STEPS - 1), whole[STEPS - 1]) == []
    sizes = [len(state["pipeline"]["_model.gauss_params.means"]) for state in whole.values()]
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("method", odin_glow.config, "owners do not know"),
        ("pipeline__odin__backend", "nccl", "gloo"),
    ],
)
def test_refuses_what_it_cannot_do(option: str, value: object, words: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, tmp_path, 1, pipeline__odin__placement="sharded")
    assert refusal(config) is None
    changed = small_config(tmp_path, tmp_path, 1, pipeline__odin__placement="sharded", **{option: value})
    assert words in str(refusal(changed))
