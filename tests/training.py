"""Helpers for tests that train: sample scenes and runs, in this process or as the user's commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

BIN = Path(sys.executable).parent


def command(*args: object, timeout: float = 240, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """Runs a console script of this environment, as a user would; its output is in ``stdout``."""
    result = subprocess.run(
        [str(BIN / str(args[0])), *map(str, args[1:])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    if check and result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, args))} ended with {result.returncode}:\n{result.stdout[-4000:]}")
    return result


def sample_scene(folder: Path, kind: str = "object", views: int = 16, size: str = "96x72", points: int = 600) -> Path:
    """Writes a small sample scene, if it is not there yet."""
    scene = folder / kind
    command("odin-sample", kind, "--output", scene, "--views", views, "--size", size, "--points", points)
    return scene


def small_config(scene: Path, outputs: Path, steps: int, **options: Any) -> Any:
    """A config of odin-splatfacto, or of ``method`` (name or config), that densifies and resets soon."""
    import copy

    from nerfstudio.configs.method_configs import all_methods

    method = options.pop("method", "odin-splatfacto")
    config: Any = copy.deepcopy(all_methods[method] if isinstance(method, str) else method)
    config.data = config.pipeline.datamanager.data = scene
    config.output_dir = outputs
    config.timestamp = options.pop("timestamp", "run")
    config.max_num_iterations = steps
    config.vis = "tensorboard"
    config.viewer.quit_on_train_completion = True
    config.steps_per_eval_image = config.steps_per_eval_all_images = 10**9
    config.steps_per_save = 10**9
    config.machine.device_type = "cpu"
    model = config.pipeline.model
    model.num_downscales = 1
    model.resolution_schedule = 60
    model.warmup_length = 40
    model.refine_every = 20
    model.reset_alpha_every = 6
    model.stop_split_at = 200
    model.sh_degree_interval = 50
    model.densify_grad_thresh = 0.0016
    for name, value in options.items():
        holder = config
        *parents, last = name.split("__")
        for parent in parents:
            holder = getattr(holder, parent)
        if not hasattr(holder, last):
            raise AttributeError(f"no option {name}")
        setattr(holder, last, value)
    return config


def train(config: Any) -> Any:
    """Trains in this process and returns the trainer."""
    from odin_nerfstudio.glue.global_random import seed_everything

    config.set_timestamp()
    config.save_config()
    seed_everything(config.machine.seed)
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    trainer.train()
    return trainer


def latest(folder: Path) -> dict[str, Any]:
    """The newest checkpoint below ``folder``, with torch's default, safe loader."""
    return torch.load(max(folder.rglob("step-*.ckpt")), map_location="cpu")


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Names of everything that differs, bit for bit, between two checkpoints."""
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{where}/{k} only in one" for k in a.keys() ^ b.keys()]
        return missing + [d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{where}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        return [] if equal else [f"{where}: {tuple(a.shape)} against {tuple(b.shape)}"]
    return [] if a == b else [f"{where}: {a!r} against {b!r}"]
