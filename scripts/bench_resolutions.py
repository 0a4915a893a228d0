"""Trains methods on the sample object at one resolution and evaluates held-out views at others (docs/methods.md).

    python scripts/bench_resolutions.py FOLDER [--steps 700] [--methods odin-splatfacto odin-splatfacto-aa ...]

Writes the sample object into FOLDER at each resolution, unless it is there. Intervals of the schedule are shortened in
proportion to the number of steps, and thresholds are chosen for so few and small images: the figures compare methods.
``METHOD:OPTION=VALUE`` sets an option of the model, as in ``odin-splatfacto-aa:smooth_3d=True``.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro


@dataclass
class Options:
    """What to train."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Where the captures are or will be."""
    steps: int = 700
    """Training steps of one view."""
    methods: list[str] = field(
        default_factory=lambda: ["odin-splatfacto", "odin-splatfacto-mcmc", "odin-splatfacto-aa"]
    )
    """Methods, perhaps with options."""
    size: str = "192x144"
    """Resolution to train at."""
    sizes: list[str] = field(default_factory=lambda: ["96x72", "192x144", "384x288"])
    """Resolutions to evaluate at."""
    views: int = 60
    """Images of the capture."""


def capture(options: Options, size: str) -> Path:
    """The sample object at a resolution; cameras and scene are the same at all."""
    folder = options.folder / f"object_{size}"
    if not folder.exists():
        command = [Path(sys.executable).parent / "odin-sample", "object", "--output", folder]
        subprocess.run([*command, "--views", str(options.views), "--size", size], check=True)
    return folder


def make_config(method: str, data: Path, steps: int, outputs: Path) -> Any:
    """splatfacto's schedule in so few steps, from full resolution on."""
    from nerfstudio.configs.method_configs import all_methods

    name, _, settings = method.partition(":")
    config: Any = copy.deepcopy(all_methods[name])
    model = config.pipeline.model
    mcmc = hasattr(model, "max_gs_num")
    model.num_downscales, model.warmup_length, model.refine_every = 0, steps // 8, max(steps // 40, 1)
    model.reset_alpha_every, model.sh_degree_interval = 15, steps // 8
    model.stop_split_at = int(steps * (0.85 if mcmc else 0.6))
    model.densify_grad_thresh, model.cull_alpha_thresh = 0.004, 0.005 if mcmc else 0.02
    for setting in filter(None, settings.split(",")):
        option, _, value = setting.partition("=")
        setattr(model, option, type(getattr(model, option))(json.loads(value.lower())))
    config.optimizers["means"]["scheduler"].max_steps = steps
    config.data = config.pipeline.datamanager.data = data
    config.max_num_iterations, config.output_dir, config.vis = steps, outputs, "tensorboard"
    config.steps_per_eval_image = config.steps_per_eval_all_images = config.steps_per_save = 10**9
    config.viewer.quit_on_train_completion = True
    return config


@torch.no_grad()
def evaluate(trainer: Any, data: Path) -> tuple[float, float]:
    """Mean PSNR and SSIM over the held-out views of a capture."""
    from nerfstudio.data.datasets.base_dataset import InputDataset

    parser = copy.deepcopy(trainer.config.pipeline.datamanager.dataparser)
    parser.data = data
    views = InputDataset(parser.setup().get_dataparser_outputs("val"))
    model = trainer.pipeline.model.eval()
    psnr, ssim = 0.0, 0.0
    for index in range(len(views)):
        truth = views.get_image_float32(index)[..., :3]
        rendered = model.get_outputs_for_camera(views.cameras[index : index + 1])["rgb"].cpu()
        psnr += float(-10 * torch.log10(torch.nn.functional.mse_loss(rendered, truth)))
        ssim += float(model.ssim(*(image.permute(2, 0, 1)[None] for image in (truth, rendered))))
    return round(psnr / len(views), 2), round(ssim / len(views), 3)


def train(method: str, options: Options, captures: dict[str, Path]) -> str:
    """Trains one method and returns its row."""
    from odin_nerfstudio.glue.global_random import seed_everything

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as outputs:  # the writer may still write
        config = make_config(method, captures[options.size], options.steps, Path(outputs))
        config.set_timestamp()
        seed_everything(config.machine.seed)
        trainer = config.setup(local_rank=0, world_size=1)
        trainer.setup()
        trainer.train()
        figures = [f"{size} {evaluate(trainer, captures[size])}" for size in options.sizes]
        return f"RESULT {method}: {trainer.pipeline.splats.num_points} primitives, {', '.join(figures)}"


def main(options: Options) -> None:
    """Trains every method in a process of its own, since nerfstudio's writers are global, and prints a row for each."""
    captures = {size: capture(options, size) for size in [options.size, *options.sizes]}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for method in options.methods:
            print(processes.submit(train, method, options, captures).result(), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
