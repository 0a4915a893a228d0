"""Surfels (2D Gaussian splatting, Huang et al. 2024) with splatfacto's parameters, trained by Odin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import Tensor

from odin_nerfstudio import rendering
from odin_nerfstudio.glue.odin_model import FAR_PLANE, NEAR_PLANE, OdinSplatfactoModel, OdinSplatfactoModelConfig
from odin_nerfstudio.glue.splat_protocol import TrainingContext
from odin_nerfstudio.rendering.stages import Projection, StageView, ViewSplats
from odin_nerfstudio.rendering.surfel_stages import project_surfels, surfels_on
from odin_nerfstudio.runtime.store import ReadRule

LOG_THICKNESS = math.log(1e-6)
"""Third log scale of a surfel. Nothing here reads it; it makes an exported PLY, and a checkpoint loaded as Gaussians,
show thin discs, and lets gsplat's strategy split a surfel within its plane. Splits lower it a little."""


@dataclass
class Odin2dgsModelConfig(OdinSplatfactoModelConfig):
    """splatfacto's options, with the defaults of gsplat's 2DGS trainer for densification, and the geometric losses."""

    _target: type = field(default_factory=lambda: Odin2dgsModel)
    cull_alpha_thresh: float = 0.05
    """threshold of opacity for culling surfels"""
    densify_grad_thresh: float = 0.0002
    """threshold of the gradient of projected centres for densifying"""
    use_absgrad: bool = False
    """must be False: surfels have no absolute gradients"""
    normal_lambda: float = 0.05
    """Weight of the normals' consistency with those of the depth image; 0: off."""
    normal_start_iter: int = 7000
    """Step after which that loss is added."""
    distortion_lambda: float = 0.0
    """Weight of the depth distortion (gsplat's suggestion: 0.01); 0: off."""
    distortion_start_iter: int = 3000
    """Step after which that loss is added."""
    depth_mode: Literal["expected", "median"] = "expected"
    """The depth whose normals the surfels' should agree with."""

    def refusals(self) -> dict[str, tuple[bool, str]]:
        """Options that surfels cannot honour: whether each is used, and why it cannot be."""
        return {
            "--pipeline.model.camera-optimizer.mode": (
                self.camera_optimizer.mode != "off",
                "gsplat's rasterization of surfels has no gradient to the camera; set it to off",
            ),
            "--pipeline.model.rasterize-mode antialiased": (
                self.rasterize_mode != "classic",
                "surfels have a low-pass filter of their own",
            ),
            "--pipeline.model.use-absgrad": (
                self.use_absgrad,
                "gsplat keeps no absolute gradients of surfels; set it to False",
            ),
        }

    def warm_up(self, announce: Callable[[str], None]) -> None:
        """Compiles or loads the CPU kernels of the renderer and of the read rule."""
        from odin_nerfstudio.runtime.surfel_candidates import warm_up

        rendering.warm_up_surfels(announce)
        warm_up()


class Odin2dgsModel(OdinSplatfactoModel):
    """splatfacto with surfels: the plane of the first two axes of each primitive, its normal the third.

    Parameters, checkpoints and exports are splatfacto's; the third scale is `LOG_THICKNESS` and stays untrained.
    """

    config: Odin2dgsModelConfig  # type: ignore[assignment]

    @property
    def splat_kind(self) -> type[ViewSplats]:
        """See the base class."""
        return surfels_on(self.device)

    def populate_modules(self) -> None:
        """splatfacto's modules; flat primitives, and a strategy that looks at gsplat's ``gradient_2dgs``.

        Raises:
            ValueError: an option that surfels cannot honour is switched on.
        """
        for option, (used, reason) in self.config.refusals().items():
            if used:
                raise ValueError(f"{option} does not go with surfels: {reason}")
        super().populate_modules()
        self.gauss_params["scales"].data[:, 2] = LOG_THICKNESS
        self.strategy.key_for_gradient = "gradient_2dgs"

    # Rendering ------------------------------------------------------------------------------------------------

    def render(self, rows: dict[str, Tensor], view: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Rasterizes surfels; see the base class.

        Further outputs, where a depth is rendered: ``median_depth`` and ``distortion`` ``[H, W, 1]``, and the blended
        normals and those of the depth image, in the world, ``[H, W, 3]``: in training as ``normals`` and
        ``surface_normals``, else as colours, ``normal`` and ``surface_normal``.
        """
        if self.training and self.renders_depth(self.step):
            view = {**view, "render_mode": "RGB+ED"}
        depth_mode = self.config.depth_mode
        if self.remote is not None:
            images = self.remote(view).rasterize(expected_depth=True, depth_mode=depth_mode)
        else:
            colors, sh_degree = self.colors_at(rows, self.step)
            scales, opacities = self.scales_and_opacities(rows)
            images = rendering.rasterization_2dgs(
                means=rows["means"],
                quats=rows["quats"],
                scales=scales,
                opacities=opacities,
                colors=colors,
                packed=False,
                near_plane=NEAR_PLANE,
                far_plane=FAR_PLANE,
                sh_degree=sh_degree,
                sparse_grad=False,
                absgrad=False,
                distloss=view["render_mode"] != "RGB",
                depth_mode=depth_mode,
                **view,
            )
        render, alpha, normals, surface, distortion, median, self.info = images
        if surface is None:
            return render, alpha, {}
        more = {"median_depth": median.squeeze(0), "distortion": distortion.squeeze(0)}
        both = {"normal": normals.squeeze(0), "surface_normal": surface.reshape(normals.shape[1:])}
        if self.training:
            return render, alpha, {**more, **{f"{name}s": image for name, image in both.items()}}
        return render, alpha, {**more, **{name: 0.5 * (image + 1) for name, image in both.items()}}

    def project(self, rows: dict[str, Tensor], view: StageView, step: int) -> Projection:
        """See the base class."""
        colors, sh_degree = self.colors_at(rows, step)
        scales, opacities = self.scales_and_opacities(rows)
        return project_surfels(rows["means"], rows["quats"], scales, opacities, colors, sh_degree, view)

    def renders_depth(self, step: int) -> bool:
        """Also where a geometric loss needs one."""
        return self._geometry_due(step) or super().renders_depth(step)

    # Losses ---------------------------------------------------------------------------------------------------

    def normal_weight_at(self, step: int) -> float:
        """Weight of the normals' consistency at a step."""
        return self.config.normal_lambda if step > self.config.normal_start_iter else 0.0

    def distortion_weight_at(self, step: int) -> float:
        """Weight of the depth distortion at a step."""
        return self.config.distortion_lambda if step > self.config.distortion_start_iter else 0.0

    def _geometry_due(self, step: int) -> bool:
        return self.normal_weight_at(step) > 0 or self.distortion_weight_at(step) > 0

    def image_loss(self, outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        """splatfacto's loss of a view and, from their steps on, the geometric losses of 2DGS, as gsplat has them."""
        loss = super().image_loss(outputs, batch)
        if not (self.training and self._geometry_due(self.step)):
            return loss
        mask = self._downscale_if_required(batch["mask"]).to(self.device) if "mask" in batch else None
        if (weight := self.normal_weight_at(self.step)) > 0:
            towards = outputs["surface_normals"] * outputs["accumulation"].detach()
            loss = loss + weight * _mean(1 - (outputs["normals"] * towards).sum(dim=-1, keepdim=True), mask)
        if (weight := self.distortion_weight_at(self.step)) > 0:
            loss = loss + weight * _mean(outputs["distortion"], mask)
        return loss

    def elongation(self, log_scales: Tensor) -> Tensor:
        """By how much the ratio of the two scales exceeds ``max_gauss_ratio``. ``[N, 3]`` -> ``[N]``."""
        return super().elongation(log_scales[:, :2])

    # Rows -----------------------------------------------------------------------------------------------------

    def reads(self, context: TrainingContext) -> ReadRule:
        """The primitives that the rasterization of surfels can make visible."""
        from odin_nerfstudio.runtime.surfel_candidates import SurfelReads

        means, scales = context.betas["means"], context.betas["scales"]
        if means != scales:
            raise ValueError(f"means and scales need the same Adam betas, got {means} and {scales}")
        return SurfelReads(cast(Mapping[str, Any], self.gauss_params), context.schedule, context.view_test, means)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Over all pixels; masked ones count as zero."""
    return (values if mask is None else values * mask).mean()
