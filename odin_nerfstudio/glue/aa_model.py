"""splatfacto for other resolutions than the captured ones: antialiased, and if wanted smoothed in 3D."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from odin_nerfstudio.glue.cameras import world_to_camera
from odin_nerfstudio.glue.odin_model import NEAR_PLANE, OdinSplatfactoModel, OdinSplatfactoModelConfig
from odin_nerfstudio.glue.splat_protocol import TrainingContext
from odin_nerfstudio.rendering.sampling_rate import FILTER_VARIANCE, sampling_intervals, smoothed
from odin_nerfstudio.runtime.reads import VisibilityReads
from odin_nerfstudio.runtime.store import ReadRule

INTERVALS = "sampling_interval"
"""The untrained parameter ``[N, 1]`` that says how finely each primitive was observed. [scene units]"""


@dataclass
class OdinAaModelConfig(OdinSplatfactoModelConfig):
    """splatfacto's options, antialiased."""

    _target: type = field(default_factory=lambda: OdinAaModel)
    rasterize_mode: Literal["classic", "antialiased"] = "antialiased"
    smooth_3d: bool = False
    """Widen each primitive by what its finest training view could resolve (3D smoothing filter of Mip-Splatting). Off:
    it cost quality at every resolution that was measured, see docs/methods.md."""


class OdinAaModel(OdinSplatfactoModel):
    """splatfacto, antialiased, whose primitives may be kept from being finer than what the training cameras sampled.

    Sampling intervals are found anew at every structural step and rest in between; Mip-Splatting does so every 100
    steps. ``scales`` and ``opacities`` are the trained ones in training and the smoothed ones in evaluation and export.
    """

    config: OdinAaModelConfig  # type: ignore[assignment]

    def populate_modules(self) -> None:
        """splatfacto's modules and the intervals."""
        super().populate_modules()
        self._cameras: tuple[Tensor, Tensor, Tensor] | None = None
        self._largest: Callable[[float], float] = float
        self._are_new = False
        if self.config.smooth_3d:
            self._put_intervals(torch.zeros(len(self.gauss_params["means"]), 1))

    def _put_intervals(self, values: Tensor) -> None:
        self.gauss_params[INTERVALS] = torch.nn.Parameter(values, requires_grad=False)

    def _find_intervals(self) -> None:
        assert self._cameras is not None
        means = cast(Tensor, self.gauss_params["means"]).detach()
        found = sampling_intervals(means, *self._cameras, near=NEAR_PLANE, largest=self._largest)
        self._put_intervals(found[:, None])

    @property
    def scales(self) -> Tensor:  # type: ignore[override]
        """Logarithms of the scales. ``[N, 3]``"""
        raw = cast(Tensor, self.gauss_params["scales"])
        return raw if self.training or not self.config.smooth_3d else torch.log(self._smoothed()[0])

    @property
    def opacities(self) -> Tensor:  # type: ignore[override]
        """Logits of the opacities. ``[N, 1]``"""
        raw = cast(Tensor, self.gauss_params["opacities"])
        return raw if self.training or not self.config.smooth_3d else torch.logit(self._smoothed()[1])

    def _smoothed(self) -> tuple[Tensor, Tensor]:
        scales, opacities, intervals = (
            cast(Tensor, self.gauss_params[name]) for name in ("scales", "opacities", INTERVALS)
        )
        return smoothed(scales, opacities, intervals)

    def scales_and_opacities(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Those of the primitives after the filter."""
        if not self.config.smooth_3d:
            return super().scales_and_opacities(rows)
        scales, opacities = smoothed(rows["scales"], rows["opacities"], rows[INTERVALS])
        return scales, opacities.squeeze(-1)

    def reads(self, context: TrainingContext) -> ReadRule:
        """As splatfacto's, with the filter added to each primitive's variance."""
        rule = cast(VisibilityReads, super().reads(context))
        if self.config.smooth_3d:
            cameras = context.cameras
            sizes = torch.cat((cameras.width, cameras.height), dim=-1)
            self._cameras = (
                world_to_camera(cameras.camera_to_worlds).to(self.device),
                cameras.get_intrinsics_matrices().to(self.device),
                sizes.to(self.device),
            )
            if not bool(self.gauss_params[INTERVALS].any()):  # a resumed run has them
                self._find_intervals()
                self._are_new = True
            rule.variance = lambda: FILTER_VARIANCE * self.gauss_params[INTERVALS].detach()[:, 0] ** 2
        return rule

    def share_rows(self, largest: Callable[[float], float]) -> None:
        """Primitives that no view sees take the largest interval of all ranks' primitives."""
        self._largest = largest
        if self.config.smooth_3d and largest(float(self._are_new and self.num_points > 0)):
            self._find_intervals()

    def surgery(self, step: int) -> None:
        """The strategy's step, which knows nothing of the intervals, and new intervals."""
        if self.config.smooth_3d:
            del self.gauss_params[INTERVALS]
        super().surgery(step)
        if self.config.smooth_3d:
            self._find_intervals()

    def acts_at(self, step: int) -> bool:
        """Also now and then after the last refinement, for the intervals."""
        return super().acts_at(step) or (self.config.smooth_3d and step % (10 * self.config.refine_every) == 0)

    def load_state_dict(self, dict: Mapping[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """As splatfacto's; a checkpoint without intervals loads with none until it is trained."""
        state = {**dict}
        key, means = f"gauss_params.{INTERVALS}", state.get("means", state.get("gauss_params.means"))
        if self.config.smooth_3d and means is not None:
            state.setdefault(key, torch.zeros(len(means), 1))
        else:
            state.pop(key, None)
        return super().load_state_dict(state, **kwargs)
