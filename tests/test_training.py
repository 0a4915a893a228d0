"""Training in one process: quality, exact resume, checkpoints that splatfacto can read, every command a user runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training import BIN, command, differences, latest, sample_scene, small_config, train

STEPS = 300


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_scene(tmp_path_factory.mktemp("scene"), views=24)


@pytest.fixture(scope="module")
def run(scene: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A finished run of 300 steps: the trainer and the run's folder."""
    trainer = train(small_config(scene, tmp_path_factory.mktemp("outputs"), STEPS))
    return trainer, trainer.base_dir


def test_training_densifies_and_learns_the_scene(scene: Path, run: tuple[Any, Path], tmp_path: Path) -> None:
    trainer, _ = run
    after = trainer.pipeline.get_average_eval_image_metrics()
    before = train(small_config(scene, tmp_path, 1)).pipeline.get_average_eval_image_metrics()
    print("held-out", before["psnr"], after["psnr"], before["ssim"], after["ssim"])
    assert after["psnr"] > before["psnr"] + 2.5, (before, after)
    assert after["ssim"] > before["ssim"] + 0.1, (before, after)
    assert trainer.pipeline.splats.num_points > 700, "densification adds primitives to the 600 seed points"


def test_resume_continues_bit_for_bit_across_a_densification(
    scene: Path, run: tuple[Any, Path], tmp_path: Path
) -> None:
    train(small_config(scene, tmp_path, STEPS // 2, timestamp="first"))
    folder = next(tmp_path.rglob("nerfstudio_models"))
    resumed = train(small_config(scene, tmp_path, STEPS - STEPS // 2, timestamp="second", load_dir=folder))
    straight, continued = latest(run[1]), latest(resumed.base_dir)
    assert straight["step"] == continued["step"] == STEPS - 1
    assert differences(straight, continued) == []


def test_load_checkpoint_names_a_file_and_goes_on_from_it(scene: Path, run: tuple[Any, Path], tmp_path: Path) -> None:
    file = next(run[1].rglob("step-*.ckpt"))
    resumed = train(small_config(scene, tmp_path, 5, load_checkpoint=file))
    assert latest(resumed.base_dir)["step"] == STEPS + 4


def test_checkpoint_has_splatfactos_keys_and_loads_in_splatfacto(run: tuple[Any, Path]) -> None:
    from nerfstudio.models.splatfacto import SplatfactoModel, SplatfactoModelConfig

    from odin_nerfstudio.glue.compat import without_lpips_download

    state = latest(run[1])
    assert {"step", "pipeline", "optimizers", "schedulers", "scalers"} <= set(state)
    weights = {k.removeprefix("_model."): v for k, v in state["pipeline"].items()}
    fields = ("means", "scales", "quats", "features_dc", "features_rest", "opacities")
    assert set(weights) == {"device_indicator_param"} | {f"gauss_params.{name}" for name in fields}
    trainer, _ = run
    with without_lpips_download():
        plain = SplatfactoModel(SplatfactoModelConfig(), trainer.pipeline.model.scene_box, num_train_data=1)
    plain.load_state_dict(dict(weights))
    assert torch.equal(plain.means, trainer.pipeline.splats.means)


def test_a_checkpoint_of_splatfacto_resumes_here(scene: Path, run: tuple[Any, Path], tmp_path: Path) -> None:
    import numpy as np

    state = latest(run[1])
    del state["odin"]
    state["schedulers"]["means"]["_last_lr"] = [np.float64(1e-4)]  # what nerfstudio's own trainer saves
    file = tmp_path / "step-000000299.ckpt"
    torch.save(state, file)
    resumed = train(small_config(scene, tmp_path / "outputs", 3, load_checkpoint=file))
    assert latest(resumed.base_dir)["step"] == STEPS + 2


def test_thread_counts_change_no_bit(scene: Path, run: tuple[Any, Path], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        other = train(small_config(scene, tmp_path, STEPS))
    finally:
        torch.set_num_threads(threads)
    assert differences(latest(run[1]), latest(other.base_dir)) == []


def test_optional_parts_train_and_resume(scene: Path, tmp_path: Path) -> None:
    """Camera optimizer, bilateral grid, scale regularization, antialiasing, depth, in one run that is resumed."""
    options: dict[str, Any] = {
        "pipeline__model__use_bilateral_grid": True,
        "pipeline__model__grid_shape": (4, 4, 2),
        "pipeline__model__use_scale_regularization": True,
        "pipeline__model__rasterize_mode": "antialiased",
        "pipeline__model__output_depth_during_training": True,
        "pipeline__model__camera_optimizer__mode": "SO3xR3",
    }
    whole = train(small_config(scene, tmp_path, 90, timestamp="whole", **options))
    train(small_config(scene, tmp_path, 45, timestamp="half", **options))
    folder = next((tmp_path / "object" / "odin-splatfacto" / "half").rglob("nerfstudio_models"))
    rest = train(small_config(scene, tmp_path, 45, timestamp="rest", load_dir=folder, **options))
    state = latest(whole.base_dir)
    assert float(state["pipeline"]["_model.camera_optimizer.pose_adjustment"].abs().max()) > 0
    assert differences(state, latest(rest.base_dir)) == []


@pytest.mark.parametrize("sh_degree", [0, 2])
def test_colour_models(scene: Path, tmp_path: Path, sh_degree: int) -> None:
    before, after = (
        train(
            small_config(scene, tmp_path, steps, pipeline__model__sh_degree=sh_degree)
        ).pipeline.get_average_eval_image_metrics()["psnr"]
        for steps in (1, 120)
    )
    print("held-out", before, after)
    assert after > before + 1.5


def test_random_initialization_and_white_background(scene: Path, tmp_path: Path) -> None:
    options = {"random_init": True, "num_random": 500, "random_scale": 2.0, "background_color": "white"}
    trainer = train(small_config(scene, tmp_path, 60, **{f"pipeline__model__{k}": v for k, v in options.items()}))
    assert torch.isfinite(trainer.pipeline.splats.means).all()


# The commands ---------------------------------------------------------------------------------------------------


def test_commands_from_training_to_export(scene: Path, tmp_path: Path) -> None:
    """ns-train with the colmap dataparser, ns-eval, ns-export: what a first-time user does."""
    log = command(
        *("ns-train", "odin-splatfacto", "--output-dir", tmp_path, "--timestamp", "t", "--vis", "tensorboard"),
        *("--max-num-iterations", 60, "--steps-per-eval-all-images", 50, "colmap", "--data", scene),
    ).stdout
    assert "Device: cpu" in log or "Device: cuda" in log
    folder = tmp_path / "object" / "odin-splatfacto" / "t"  # named after the data, also behind the dataparser
    assert list(folder.glob("events.out.tfevents*"))
    command("ns-eval", "--load-config", folder / "config.yml", "--output-path", tmp_path / "metrics.json")
    results = json.loads((tmp_path / "metrics.json").read_text())["results"]
    assert results["psnr"] > 12 and "nan" not in (tmp_path / "metrics.json").read_text().lower()
    command("ns-export", "gaussian-splat", "--load-config", folder / "config.yml", "--output-dir", tmp_path / "export")
    import open3d

    count = len(open3d.io.read_point_cloud(tmp_path / "export" / "splat.ply").points)
    assert count == len(latest(folder)["pipeline"]["_model.gauss_params.means"])


def test_render_commands_write_video_and_images(run: tuple[Any, Path], tmp_path: Path) -> None:
    config = run[1] / "config.yml"
    command("ns-render", "interpolate", "--load-config", config, "--output-path", tmp_path / "out.mp4",
            "--pose-source", "train", "--interpolation-steps", 1, "--frame-rate", 8)  # fmt: skip
    assert (tmp_path / "out.mp4").stat().st_size > 1000
    command("ns-render", "dataset", "--load-config", config, "--output-path", tmp_path / "renders")
    assert len(list((tmp_path / "renders").rglob("*.jpg"))) + len(list((tmp_path / "renders").rglob("*.png"))) > 0


def test_faulty_input_ends_with_one_line(tmp_path: Path) -> None:
    result = command("ns-train", "odin-splatfacto", "--data", tmp_path / "nothing", check=False)
    assert result.returncode == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1 and "nothing" in lines[0], result.stdout[-2000:]
    assert "Traceback" not in result.stdout


def test_ctrl_c_saves_the_finished_steps_and_ends_cleanly(scene: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *(BIN / "ns-train", "odin-splatfacto", "--data", scene, "--output-dir", tmp_path, "--timestamp", "t"),
            *("--vis", "tensorboard", "--steps-per-save", "20"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("step-*.ckpt")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output[-2000:]
    state = latest(tmp_path)
    steps = state["optimizers"]["means"]["state"][0]["step"]
    assert int(steps) == state["step"] + 1, "the checkpoint's step is the last one that was finished"
