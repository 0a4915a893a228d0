"""The pipeline: data manager, plan and model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig

from odin_nerfstudio.glue.compat import provide_ffmpeg
from odin_nerfstudio.glue.odin_datamanager import OdinDataManager, OdinDataManagerConfig
from odin_nerfstudio.glue.odin_model import OdinSplatfactoModel, OdinSplatfactoModelConfig
from odin_nerfstudio.glue.odin_options import OdinOptions
from odin_nerfstudio.glue.planning import plan_for
from odin_nerfstudio.glue.step_timer import StepTimer

DEFAULT_SEED = 42


@dataclass
class OdinPipelineConfig(VanillaPipelineConfig):
    """Options of an Odin pipeline."""

    _target: type = field(default_factory=lambda: OdinPipeline)
    datamanager: OdinDataManagerConfig = field(default_factory=OdinDataManagerConfig)
    """Where views come from."""
    model: OdinSplatfactoModelConfig = field(default_factory=OdinSplatfactoModelConfig)
    """The splats."""
    odin: OdinOptions = field(default_factory=OdinOptions)
    """Planning and synchronization."""


class OdinPipeline(VanillaPipeline):
    """splatfacto's pipeline with views from a plan."""

    config: OdinPipelineConfig  # type: ignore[assignment]
    datamanager: OdinDataManager

    def __init__(self, config: OdinPipelineConfig, device: str, **kwargs: Any) -> None:
        provide_ffmpeg()
        super().__init__(config, device, **kwargs)
        self.seed = DEFAULT_SEED if config.odin.seed is None else config.odin.seed
        self.timer: Any = StepTimer()

    @property
    def splats(self) -> OdinSplatfactoModel:
        """The model, with its type."""
        return cast(OdinSplatfactoModel, self.model)

    def prepare_training(self) -> None:
        """Makes the plan and hands it to the data manager; ns-eval and the like never need one."""
        plan = plan_for(self.datamanager, self.config.odin, self.seed)
        self.datamanager.follow(plan, list(range(len(self.datamanager.train_dataset))))

    def get_train_loss_dict(self, step: int) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
        """Renders the step's view and returns outputs, losses and metrics."""
        self.splats.task = (self.seed, step, 0)
        with self.timer.phase("data"):
            camera, batch = self.datamanager.next_train(step)
        with self.timer.phase("render"):
            outputs = self.model(camera)
        with self.timer.phase("loss"):
            metrics = self.splats.get_metrics_dict(outputs, batch)
            losses = self.splats.get_loss_dict(outputs, batch, metrics)
        return outputs, losses, metrics
