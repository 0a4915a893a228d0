"""The pipeline: data manager, plan and model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

from nerfstudio.models.base_model import ModelConfig
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig

from odin_nerfstudio.glue.compat import end_quickly, provide_ffmpeg, steady_viewer
from odin_nerfstudio.glue.odin_datamanager import OdinDataManager, OdinDataManagerConfig
from odin_nerfstudio.glue.odin_model import OdinSplatfactoModelConfig
from odin_nerfstudio.glue.odin_options import OdinOptions
from odin_nerfstudio.glue.planning import plan_for
from odin_nerfstudio.glue.splat_protocol import DistributedSplats
from odin_nerfstudio.planning.schedule import Plan

DEFAULT_SEED = 42


@dataclass
class OdinPipelineConfig(VanillaPipelineConfig):
    """Options of an Odin pipeline."""

    _target: type = field(default_factory=lambda: OdinPipeline)
    datamanager: OdinDataManagerConfig = field(default_factory=OdinDataManagerConfig)
    """Where views come from."""
    model: ModelConfig = field(default_factory=OdinSplatfactoModelConfig)
    """The splats."""
    odin: OdinOptions = field(default_factory=OdinOptions)
    """Planning and synchronization."""


class OdinPipeline(VanillaPipeline):
    """splatfacto's pipeline with views from a plan."""

    config: OdinPipelineConfig  # type: ignore[assignment]
    datamanager: OdinDataManager

    def __init__(self, config: OdinPipelineConfig, device: str, world_size: int = 1, **kwargs: Any) -> None:
        provide_ffmpeg()
        steady_viewer()
        end_quickly()
        # nerfstudio would wrap the model into DDP, whose hooks do not survive a densification
        super().__init__(config, device, world_size=1, **kwargs)
        self.world_size = world_size
        self.seed = DEFAULT_SEED if config.odin.seed is None else config.odin.seed

    @property
    def splats(self) -> DistributedSplats:
        """The model, as the runtime sees it."""
        return cast(DistributedSplats, self.model)

    def prepare_training(self, rank: int, ranks: int) -> Plan:
        """Makes the plan and hands it to the data manager; ns-eval and the like never need one."""
        options = self.config.odin
        lanes = options.views_per_step or ranks
        plan = plan_for(self.datamanager, options, self.seed, ranks, lanes)
        self.datamanager.follow(plan, plan.views_of_rank(rank).tolist())
        if options.scale_schedule:
            self.splats.follow_plan(math.ceil(plan.views / lanes))
        return plan
