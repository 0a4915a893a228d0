"""What placement ``sharded`` cannot do, found before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odin_nerfstudio.glue.odin_trainer import OdinTrainerConfig


def refusal(config: OdinTrainerConfig) -> str | None:
    """Why a job cannot train with sharded primitives, and what to do; ``None``: it can."""
    options = config.pipeline.odin
    if not renders_in_stages(config.pipeline.model._target):
        return f"owners do not know how {config.method_name} renders and densifies; use placement replicated"
    if options.backend == "nccl":  # its bodies travel in an order that is known ahead; those of splats have none
        return "splats travel through host memory, over gloo; use --pipeline.odin.backend gloo, or leave it out"
    if options.turn_lanes:
        return "owners are near the views that their rank renders; leave out --pipeline.odin.turn-lanes"
    if options.record is not None:
        return "recordings are made with placement replicated; leave out --pipeline.odin.record"
    return None


def renders_in_stages(model: type) -> bool:
    """Whether a class of models projects and rasterizes apart, so that different ranks can."""
    from odin_nerfstudio.glue.aa_model import OdinAaModel
    from odin_nerfstudio.glue.mcmc_model import OdinMcmcModel
    from odin_nerfstudio.glue.odin_2dgs_model import Odin2dgsModel
    from odin_nerfstudio.glue.odin_model import OdinSplatfactoModel

    return model in (OdinSplatfactoModel, OdinAaModel, OdinMcmcModel, Odin2dgsModel)
