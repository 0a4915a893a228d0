"""What the registered methods have in common: splatfacto's settings around one model."""

from __future__ import annotations

from typing import Any

from nerfstudio.configs.base_config import LoggingConfig, MachineConfig, ViewerConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from nerfstudio.models.base_model import ModelConfig
from nerfstudio.plugins.types import MethodSpecification

from odin_nerfstudio.glue.launch import default_device_type
from odin_nerfstudio.glue.odin_datamanager import OdinDataManagerConfig
from odin_nerfstudio.glue.odin_optimizers import OdinAdamConfig
from odin_nerfstudio.glue.odin_pipeline import OdinPipelineConfig
from odin_nerfstudio.glue.odin_trainer import OdinTrainerConfig


def splatfacto_method(
    name: str, model: ModelConfig, description: str, bilateral_grid_lr: float = 2e-3
) -> MethodSpecification:
    """A method with splatfacto's training length, learning rates and schedules, trained by Odin."""
    return MethodSpecification(
        config=OdinTrainerConfig(
            method_name=name,
            steps_per_eval_image=100,
            steps_per_eval_batch=0,
            steps_per_save=2000,
            steps_per_eval_all_images=1000,
            max_num_iterations=30000,
            mixed_precision=False,
            machine=MachineConfig(device_type=default_device_type()),
            logging=LoggingConfig(),
            pipeline=OdinPipelineConfig(
                datamanager=OdinDataManagerConfig(
                    dataparser=NerfstudioDataParserConfig(load_3D_points=True),
                    cache_images_type="uint8",
                ),
                model=model,
            ),
            optimizers=splatfacto_optimizers(bilateral_grid_lr),
            viewer=ViewerConfig(num_rays_per_chunk=1 << 15),
            vis="viewer",
        ),
        description=description,
    )


def splatfacto_optimizers(bilateral_grid_lr: float = 2e-3) -> dict[str, Any]:
    """splatfacto's optimizers and schedulers."""
    return {
        "means": {
            "optimizer": OdinAdamConfig(lr=1.6e-4, eps=1e-15),
            "scheduler": ExponentialDecaySchedulerConfig(lr_final=1.6e-6, max_steps=30000),
        },
        "features_dc": {"optimizer": OdinAdamConfig(lr=0.0025, eps=1e-15), "scheduler": None},
        "features_rest": {"optimizer": OdinAdamConfig(lr=0.0025 / 20, eps=1e-15), "scheduler": None},
        "opacities": {"optimizer": OdinAdamConfig(lr=0.05, eps=1e-15), "scheduler": None},
        "scales": {"optimizer": OdinAdamConfig(lr=0.005, eps=1e-15), "scheduler": None},
        "quats": {"optimizer": OdinAdamConfig(lr=0.001, eps=1e-15), "scheduler": None},
        "camera_opt": {
            "optimizer": OdinAdamConfig(lr=1e-4, eps=1e-15),
            "scheduler": ExponentialDecaySchedulerConfig(
                lr_final=5e-7, max_steps=30000, warmup_steps=1000, lr_pre_warmup=0
            ),
        },
        "bilateral_grid": {
            "optimizer": OdinAdamConfig(lr=bilateral_grid_lr, eps=1e-15),
            "scheduler": ExponentialDecaySchedulerConfig(
                lr_final=1e-4, max_steps=30000, warmup_steps=1000, lr_pre_warmup=0
            ),
        },
    }
