"""The trainer: steps through the runtime, exact resume, checkpoints that survive a kill, a clean end on Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.engine.callbacks import TrainingCallbackLocation
from nerfstudio.engine.trainer import Trainer, TrainerConfig
from nerfstudio.utils import comms, writer
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, TimeWriter
from nerfstudio.viewer.viewer import Viewer

from odin_nerfstudio.glue import job
from odin_nerfstudio.glue.checkpoint import CheckpointError, find_checkpoint, read_checkpoint, write_checkpoint
from odin_nerfstudio.glue.checks import InputError
from odin_nerfstudio.glue.devices import connect, rank_device
from odin_nerfstudio.glue.global_random import generator_states, restore_generators, seed_everything
from odin_nerfstudio.glue.interrupts import InterruptRequests
from odin_nerfstudio.glue.launch import Place
from odin_nerfstudio.glue.odin_pipeline import OdinPipeline, OdinPipelineConfig
from odin_nerfstudio.glue.panel import OdinPanel
from odin_nerfstudio.glue.recording import finish_recording, start_recording
from odin_nerfstudio.glue.report import StepScalars, report
from odin_nerfstudio.glue.restart import is_restart, leave_note
from odin_nerfstudio.glue.step_runner import StepRunner
from odin_nerfstudio.glue.step_timer import StepTimer
from odin_nerfstudio.runtime.faults import EXIT_CODE, FaultLimits, NonFiniteGradient, RankFailure
from odin_nerfstudio.runtime.transport import Activity, LocalTransport, Transport

RESUME_KEY = "odin"
"""Where a checkpoint keeps what splatfacto's do not have; nerfstudio's loaders pass over it."""

STOP = "stop"
"""The word by which one rank tells all to end at the same step."""


@dataclass
class OdinTrainerConfig(TrainerConfig):
    """nerfstudio's trainer options."""

    _target: type = field(default_factory=lambda: OdinTrainer)
    pipeline: OdinPipelineConfig = field(default_factory=OdinPipelineConfig)
    """Pipeline configuration."""

    def setup(self, **kwargs: Any) -> OdinTrainer:
        """The trainer of the placement."""
        if self.pipeline.odin.placement == "sharded":
            from odin_nerfstudio.glue.sharded_trainer import ShardedTrainer

            return ShardedTrainer(self, **kwargs)
        return super().setup(**kwargs)

    def set_timestamp(self) -> None:
        """Runs in the process that the user started, before anything is written."""
        job.prepare(self)
        super().set_timestamp()
        job.agree_on_folder(self)

    def set_experiment_name(self) -> None:
        """nerfstudio's, also where the data was named behind the dataparser (``... colmap --data D``)."""
        if self.experiment_name is None and self.pipeline.datamanager.data is None:
            data = getattr(self.pipeline.datamanager.dataparser, "data", None)
            if data is not None and Path(data) != Path():
                self.experiment_name = Path(data).resolve().stem
        super().set_experiment_name()

    def print_to_terminal(self) -> None:
        """nerfstudio's, once per job."""
        if job.is_first_process(self):
            super().print_to_terminal()

    def save_config(self) -> None:
        """nerfstudio's, once per job; a restart, which has the rest of the steps, keeps that of the first attempt."""
        known = is_restart() and (self.get_base_dir() / "config.yml").is_file()
        if job.is_first_process(self) and not known:
            super().save_config()


class OdinTrainer(Trainer):
    """nerfstudio's trainer for Odin's pipelines, on one rank or as one of several."""

    config: OdinTrainerConfig
    pipeline: OdinPipeline  # type: ignore[assignment]
    runner: StepRunner

    def __init__(self, config: OdinTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        self.rank = comms.get_rank()
        if self.rank != 0 and config.is_viewer_enabled():
            config.vis = "tensorboard"  # the writer itself keeps to rank 0
        super().__init__(config, local_rank, world_size)
        self.transport: Transport = LocalTransport()
        how = ""
        if world_size > 1:
            options, device = config.pipeline.odin, rank_device(config.machine.device_type, local_rank)
            self.device = str(device)
            limits = FaultLimits(stall=options.stall)
            wanted = "gloo" if options.placement == "sharded" else options.backend  # see `sharding.refusal`
            self.transport, how = connect(wanted, device, job.local_ranks(config), limits)
            how = f", messages: {how} (--pipeline.odin.backend)"
        if self.rank == 0:
            ranks = f"ranks: {world_size} (--machine.device-type, --machine.num-devices)"
            CONSOLE.log(f"Device: {self.device}, {ranks}{how}")
        self.timer = StepTimer()
        self.finished_step = -1
        self._saved_step = -1
        self._interrupt = InterruptRequests(self._say_stopping)
        seed_everything(config.machine.seed)

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        """Builds pipeline, optimizers, plan and engine; faults of the input end the program with one line."""
        try:
            super().setup(test_mode)
            self.pipeline.splats.strategy.verbose = self.rank == 0  # every rank does the same surgery
            self.runner = self._make_runner()
            self.scalars = StepScalars(self.runner.engine)
            self.runner.engine.on_step(self.scalars)
            self.recorder = start_recording(self.runner.engine, self.config.pipeline.odin.record)
            if self.rank == 0 and Place.of_torchrun() is not None:
                leave_note(self.base_dir, self._start_step + self.config.max_num_iterations)
        except BaseException as error:
            if isinstance(error, RankFailure):
                self.transport.abort(error.reason, error.rank)
            else:
                self.transport.abort(f"could not be set up: {type(error).__name__}: {error}")
            if isinstance(error, (InputError, CheckpointError, RankFailure)):
                raise SystemExit(f"Error: {error}") from error
            raise

    def _make_runner(self) -> StepRunner:
        return StepRunner(self.pipeline, self.optimizers, self.transport, self._start_step, self.timer)

    def _make_panel(self) -> OdinPanel | None:
        if not isinstance(self.viewer_state, Viewer):
            return None
        return OdinPanel(self.viewer_state, self.runner, self._start_step + self.config.max_num_iterations)

    # The loop -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until done or until Ctrl-C, which saves what is finished and ends; a second one ends at once."""
        engine = self.runner.engine
        with self._interrupt, self._failures_told():
            if self.rank == 0:
                self.pipeline.datamanager.train_dataparser_outputs.save_dataparser_transform(
                    self.base_dir / "dataparser_transforms.json"
                )
            self._init_viewer_state()
            panel = self._make_panel()
            with TimeWriter(writer, EventName.TOTAL_TRAIN_TIME):
                for step in range(self._start_step, self._start_step + self.config.max_num_iterations):
                    if self._stops_before(step):
                        break
                    self._train_step(step)
            engine.drain()
            self.save_checkpoint(self.finished_step)
            sentence = report(engine, self.config.pipeline.odin.trace)
            if panel is not None:
                panel.finish(sentence)
            finish_recording(
                self.recorder, engine, self.pipeline.datamanager, self.pipeline.seed, self.config.pipeline.odin.record
            )
            shows = self._let_go()
        if shows:
            self._after_train()

    def _let_go(self) -> bool:
        """Ends the run for all ranks; whether this one has an end to show."""
        self.runner.engine.close()
        return self.rank == 0

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Tells the user and the other ranks what ends this one, before a launcher can end it."""
        try:
            yield
        except (RankFailure, NonFiniteGradient, CheckpointError, InputError) as error:
            # the message quotes paths and other software: nothing in it is markup
            text = f"Error on rank {self.rank}: {error}" if self.world_size > 1 else f"Error: {error}"
            CONSOLE.print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)
            self.runner.engine.abort(error)
            raise SystemExit(EXIT_CODE if isinstance(error, RankFailure) else 1) from error
        except BaseException as error:
            self.runner.engine.abort(error)
            raise

    def _stops_before(self, step: int) -> bool:
        """Holds while paused in the viewer; says whether to end instead of running this step."""
        engine = self.runner.engine
        if self.training_state == "paused":
            with engine.busy(Activity.PAUSED):
                while self.training_state == "paused" and not (self._interrupt.requested or engine.announced(STOP)):
                    engine.idle(0.02)  # takes in what other ranks announce, too
        if getattr(self, "stop_training", False):  # nerfstudio's shutdown() asks so
            self._interrupt.requested = True
        if self._interrupt.requested and self.world_size == 1 and self.stops_at_once:
            return True
        if self._interrupt.requested and not self._announced:
            engine.announce(STOP)
            self._announced = True
        stops = STOP in engine.due(step)
        if stops and not self._interrupt.requested:  # the wish came from another machine
            self._say_stopping()
        return stops

    _announced = False
    stops_at_once = True
    """With one rank, any step may be the last."""

    def _say_stopping(self) -> None:
        self.config.viewer.quit_on_train_completion = True
        if self.rank == 0 and self.training_state != "completed":
            CONSOLE.log("Stopping: saving the finished steps (Ctrl-C once more to end at once)")

    def _train_step(self, step: int) -> None:
        self.step = step
        config = self.config
        with self.train_lock, TimeWriter(writer, EventName.ITER_TRAIN_TIME, step=step) as duration:
            self.pipeline.train()
            self._call_back(step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
            logs = step_check(step, config.logging.steps_per_log, run_at_zero=True)
            loss, losses, metrics = self.runner.run(step, with_metrics=logs)
            self.optimizers.scheduler_step_all(step)
            self._call_back(step, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
            self.finished_step = step
            self.timer.steps += 1
        if step > self._start_step + 1:  # the first steps are no measure of speed
            pixels = self.runner.plan.views_per_step * self.pipeline.datamanager.get_train_rays_per_batch()
            rate = pixels / max(0.001, duration.duration)
            writer.put_time(EventName.TRAIN_RAYS_PER_SEC, rate, step=step, avg_over_steps=True)
        self._update_viewer_state(step)
        if logs:
            writer.put_scalar(name="Train Loss", scalar=loss, step=step)
            writer.put_dict(name="Train Loss Dict", scalar_dict=losses, step=step)
            writer.put_dict(name="Train Metrics Dict", scalar_dict=metrics, step=step)
            self.scalars.write(step)
            if torch.cuda.is_available():
                memory = torch.cuda.max_memory_allocated() / 2**20
                writer.put_scalar(name="GPU Memory (MB)", scalar=memory, step=step)
        self._evaluate_if_due(step)
        if step_check(step, config.steps_per_save):
            self.save_checkpoint(step)
        writer.write_out_storage()

    def _call_back(self, step: int, location: TrainingCallbackLocation) -> None:
        for callback in self.callbacks:
            callback.run_callback_at_location(step, location=location)

    def _evaluates(self) -> bool:
        """Whether this rank evaluates at all: where somebody reads the result, and there are views for it."""
        config = self.config
        wanted = config.is_tensorboard_enabled() or config.is_wandb_enabled() or config.is_comet_enabled()
        return self.rank == 0 and wanted and bool(self.pipeline.datamanager.eval_dataset)

    def _evaluation_due(self, step: int) -> bool:
        config = self.config
        intervals = (config.steps_per_eval_batch, config.steps_per_eval_image, config.steps_per_eval_all_images)
        return any(step_check(step, interval) for interval in intervals)

    def _evaluate_if_due(self, step: int) -> None:
        """Evaluates on rank 0, on the complete state; the other ranks go on as far as they may."""
        if not self._evaluates() or not self._evaluation_due(step):
            return
        with self.train_lock, self.runner.engine.busy():
            self.runner.engine.drain()
            self.eval_iteration(step)

    def _after_train(self) -> None:
        """nerfstudio's, on rank 0, when the other ranks have been let go: the viewer may stay open for long."""
        self.step = self.finished_step
        if isinstance(self.viewer_state, Viewer):
            self.viewer_state.update_step(self.step)  # the page shows the last step that was reported to a browser
        super()._after_train()

    # Checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int) -> None:
        """Saves the last finished step on rank 0, aside and renamed; only then are older checkpoints removed."""
        step = self.finished_step
        if self.rank != 0 or step == self._saved_step:
            return
        if step < 0:
            CONSOLE.log("Nothing to save: no step was finished")
            return
        with self.runner.engine.busy():
            self.runner.engine.drain()
            self._write_checkpoint(step, self._state(step))
        self._saved_step = step

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "pipeline": self.pipeline.state_dict(),
            "optimizers": {k: v.state_dict() for k, v in self.optimizers.optimizers.items()},
            "schedulers": {k: v.state_dict() for k, v in self.optimizers.schedulers.items()},
            "scalers": self.grad_scaler.state_dict(),
            RESUME_KEY: {
                "format": 1,
                "seed": self.pipeline.seed,
                "views_per_step": self.runner.plan.views_per_step,
                "model": self.pipeline.splats.resume_state(),
                "generators": generator_states(),
            },
        }

    @property
    def _staging(self) -> Path:
        """Where checkpoints are written before they are renamed."""
        return self.base_dir / "checkpoint_being_written"

    def _write_checkpoint(self, step: int, state: dict[str, Any]) -> None:
        path = self.checkpoint_dir / f"step-{step:09d}.ckpt"
        write_checkpoint(state, path, self._staging)
        if self.config.save_only_latest_checkpoint:
            for other in self.checkpoint_dir.glob("*.ckpt"):
                if other != path:
                    other.unlink()

    def _read_checkpoint(self, path: Path) -> dict[str, Any]:
        return read_checkpoint(path)

    def _load_checkpoint(self) -> None:
        """Goes on from --load-dir (and --load-step) or --load-checkpoint, exactly where it was."""
        path = checkpoint_to_load(self.config)
        if path is None:
            return
        state = self._read_checkpoint(path)
        self._start_step = state["step"] + 1
        self.finished_step = self._saved_step = state["step"]
        self.pipeline.load_pipeline(state["pipeline"], state["step"])
        self.optimizers.load_optimizers(state["optimizers"])
        if "schedulers" in state and self.config.load_scheduler:
            self.optimizers.load_schedulers(state["schedulers"])
        self.grad_scaler.load_state_dict(state["scalers"])
        extra: dict[str, Any] | None = state.get(RESUME_KEY)
        if extra is None:
            CONSOLE.log(f"{path} was not written by Odin: densification statistics start anew", markup=False)
        else:
            self.pipeline.splats.load_resume_state(extra["model"])
            restore_generators(extra["generators"])
            if extra["seed"] != self.pipeline.seed:
                CONSOLE.log(
                    f"{path} was trained with seed {extra['seed']}, this run has {self.pipeline.seed}: "
                    "it goes on with other views and backgrounds",
                    markup=False,
                )
        if self.rank == 0:
            CONSOLE.log(f"Resuming after step {state['step']} of {path}", markup=False)


def checkpoint_to_load(config: TrainerConfig) -> Path | None:
    """The checkpoint that the options name, if any.

    Raises:
        CheckpointError: it does not exist.
    """
    if config.load_dir is not None:
        return find_checkpoint(config.load_dir, config.load_step)
    return config.load_checkpoint
