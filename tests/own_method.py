"""Another author's splat method, and what makes it distributed: the example of docs/own_method.md.

``GlowModel`` is the method as its author wrote it: splatfacto with a brightness of every primitive and a network of the
whole scene that tones the image. The part below the line is all that Odin needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.models.splatfacto import SplatfactoModel, SplatfactoModelConfig
from torch import Tensor

from odin_nerfstudio.glue.cameras import world_to_camera
from odin_nerfstudio.rendering import rasterization  # gsplat's on CUDA, and the same on the CPU


@dataclass
class GlowModelConfig(SplatfactoModelConfig):
    """splatfacto's options and one more."""

    _target: type = field(default_factory=lambda: GlowModel)
    glow_reg: float = 0.1
    """Weight of the mean squared glow in the loss."""


class GlowModel(SplatfactoModel):
    """splatfacto whose primitives glow, behind a tone mapping that all views share."""

    config: GlowModelConfig  # type: ignore[assignment]

    def populate_modules(self) -> None:
        super().populate_modules()
        self.gauss_params["glow"] = torch.nn.Parameter(torch.zeros(self.num_points, 1))
        self.tone = torch.nn.Linear(3, 3)
        torch.nn.init.eye_(self.tone.weight)
        torch.nn.init.zeros_(self.tone.bias)

    def get_gaussian_param_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        glow = cast(torch.nn.Parameter, self.gauss_params["glow"])
        return {**super().get_gaussian_param_groups(), "glow": [glow]}

    def get_param_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        tone = {"tone_weight": [self.tone.weight], "tone_bias": [cast(torch.nn.Parameter, self.tone.bias)]}
        return {**super().get_param_groups(), **tone}

    def get_outputs(self, camera: Cameras) -> dict[str, Tensor | list]:
        """Renders one camera: ``rgb``, ``accumulation`` and ``background``."""
        width, height = int(camera.width.item()), int(camera.height.item())
        render, alpha, self.info = rasterization(
            self.means, self.quats, torch.exp(self.scales), torch.sigmoid(self.opacities).squeeze(-1),
            torch.sigmoid(self.features_dc) * torch.exp(self.gauss_params["glow"]),
            world_to_camera(camera.camera_to_worlds), camera.get_intrinsics_matrices().to(self.device), width, height,
            absgrad=self.strategy.absgrad,
        )  # fmt: skip
        if self.training:
            self.strategy.step_pre_backward(
                self.gauss_params, self.optimizers, self.strategy_state, self.step, self.info
            )
        background = self._get_background_color()
        rgb = self.tone((render + (1 - alpha) * background).squeeze(0))
        return {"rgb": rgb.clamp(0, 1), "accumulation": alpha.squeeze(0), "background": background}


# What makes it distributed --------------------------------------------------------------------------------------------

from odin_nerfstudio.glue.method import splatfacto_method  # noqa: E402
from odin_nerfstudio.glue.odin_optimizers import OdinAdamConfig  # noqa: E402
from odin_nerfstudio.glue.splat_protocol import TrainingContext  # noqa: E402
from odin_nerfstudio.glue.splats import OdinSplats  # noqa: E402
from odin_nerfstudio.runtime.store import AllRows, DenseTerm, RowTable  # noqa: E402


@dataclass
class OdinGlowModelConfig(GlowModelConfig):
    _target: type = field(default_factory=lambda: OdinGlowModel)
    sh_degree: int = 0
    num_downscales: int = 0


class OdinGlowModel(OdinSplats, GlowModel):
    config: OdinGlowModelConfig  # type: ignore[assignment]

    def dense_terms(self) -> list[DenseTerm]:
        return [*super().dense_terms(), DenseTerm("glow", lambda step: True, self._glow_gradient, ("glow",))]

    def _glow_gradient(self, step: int, total: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"glow": 2 * self.config.glow_reg / total * values["glow"]}

    def further_tables(self, context: TrainingContext) -> list[RowTable]:
        groups = {"weight": "tone_weight", "bias": "tone_bias"}
        adams = {name: context.optimizers[group] for name, group in groups.items()}

        def schedule(step: int) -> dict[str, float]:
            return {name: context.learning_rate(group, step) for name, group in groups.items()}

        return [RowTable("tone", dict(self.tone.named_parameters()), adams, AllRows(), schedule, defer=False)]


odin_glow = splatfacto_method("odin-glow", OdinGlowModelConfig(), "Primitives that glow, on several devices.")
for _group in ("glow", "tone_weight", "tone_bias"):
    _settings: dict[str, Any] = {"optimizer": OdinAdamConfig(lr=1e-3, eps=1e-15), "scheduler": None}
    odin_glow.config.optimizers[_group] = _settings
