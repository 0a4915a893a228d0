"""splatfacto trained as a Markov chain: gsplat's ``MCMCStrategy`` in place of cloning, splitting and resets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from odin_nerfstudio.glue.mcmc import OdinMcmcStrategy
from odin_nerfstudio.glue.odin_model import OdinSplatfactoModel, OdinSplatfactoModelConfig
from odin_nerfstudio.glue.splat_protocol import TrainingContext
from odin_nerfstudio.runtime.noise import PositionNoise
from odin_nerfstudio.runtime.reads import VisibilityReads
from odin_nerfstudio.runtime.store import DenseTerm, ReadRule, Statistics

OF_DEFAULT_STRATEGY = (
    *("reset_alpha_every", "densify_grad_thresh", "use_absgrad", "densify_size_thresh", "split_screen_size"),
    *("cull_scale_thresh", "cull_screen_size", "stop_screen_size_at"),
)
"""Options that gsplat's default strategy reads, and MCMC's does not."""


@dataclass
class OdinMcmcModelConfig(OdinSplatfactoModelConfig):
    """splatfacto's options, and those of the MCMC strategy under nerfstudio's and gsplat's names.

    ``warmup_length``, ``refine_every`` and ``stop_split_at`` say when primitives are relocated and added,
    ``cull_alpha_thresh`` below which opacity one is dead. The other options of splatfacto's densification (gradients,
    sizes, opacity resets) have no meaning here.
    """

    _target: type = field(default_factory=lambda: OdinMcmcModel)
    cull_alpha_thresh: float = 0.005
    """Primitives of at most this opacity are moved onto others."""
    stop_split_at: int = 25000
    """Step at which relocation and growth end."""
    max_gs_num: int = 1_000_000
    """Most primitives; their number grows by 5 % at every refinement until it is reached."""
    noise_lr: float = 5e5
    """Size of the noise on positions, in units of their learning rate."""
    mcmc_opacity_reg: float = 0.01
    """Weight of the mean opacity in the loss."""
    mcmc_scale_reg: float = 0.01
    """Weight of the mean scale in the loss."""

    def unused(self) -> list[str]:
        """The options of splatfacto that were set and have no meaning here."""
        usual = OdinSplatfactoModelConfig()
        return [name for name in OF_DEFAULT_STRATEGY if getattr(self, name) != getattr(usual, name)]


class OdinMcmcModel(OdinSplatfactoModel):
    """splatfacto with relocation, growth, noise and the two regularizers of 3DGS-MCMC."""

    config: OdinMcmcModelConfig  # type: ignore[assignment]

    def populate_modules(self) -> None:
        """splatfacto's modules with the other strategy."""
        super().populate_modules()
        config = self.config
        self.strategy = cast(
            Any,
            OdinMcmcStrategy(
                cap_max=config.max_gs_num,
                noise_lr=config.noise_lr,
                refine_start_iter=config.warmup_length,
                refine_stop_iter=config.stop_split_at,
                refine_every=config.refine_every,
                min_opacity=config.cull_alpha_thresh,
                verbose=True,
            ),
        )
        self.strategy_state = self.strategy.initialize_state()

    def follow_plan(self, steps_per_epoch: int) -> None:
        """Nothing depends on the length of an epoch: opacities are never reset."""

    def statistics(self) -> Statistics | None:
        """None: growth goes by opacity."""
        return None

    def dense_terms(self) -> list[DenseTerm]:
        """Adds the mean opacity and the mean scale, which are pushed down at every step."""
        term = DenseTerm("mcmc", lambda _: True, self._mean_gradient, ("opacities", "scales"))
        return [*super().dense_terms(), term]

    def _mean_gradient(self, _step: int, total: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        opacities = torch.sigmoid(values["opacities"])
        return {
            "opacities": opacities * (1 - opacities) * (self.config.mcmc_opacity_reg / total),
            "scales": torch.exp(values["scales"]) * (self.config.mcmc_scale_reg / (3 * total)),
        }

    def regularizers(self) -> dict[str, Tensor]:
        """Adds the two means."""
        losses = super().regularizers()
        if self.training:
            losses["mcmc_opacity_reg"] = self.config.mcmc_opacity_reg * torch.sigmoid(self.opacities).mean()
            losses["mcmc_scale_reg"] = self.config.mcmc_scale_reg * torch.exp(self.scales).mean()
        return losses

    def row_noise(self, context: TrainingContext) -> PositionNoise:
        """The perturbation of positions."""
        rows = cast(Mapping[str, Any], self.gauss_params)
        return PositionNoise(rows, context.schedule, self.config.noise_lr, context.seed, context.betas["opacities"])

    def reads(self, context: TrainingContext) -> ReadRule:
        """As splatfacto's, with the reach of the noise."""
        rule = cast(VisibilityReads, super().reads(context))
        rule.noise = self.row_noise(context)
        return rule
