"""Recording from a checkpoint: every training view is rendered forward and backward, and nothing is updated."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from nerfstudio.engine.callbacks import TrainingCallbackLocation
from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.glue.odin_trainer import OdinTrainer, OdinTrainerConfig
from odin_nerfstudio.glue.record_stages import measure_stages
from odin_nerfstudio.glue.recording import FILE, write_recording
from odin_nerfstudio.runtime import contributions, rows
from odin_nerfstudio.runtime.messages import Contribution
from odin_nerfstudio.runtime.recorder import Recorder
from odin_nerfstudio.runtime.recording import Recording
from odin_nerfstudio.runtime.shadow import Shadow, ShadowPool, Task
from odin_nerfstudio.runtime.telemetry import now

LAG = 1
"""Candidate sets are those of a rank whose copy lacks that many steps, as most are that another rank computes."""
STEPS = 12
"""Steps of training, thrown away, that measure the time beside rendering."""


def record_checkpoint(load_config: Path, output: Path, repeats: int = 2, block: int | None = None) -> Recording:
    """Records every training view of a run's last checkpoint, in one process.

    Args:
        load_config: The run's config.yml.
        output: Folder to write to.
        repeats: Times that each view is rendered; the shortest time counts.
        block: See `runtime.recording.compress`.

    Raises:
        ValueError: The file is no configuration of an Odin run.
    """
    with tempfile.TemporaryDirectory() as scratch, _own_writers():
        trainer = _trainer(load_config, Path(scratch))
        recorder = Recorder(trainer.runner.engine)
        _render_views(trainer, recorder, repeats)
        sets, tasks = dict(recorder.sets), np.array(recorder.tasks)
        recorder.tasks.clear()
        stages = measure_stages(trainer, dict(zip(tasks[:, 2].astype(int).tolist(), tasks[:, 9].tolist())))
        _take_steps(trainer)
        part = recorder.part()
        part.stages = stages
        part.sets, part.tasks = sets, tasks
        part.text |= {"how": f"checkpoint at step {trainer._start_step - 1}", "mode": "none"}
        pipeline = trainer.pipeline
        recording = write_recording(
            part, trainer.runner.engine, pipeline.datamanager, pipeline.seed, output / FILE, block
        )
        trainer.runner.engine.close()
    return recording


@contextmanager
def _own_writers() -> Iterator[None]:
    """Forget nerfstudio's writers for the folder that will be gone, which are global."""
    before = list(writer.EVENT_WRITERS)
    try:
        yield
    finally:
        writer.EVENT_WRITERS[:] = before


def _trainer(load_config: Path, scratch: Path) -> OdinTrainer:
    config = yaml.load(load_config.read_text(), Loader=yaml.Loader)  # as nerfstudio reads its own configurations
    if not isinstance(config, OdinTrainerConfig):
        raise ValueError(f"--load-config {load_config} is no configuration of a run trained with Odin")
    config.load_dir = config.get_checkpoint_dir()
    config.load_step, config.load_checkpoint = None, None
    config.output_dir, config.timestamp = scratch, "record"
    config.vis = "tensorboard"
    config.viewer.quit_on_train_completion = True
    never = 10**9
    config.steps_per_save = config.logging.steps_per_log = never
    config.steps_per_eval_batch = config.steps_per_eval_image = config.steps_per_eval_all_images = never
    config.machine.num_devices = config.machine.num_machines = 1
    options = config.pipeline.odin
    options.record = options.trace = None
    options.mode = "barrier"
    config.set_timestamp()
    trainer = OdinTrainer(config)
    trainer.setup()
    return trainer


def _render_views(trainer: OdinTrainer, recorder: Recorder, repeats: int) -> None:
    runner, datamanager = trainer.runner, trainer.pipeline.datamanager
    engine, step = runner.engine, trainer._start_step
    pools = {table.name: ShadowPool(table) for table in engine.tables}
    trainer.pipeline.train()
    trainer._call_back(step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
    for view in range(len(datamanager.train_dataset)):
        best, message, shadow = float("inf"), None, None
        task = Task(step, 0, view)
        for _ in range(max(1, repeats)):
            ids = []
            for table in engine.tables:
                mask = table.arrays["mask"]
                table.reads.mark(step, view, table.versions, LAG, mask)
                ids.append(rows.ids_of_mask(mask))
            shadow = Shadow(task, {t.name: pools[t.name].take(i, view) for t, i in zip(engine.tables, ids)})
            seconds, info = _render(trainer, task, shadow)
            best = min(best, seconds)
            message = contributions.collect(task, shadow, engine.tables, None, info)
            for table in engine.tables:
                pools[table.name].give_back(shadow[table.name])
        recorder.task(task, cast(Shadow, shadow), cast(Contribution, message), 0, best)
    CONSOLE.log(f"Recorded {len(recorder.sets)} views of {engine.tables[0].count} primitives at step {step}")


def _render(trainer: OdinTrainer, task: Task, shadow: Shadow) -> tuple[float, dict[str, Any]]:
    """As `StepRunner` renders a task; seconds and gsplat's meta."""
    runner = trainer.runner
    model, lanes = runner.model, runner.plan.views_per_step
    model.task = (trainer.pipeline.seed, task.step, task.lane)
    camera, batch = trainer.pipeline.datamanager.train_view(task.view)
    camera.metadata = {**(camera.metadata or {}), "cam_idx": 0}
    begin = now()
    outputs = torch.func.functional_call(cast(torch.nn.Module, model), runner._rows_of(shadow), (camera,))
    (model.image_loss(outputs, batch) / lanes).backward()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return now() - begin, {**model.info, "n_cameras": lanes}


def _take_steps(trainer: OdinTrainer) -> None:
    """Trains a few steps without surgery, for the times in the engine's records."""
    engine, first = trainer.runner.engine, trainer._start_step
    structural, acts = engine.is_structural, trainer.runner.model.acts_at
    engine.is_structural = lambda _: False
    trainer.runner.model.acts_at = lambda _: False  # type: ignore[method-assign]
    for step in range(first, first + STEPS):
        trainer._train_step(step)
    engine.drain()
    engine.is_structural = structural
    trainer.runner.model.acts_at = acts  # type: ignore[method-assign]
