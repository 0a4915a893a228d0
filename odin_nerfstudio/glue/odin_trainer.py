"""The trainer: device choice, exact resume, checkpoints that survive a kill, a clean end on Ctrl-C."""

from __future__ import annotations

import functools
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import numpy as np
import torch
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation
from nerfstudio.engine.trainer import Trainer, TrainerConfig
from nerfstudio.utils import writer
from nerfstudio.utils.decorators import check_main_thread
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.glue.checkpoint import CheckpointError, find_checkpoint, read_checkpoint, write_checkpoint
from odin_nerfstudio.glue.checks import InputError
from odin_nerfstudio.glue.keyed_random import seed_everything
from odin_nerfstudio.glue.odin_pipeline import OdinPipeline, OdinPipelineConfig
from odin_nerfstudio.glue.step_timer import StepTimer

RESUME_KEY = "odin"
"""Where a checkpoint keeps what splatfacto's do not have; nerfstudio's loaders pass over it."""


def default_device_type() -> Literal["cpu", "cuda"]:
    """cuda where there is a usable device, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class OdinTrainerConfig(TrainerConfig):
    """nerfstudio's trainer options."""

    _target: type = field(default_factory=lambda: OdinTrainer)
    pipeline: OdinPipelineConfig = field(default_factory=OdinPipelineConfig)
    """Pipeline configuration."""

    def set_timestamp(self) -> None:
        """Runs once per job, in the process that the user started, before anything is written."""
        if self.machine.device_type == "cuda" and not torch.cuda.is_available():
            raise SystemExit("Error: --machine.device-type cuda, but torch finds no CUDA device; use cpu.")
        if self.pipeline.odin.seed is None:
            self.pipeline.odin.seed = self.machine.seed
        super().set_timestamp()

    def set_experiment_name(self) -> None:
        """nerfstudio's, also where the data was named behind the dataparser (``... colmap --data D``)."""
        if self.experiment_name is None and self.pipeline.datamanager.data is None:
            data = getattr(self.pipeline.datamanager.dataparser, "data", None)
            if data is not None and Path(data) != Path("."):
                self.experiment_name = Path(data).resolve().stem
        super().set_experiment_name()


class OdinTrainer(Trainer):
    """nerfstudio's trainer for Odin's pipelines."""

    config: OdinTrainerConfig
    pipeline: OdinPipeline  # type: ignore[assignment]

    def __init__(self, config: OdinTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        super().__init__(config, local_rank, world_size)
        CONSOLE.log(f"Device: {self.device} (--machine.device-type overrides)")
        self.timer = StepTimer()
        self.finished_step = -1
        seed_everything(config.machine.seed)

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        """Builds pipeline and optimizers; faults of the input end the program with one line."""
        try:
            super().setup(test_mode)
            self.pipeline.timer = self.timer
            self.pipeline.prepare_training()
        except (InputError, CheckpointError) as error:
            raise SystemExit(f"Error: {error}") from error
        self.callbacks.append(
            TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], self._after_iteration)
        )

    # The loop -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until done or until Ctrl-C, which saves what is finished and ends; a second one ends at once."""
        with interrupt_calls(self._stop_soon):
            super().train()

    def _stop_soon(self) -> None:
        CONSOLE.log("Ctrl-C: saving after the current step (once more to end at once)")
        self.stop_training = True
        self.config.viewer.quit_on_train_completion = True

    def train_iteration(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:  # type: ignore[override]
        """One step: forward, backward, optimizers, schedulers."""
        groups = list(self.optimizers.parameters)
        every = self.gradient_accumulation_steps
        self.optimizers.zero_grad_some([g for g in groups if step % every[g] == 0])
        device_type = torch.device(self.device).type
        with torch.autocast(device_type=device_type, enabled=self.mixed_precision):
            _, losses, metrics = self.pipeline.get_train_loss_dict(step=step)
            loss = functools.reduce(torch.add, losses.values())
        with self.timer.phase("backward"):
            cast(torch.Tensor, self.grad_scaler.scale(loss)).backward()
        with self.timer.phase("optimizer"):
            due = [g for g in groups if step % every[g] == every[g] - 1]
            self.optimizers.optimizer_scaler_step_some(self.grad_scaler, due)
            if self.config.log_gradients:
                metrics |= self._gradient_norms()
            scale = self.grad_scaler.get_scale()
            self.grad_scaler.update()
            if scale <= self.grad_scaler.get_scale():  # else the scaler skipped the step, and so must the schedule
                self.optimizers.scheduler_step_all(step)
        return loss, losses, metrics

    def _gradient_norms(self) -> dict[str, torch.Tensor]:
        norms = {
            f"Gradients/{name}": parameter.grad.norm()
            for name, parameter in self.pipeline.model.named_parameters()
            if parameter.grad is not None
        }
        return {**norms, "Gradients/Total": torch.stack(list(norms.values())).sum()} if norms else {}

    def _after_iteration(self, step: int) -> None:
        """Runs last in a step, structural work included."""
        self.finished_step = step
        self.timer.steps += 1
        if step > 0 and step % self.config.logging.steps_per_log == 0:
            times = self.timer.take()
            writer.put_dict(name="Step ms", scalar_dict={**times, "total": sum(times.values())}, step=step)

    # Checkpoints ----------------------------------------------------------------------------------------------

    @check_main_thread
    def save_checkpoint(self, step: int) -> None:
        """Saves the last finished step, aside and renamed; only then are older checkpoints removed.

        A stop between two steps leaves nerfstudio's own counter one ahead, so ``step`` is not used.
        """
        step = self.finished_step
        if step < 0:
            CONSOLE.log("Nothing to save: no step was finished")
            return
        path = self.checkpoint_dir / f"step-{step:09d}.ckpt"
        state = {
            "step": step,
            "pipeline": self.pipeline.state_dict(),
            "optimizers": {k: v.state_dict() for k, v in self.optimizers.optimizers.items()},
            "schedulers": {k: v.state_dict() for k, v in self.optimizers.schedulers.items()},
            "scalers": self.grad_scaler.state_dict(),
            RESUME_KEY: {
                "format": 1,
                "seed": self.pipeline.seed,
                "model": self.pipeline.splats.resume_state(),
                "generators": generator_states(),
            },
        }
        write_checkpoint(state, path, self.base_dir / "checkpoint_being_written")
        if self.config.save_only_latest_checkpoint:
            for other in self.checkpoint_dir.glob("*.ckpt"):
                if other != path:
                    other.unlink()

    def _load_checkpoint(self) -> None:
        """Goes on from --load-dir (and --load-step) or --load-checkpoint, exactly where it was."""
        if self.config.load_dir is not None:
            path = find_checkpoint(self.config.load_dir, self.config.load_step)
        elif self.config.load_checkpoint is not None:
            path = self.config.load_checkpoint
        else:
            return
        state = read_checkpoint(path)
        self._start_step = state["step"] + 1
        self.finished_step = state["step"]
        self.pipeline.load_pipeline(state["pipeline"], state["step"])
        self.optimizers.load_optimizers(state["optimizers"])
        if "schedulers" in state and self.config.load_scheduler:
            self.optimizers.load_schedulers(state["schedulers"])
        self.grad_scaler.load_state_dict(state["scalers"])
        extra = state.get(RESUME_KEY)
        if extra is None:
            CONSOLE.log(f"{path} was not written by Odin: densification statistics start anew")
        else:
            self.pipeline.splats.load_resume_state(extra["model"])
            restore_generators(extra["generators"])
            if extra["seed"] != self.pipeline.seed:
                CONSOLE.log(
                    f"{path} was trained with seed {extra['seed']}, this run has {self.pipeline.seed}: "
                    "it goes on with other views and backgrounds"
                )
        CONSOLE.log(f"Resuming after step {state['step']} of {path}")


def generator_states() -> dict[str, Any]:
    """The global generators of Python, numpy and torch, as plain values and tensors."""
    kind, keys, position, has_gauss, cached = cast(tuple, np.random.get_state())
    return {
        "python": list(random.getstate()),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Takes back what :func:`generator_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])


class interrupt_calls:
    """While active, the first Ctrl-C calls a function; the next one raises KeyboardInterrupt as usual."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._previous: Any = None

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, self._previous or signal.default_int_handler)
        self._function()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # signals can be set nowhere else
            self._previous = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread() and self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
