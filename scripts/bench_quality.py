"""Trains odin-splatfacto on captures, evaluates held-out views, and writes the table of docs/results.md.

    python scripts/bench_quality.py FOLDER [FOLDER ...] [--steps 500 1000 2000] [--seeds 42] [--json FILE]
    python scripts/bench_quality.py FOLDER [FOLDER ...] --methods odin-splatfacto odin-2dgs ... --json FILE

A capture is a folder with ``images`` and a COLMAP model in ``sparse/0`` or ``colmap/sparse/0``. Settings are
splatfacto's, at full resolution from the first step; every eighth image is held out. Each run is a process of its
own. Times are means per step over the hundred steps before each evaluation, on whatever else the machine is doing.

With ``--methods`` it compares methods and modes on several ranks instead, and writes docs/results_methods.md; see
method_table.py for the settings. Every finished training is kept in the JSON file, and not repeated.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

REPOSITORY = Path(__file__).resolve().parents[1]
PHASES = ("data", "acquire", "render", "loss", "backward", "contribute", "publish", "structural")
MARK = "bench_quality"


@dataclass
class Options:
    """What to train and where to write."""

    folders: Annotated[list[Path], tyro.conf.Positional]
    """Captures."""
    steps: list[int] = field(default_factory=lambda: [500, 1000, 2000])
    """When to evaluate; the last one ends the run."""
    seeds: list[int] = field(default_factory=lambda: [42])
    """Seeds; each is a run."""
    json: Path | None = None
    """Write all figures here."""
    docs: Path | None = REPOSITORY / "docs"
    """Put the table between the marks of results.md, or results_methods.md, in this folder."""
    methods: list[str] = field(default_factory=list)
    """Compare these methods, in each of the modes; the options from here on are for that."""
    modes: list[str] = field(default_factory=lambda: ["barrier", "quality", "throughput"])
    """Modes."""
    ranks: int = 2
    """Ranks, each with one view of a step."""
    views: int = 1000
    """Views rendered in a training."""
    longest: int = 400
    """Images are halved until no side is longer. [pixels]"""
    model: dict[str, float] = field(default_factory=dict)
    """Options of the model beside the schedule, such as noise_lr 0, for methods other than the first."""
    renders: Path | None = None
    """Write the first held-out view beside its image into this folder, for each training."""
    note: str = ""
    """A sentence to put above the table."""


def make_trainer(
    folder: Path, steps: int, seed: int, outputs: Path, views_per_step: int = 1, method: str = "odin-splatfacto"
) -> Any:
    """A trainer on a capture, set up: full resolution, every eighth image held out, no output beside its own."""
    from nerfstudio.configs.method_configs import all_methods
    from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig

    from odin_nerfstudio.glue.odin_trainer import OdinTrainer

    config: Any = all_methods[method]
    model_folder = next(p for p in ("sparse/0", "colmap/sparse/0") if (folder / p).is_dir())
    config.pipeline.datamanager.dataparser = ColmapDataParserConfig(
        data=folder.resolve(), colmap_path=Path(model_folder), downscale_factor=1, load_3D_points=True
    )
    config.pipeline.model.num_downscales = 0
    config.pipeline.odin.views_per_step = views_per_step
    config.max_num_iterations = steps
    config.machine.seed = seed
    config.output_dir = outputs
    config.vis = "tensorboard"
    config.viewer.quit_on_train_completion = True
    config.steps_per_eval_image = config.steps_per_eval_all_images = config.steps_per_eval_batch = 10**9
    config.steps_per_save = 10**9
    config.logging.steps_per_log = 10**9
    config.set_timestamp()
    trainer = OdinTrainer(config)
    trainer.setup()
    return trainer


def train(folder: Path, steps: list[int], seed: int) -> list[dict[str, Any]]:
    """One run in this process: a row of figures at each of ``steps``."""
    from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation

    outputs = tempfile.TemporaryDirectory()
    trainer = make_trainer(folder, max(steps), seed, Path(outputs.name))
    rows: list[dict[str, Any]] = []

    def measure(step: int) -> None:
        done = step + 1
        if done + 100 in steps:
            trainer.timer.take()
        if done in steps:
            times = trainer.timer.take()
            metrics = trainer.pipeline.get_average_eval_image_metrics(step=step)
            row = {"scene": folder.name, "seed": seed, "steps": done, "gaussians": trainer.pipeline.splats.num_points}
            row |= {name: metrics[name] for name in ("psnr", "ssim", "lpips") if name in metrics}
            row |= {f"{name}_ms": times.get(name, 0.0) for name in PHASES} | {"step_ms": sum(times.values())}
            rows.append(row)
            print(json.dumps(row), flush=True)

    trainer.callbacks.append(TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], measure))
    trainer.train()
    outputs.cleanup()
    return rows


def table(rows: list[dict[str, Any]], command: str) -> str:
    """The results as Markdown."""
    lines = [
        f"`{command}`",
        "",
        "| scene | seed | steps | PSNR | SSIM | Gaussians | ms per step | " + " | ".join(PHASES) + " |",
        "| --- " * (7 + len(PHASES)) + "|",
    ]
    for row in rows:
        phases = " | ".join(f"{row[f'{name}_ms']:.0f}" for name in PHASES)
        lines.append(
            f"| {row['scene']} | {row['seed']} | {row['steps']} | {row['psnr']:.2f} | {row['ssim']:.3f} "
            f"| {row['gaussians']:,} | {row['step_ms']:.0f} | {phases} |"
        )
    return "\n".join(lines)


def put_between_marks(file: Path, text: str, mark: str) -> None:
    """Replaces what stands between ``<!-- mark -->`` and ``<!-- /mark -->``, or appends it."""
    first, last = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    old = file.read_text() if file.exists() else "# Results\n"
    if first not in old:
        old += f"\n{first}\n{last}\n"
    before, rest = old.split(first, 1)
    after = rest.split(last, 1)[1]
    file.write_text(f"{before}{first}\n{text}\n{last}{after}")


def main() -> None:
    """Runs everything."""
    options = tyro.cli(Options, description=__doc__)
    if options.methods:
        compare_methods(options)
        return
    rows: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for capture in options.folders:
            for seed in options.seeds:
                rows += processes.submit(train, capture, options.steps, seed).result()
    names = " ".join(capture.name for capture in options.folders)
    seeds = " ".join(map(str, options.seeds))
    command = f"python scripts/bench_quality.py {names} --steps {' '.join(map(str, options.steps))} --seeds {seeds}"
    text = table(rows, command)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.docs:
        put_between_marks(options.docs / "results.md", text, MARK)


def compare_methods(options: Options) -> None:
    """The table of methods and modes."""
    import method_table

    rows = method_table.measure(options)
    scenes, methods = (" ".join(dict.fromkeys(row[name] for row in rows)) for name in ("scene", "method"))
    command = f"python scripts/bench_quality.py {scenes} --methods {methods} --views {options.views}"
    text = method_table.table(rows, options.modes, f"{command} --json FILE", options.note)
    print(text)
    if options.docs:
        put_between_marks(options.docs / "results_methods.md", text, "bench_methods")


if __name__ == "__main__":
    main()
