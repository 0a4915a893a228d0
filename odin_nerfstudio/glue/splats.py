"""splatfacto's model, apart from its rendering, as :class:`DistributedSplats`: base of every method of this package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from gsplat.strategy import DefaultStrategy
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.models.splatfacto import RGB2SH, SplatfactoModel
from torch import Tensor

from odin_nerfstudio.glue.compat import without_lpips_download
from odin_nerfstudio.glue.lpips_metric import OptionalLpips
from odin_nerfstudio.glue.splat_protocol import TrainingContext
from odin_nerfstudio.glue.strategies import FedStrategy
from odin_nerfstudio.rendering.losses import photometric_loss
from odin_nerfstudio.runtime.keyed import keyed_generator
from odin_nerfstudio.runtime.reads import VisibilityReads
from odin_nerfstudio.runtime.statistics import DensificationStatistics
from odin_nerfstudio.runtime.store import DenseTerm, ReadRule, RowNoise, RowTable, Statistics

ROW_FIELDS = ("means", "scales", "quats", "features_dc", "features_rest", "opacities")
"""The per-primitive parameters of splatfacto, in the order of its optimizers."""


class OdinSplats(SplatfactoModel):
    """Turns splatfacto, or a model derived from it, into one that ranks can share.

    Another method's model ``Theirs(SplatfactoModel)`` becomes distributed as ``class Mine(OdinSplats, Theirs)``;
    what it adds to splatfacto it says by overriding the methods of
    :class:`~odin_nerfstudio.glue.splat_protocol.DistributedSplats`.
    """

    task: tuple[int, int, int] = (0, 0, 0)
    viewer_outputs: Callable[[dict[str, Any], Cameras], dict[str, Any]] | None = None
    """Adds to what a camera's render gives; set by the panel of a training with a viewer."""

    def populate_modules(self) -> None:
        """Builds the modules; the seed colours, which splatfacto moves to CUDA, are filled in here."""
        seed_points = self.seed_points
        has_colors = seed_points is not None and not self.config.random_init and len(seed_points[1]) > 0
        if seed_points is not None and has_colors:
            self.seed_points = (seed_points[0], seed_points[1][:0])
        with without_lpips_download():
            super().populate_modules()
        self.seed_points = seed_points
        if seed_points is not None and has_colors:
            rgb = seed_points[1].float() / 255
            color = RGB2SH(rgb) if self.config.sh_degree > 0 else torch.logit(rgb, eps=1e-10)
            self.gauss_params["features_dc"].data.copy_(color)
        del self.lpips
        self.lpips = cast(Any, OptionalLpips())
        if type(self.strategy) is DefaultStrategy:
            self.strategy = FedStrategy.like(self.strategy)

    def get_outputs_for_camera(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Any]:
        """splatfacto's, without gradients; in the viewer of a training with the outputs of the panel."""
        outputs = super().get_outputs_for_camera(camera, obb_box)
        if self.viewer_outputs is None:
            return outputs
        with torch.no_grad():
            return self.viewer_outputs(outputs, camera.to(self.device))

    # Rows -----------------------------------------------------------------------------------------------------

    def sh_degree_at(self, step: int) -> int:
        """The spherical-harmonics degree in use at a step."""
        return min(step // self.config.sh_degree_interval, self.config.sh_degree)

    def active_columns(self, step: int) -> dict[str, int]:
        """Only the bands that are switched on have gradients."""
        return {"features_rest": 3 * ((self.sh_degree_at(step) + 1) ** 2 - 1)}

    def dense_terms(self) -> list[DenseTerm]:
        """splatfacto's scale regularization, where it is switched on."""
        if not self.config.use_scale_regularization:
            return []
        return [DenseTerm("scale_reg", self.scale_regularization_due, self._elongation_gradient, ("scales",))]

    def statistics(self) -> Statistics | None:
        """Those of gsplat's ``DefaultStrategy``."""
        strategy = cast(FedStrategy, self.strategy)
        return DensificationStatistics(
            self.strategy_state,
            absgrad=strategy.absgrad,
            key=strategy.key_for_gradient,
            until=lambda step: step < strategy.refine_stop_iter,
        )

    def reads(self, context: TrainingContext) -> ReadRule:
        """The primitives that gsplat's rasterization of 3D Gaussians can make visible."""
        means, scales = context.betas["means"], context.betas["scales"]
        if means != scales:
            raise ValueError(f"means and scales need the same Adam betas, got {means} and {scales}")
        return VisibilityReads(
            cast(Mapping[str, Any], self.gauss_params), context.schedule, context.view_test, means, context.pose
        )

    def row_noise(self, context: TrainingContext) -> RowNoise | None:
        """None."""
        return None

    def further_tables(self, context: TrainingContext) -> list[RowTable]:
        """None."""
        return []

    # Rendering ------------------------------------------------------------------------------------------------

    def downscale_at(self, step: int) -> int:
        """The factor by which images are smaller at a step of training."""
        return 2 ** max(self.config.num_downscales - step // self.config.resolution_schedule, 0)

    def _get_downscale_factor(self) -> int:
        return self.downscale_at(self.step) if self.training else 1

    def _get_background_color(self) -> Tensor:
        if self.training and self.config.background_color == "random":
            seed, step, lane = self.task
            return torch.rand(3, generator=keyed_generator(seed, "background", step, lane)).to(self.device)
        return super()._get_background_color()

    # Loss and metrics -----------------------------------------------------------------------------------------

    def _downscale_if_required(self, image: Tensor) -> Tensor:
        """Area downscaling as splatfacto's, by a pooling whose bits do not depend on the number of threads."""
        factor = self._get_downscale_factor()
        if factor == 1:
            return image
        pooled = torch.nn.functional.avg_pool2d(image.float().permute(2, 0, 1)[None], factor)
        return pooled[0].permute(1, 2, 0)

    def _ground_truth(self, outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        """The image to match, ``[H, W, 3]``; computed once per batch and kept in it."""
        if "ground_truth" not in batch:
            image = self.get_gt_img(batch["image"])
            batch["ground_truth"] = self.composite_with_background(image, outputs["background"])
        return batch["ground_truth"]

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        """splatfacto's training metrics; PSNR without torchmetrics, whose bookkeeping costs more than the metric."""
        truth, rendered = self._ground_truth(outputs, batch), outputs["rgb"].detach()
        metrics: dict[str, Any] = {"psnr": -10 * torch.log10(torch.nn.functional.mse_loss(rendered, truth))}
        if self.config.color_corrected_metrics:
            from nerfstudio.model_components.lib_bilagrid import color_correct

            metrics["cc_psnr"] = self.psnr(color_correct(rendered, truth), truth)
        metrics["gaussian_count"] = self.num_points
        self.camera_optimizer.get_metrics_dict(metrics)
        return metrics

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """splatfacto's losses: that of the image, and the regularizers that are switched on."""
        losses = {"main_loss": self.image_loss(outputs, batch), "scale_reg": torch.zeros((), device=self.device)}
        return losses | self.regularizers()

    def image_loss(self, outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        """(1 - lambda) L1 + lambda (1 - SSIM) of a rendered view."""
        truth, rendered = self._ground_truth(outputs, batch), outputs["rgb"]
        if "mask" in batch:
            mask = self._downscale_if_required(batch["mask"]).to(self.device)
            if mask.shape[:2] != rendered.shape[:2]:
                raise ValueError(f"mask is {tuple(mask.shape[:2])}, the rendered image {tuple(rendered.shape[:2])}")
            truth, rendered = truth * mask, rendered * mask
        return photometric_loss(rendered, truth, self.config.ssim_lambda)

    def regularizers(self) -> dict[str, Tensor]:
        """Losses that touch every row without needing a view; the runtime adds their gradients at publication."""
        losses: dict[str, Tensor] = {}
        if self.config.use_scale_regularization and self.scale_regularization_due(self.step):
            losses["scale_reg"] = 0.1 * self.elongation(self.scales).mean()
        if self.training:
            self.camera_optimizer.get_loss_dict(losses)
            if self.config.use_bilateral_grid:
                from nerfstudio.model_components.lib_bilagrid import total_variation_loss

                losses["tv_loss"] = 10 * total_variation_loss(self.bil_grids.grids)
        return losses

    def scale_regularization_due(self, step: int) -> bool:
        """Whether a step has PhysGaussian's penalty on elongated primitives: every tenth, as in splatfacto."""
        return step % 10 == 0

    def elongation(self, log_scales: Tensor) -> Tensor:
        """By how much the ratio of largest to smallest scale exceeds ``max_gauss_ratio``. ``[N, 3]`` -> ``[N]``."""
        scales = torch.exp(log_scales)
        ratio = scales.amax(dim=-1) / scales.amin(dim=-1)
        return ratio.clamp_min(self.config.max_gauss_ratio) - self.config.max_gauss_ratio

    def _elongation_gradient(self, _step: int, total: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales = values["scales"].detach().clone().requires_grad_(True)
        (self.elongation(scales).sum() * (0.1 / total)).backward()
        assert scales.grad is not None
        return {"scales": scales.grad}

    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """splatfacto's evaluation; LPIPS is left out where its weights cannot be had (NaN is not JSON)."""
        metrics, images = super().get_image_metrics_and_images(outputs, batch)
        substitute = cast(Any, self.lpips).substitute(*images["img"].chunk(2, dim=1))
        if substitute is not None:
            metrics["st_lpips"] = substitute
        return {k: v for k, v in metrics.items() if not (k.endswith("lpips") and math.isnan(v))}, images

    # Structural steps, checkpoints ----------------------------------------------------------------------------

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        """Only the one that notes the step: the trainer calls :meth:`surgery` when every contribution is in."""
        before = [TrainingCallbackLocation.BEFORE_TRAIN_ITERATION]
        return [TrainingCallback(before, self.step_cb, args=[training_callback_attributes.optimizers])]

    def follow_plan(self, steps_per_epoch: int) -> None:
        """No refinement until every view was shown after an opacity reset."""
        self.strategy.pause_refine_after_reset = steps_per_epoch + self.strategy.refine_every

    def acts_at(self, step: int) -> bool:
        """Whether the strategy changes primitives after a step."""
        return cast(FedStrategy, self.strategy).acts_at(step)

    def surgery(self, step: int) -> None:
        """The strategy's structural step. The caller keys torch's global generators by (seed, step)."""
        self.strategy.step_post_backward(
            self.gauss_params, self.optimizers, self.strategy_state, step, info={}, packed=False
        )

    def load_state_dict(self, dict: dict[str, Tensor], **kwargs: Any) -> Any:  # type: ignore[override]
        """Loads a checkpoint of any size, of splatfacto or of this package.

        The parameters keep their identity and get new data: optimizers that exist already go on with them.
        """
        state = {k: v for k, v in dict.items() if not k.startswith("lpips.")}
        if "means" in state:  # the layout before nerfstudio 1.0
            for name in ROW_FIELDS:
                state[f"gauss_params.{name}"] = state.pop(name)
        count = len(state["gauss_params.means"])
        for parameter in self.gauss_params.values():
            parameter.data = torch.zeros((count, *parameter.shape[1:]), device=parameter.device)
            parameter.grad = None
        self.step = 30000  # full spherical-harmonics degree until a trainer says otherwise, as splatfacto does
        return torch.nn.Module.load_state_dict(self, state, **kwargs)

    def resume_state(self) -> dict[str, Any]:
        """What a checkpoint must hold beyond parameters and optimizers to go on exactly: the strategy's state."""
        return {"strategy": dict(self.strategy_state)}

    def load_resume_state(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`resume_state` gave."""
        for name, value in state["strategy"].items():
            self.strategy_state[name] = value.to(self.device) if isinstance(value, Tensor) else value
