"""splatfacto's model on any device, with keyed randomness, exact resume and a seam for the runtime."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from gsplat.strategy import DefaultStrategy
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.models.splatfacto import RGB2SH, SplatfactoModel, SplatfactoModelConfig

from odin_nerfstudio.glue.cameras import world_to_camera
from odin_nerfstudio.glue.compat import without_lpips_download
from odin_nerfstudio.glue.lpips_metric import OptionalLpips
from odin_nerfstudio.rendering import rasterization
from odin_nerfstudio.rendering.losses import photometric_loss
from odin_nerfstudio.runtime.keyed import keyed_generator

NEAR_PLANE, FAR_PLANE = 0.01, 1e10

ROW_FIELDS = ("means", "scales", "quats", "features_dc", "features_rest", "opacities")
"""The per-primitive parameters of splatfacto, in the order of its optimizers."""


@dataclass
class OdinSplatfactoModelConfig(SplatfactoModelConfig):
    """splatfacto's options, unchanged."""

    _target: type = field(default_factory=lambda: OdinSplatfactoModel)


class FedStrategy(DefaultStrategy):
    """gsplat's strategy, fed with statistics by the runtime, lane by lane, instead of by the last rendered view."""

    def _update_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: see :class:`odin_nerfstudio.runtime.statistics.DensificationStatistics`."""

    def acts_at(self, step: int) -> bool:
        """Whether the strategy changes primitives after a step (densify, prune or reset opacities)."""
        refines = step > self.refine_start_iter and step % self.refine_every == 0
        rested = step % self.reset_every >= self.pause_refine_after_reset
        return step < self.refine_stop_iter and ((refines and rested) or step % self.reset_every == 0)


class OdinSplatfactoModel(SplatfactoModel):
    """splatfacto with the same parameters, losses and outputs, on the CPU as well as on CUDA.

    ``task`` names what is being rendered in training, as (seed, step, lane); backgrounds and densification draw
    their random numbers from it.
    """

    config: OdinSplatfactoModelConfig  # type: ignore[assignment]

    def populate_modules(self) -> None:
        """Builds splatfacto's modules; the seed colours, which it moves to CUDA, are filled in here."""
        self.task: tuple[int, int, int] = (0, 0, 0)
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
        settings = {f.name: getattr(self.strategy, f.name) for f in dataclasses.fields(self.strategy)}
        self.strategy = FedStrategy(**settings)

    # Rendering ------------------------------------------------------------------------------------------------

    def get_outputs(self, camera: Cameras) -> dict[str, torch.Tensor | list]:
        """Renders one camera.

        Returns:
            ``rgb [H, W, 3]``, ``accumulation [H, W, 1]``, ``depth [H, W, 1]`` (``None`` in training unless
            ``output_depth_during_training``) and ``background``.
        """
        if not isinstance(camera, Cameras):
            raise TypeError(f"get_outputs takes nerfstudio Cameras, got {type(camera).__name__}")
        if self.training:
            if camera.shape[0] != 1:
                raise ValueError(f"a task renders one camera, got {camera.shape[0]}")
            camera_to_world = self.camera_optimizer.apply_to_camera(camera)
        else:
            camera_to_world = camera.camera_to_worlds

        rows = {name: self.gauss_params[name] for name in ROW_FIELDS}
        if self.crop_box is not None and not self.training:
            inside = self.crop_box.within(self.means).reshape(-1)
            if not inside.any():
                width, height = int(camera.width.item()), int(camera.height.item())
                return self.get_empty_outputs(width, height, self.background_color)  # type: ignore[return-value]
            rows = {name: row[inside] for name, row in rows.items()}

        downscale = self._get_downscale_factor()
        camera.rescale_output_resolution(1 / downscale)
        intrinsics = camera.get_intrinsics_matrices().to(self.device)
        width, height = int(camera.width.item()), int(camera.height.item())
        camera.rescale_output_resolution(downscale)
        self.last_size = (height, width)

        with_depth = self.config.output_depth_during_training or not self.training
        colors, sh_degree = self._colors(rows)
        render, alpha, self.info = rasterization(
            means=rows["means"],
            quats=rows["quats"],
            scales=torch.exp(rows["scales"]),
            opacities=torch.sigmoid(rows["opacities"]).squeeze(-1),
            colors=colors,
            viewmats=world_to_camera(camera_to_world),
            Ks=intrinsics,
            width=width,
            height=height,
            packed=False,
            near_plane=NEAR_PLANE,
            far_plane=FAR_PLANE,
            render_mode="RGB+ED" if with_depth else "RGB",
            sh_degree=sh_degree,
            sparse_grad=False,
            absgrad=self.strategy.absgrad,
            rasterize_mode=self.config.rasterize_mode,
        )
        if self.training:
            self.strategy.step_pre_backward(
                self.gauss_params, self.optimizers, self.strategy_state, self.step, self.info
            )

        background = self._get_background_color()
        rgb = torch.clamp(render[..., :3] + (1 - alpha) * background, 0.0, 1.0)
        if self.config.use_bilateral_grid and self.training and "cam_idx" in (camera.metadata or {}):
            rgb = self._apply_bilateral_grid(rgb, camera.metadata["cam_idx"], height, width)  # type: ignore[index]
        depth = None
        if with_depth:
            depth = render[..., 3:4]
            depth = torch.where(alpha > 0, depth, depth.detach().max()).squeeze(0)
        if not self.training:
            background = background.expand(height, width, 3)
        return {
            "rgb": rgb.squeeze(0),
            "depth": cast(torch.Tensor, depth),
            "accumulation": alpha.squeeze(0),
            "background": background,
        }

    def _colors(self, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int | None]:
        """Colours for the rasterizer and the degree to evaluate them at (``None``: plain RGB).

        Only the bands of the active degree are passed on: the others have no influence and no gradient.
        """
        if self.config.sh_degree == 0:
            return torch.sigmoid(rows["features_dc"]), None
        degree = self.sh_degree_at(self.step)
        bands = (degree + 1) ** 2 - 1
        return torch.cat((rows["features_dc"][:, None, :], rows["features_rest"][:, :bands]), dim=1), degree

    def sh_degree_at(self, step: int) -> int:
        """The spherical-harmonics degree in use at a step."""
        return min(step // self.config.sh_degree_interval, self.config.sh_degree)

    def downscale_at(self, step: int) -> int:
        """The factor by which images are smaller at a step of training."""
        return 2 ** max(self.config.num_downscales - step // self.config.resolution_schedule, 0)

    def _get_downscale_factor(self) -> int:
        return self.downscale_at(self.step) if self.training else 1

    def _get_background_color(self) -> torch.Tensor:
        if self.training and self.config.background_color == "random":
            seed, step, lane = self.task
            return torch.rand(3, generator=keyed_generator(seed, "background", step, lane)).to(self.device)
        return super()._get_background_color()

    # Loss and metrics -----------------------------------------------------------------------------------------

    def _downscale_if_required(self, image: torch.Tensor) -> torch.Tensor:
        """Area downscaling as splatfacto's, by a pooling whose bits do not depend on the number of threads."""
        factor = self._get_downscale_factor()
        if factor == 1:
            return image
        pooled = torch.nn.functional.avg_pool2d(image.float().permute(2, 0, 1)[None], factor)
        return pooled[0].permute(1, 2, 0)

    def _ground_truth(self, outputs: dict[str, Any], batch: dict[str, Any]) -> torch.Tensor:
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
    ) -> dict[str, torch.Tensor]:
        """splatfacto's losses: that of the image, and the regularizers that are switched on."""
        losses = {"main_loss": self.image_loss(outputs, batch), "scale_reg": torch.zeros((), device=self.device)}
        return losses | self.regularizers()

    def image_loss(self, outputs: dict[str, Any], batch: dict[str, Any]) -> torch.Tensor:
        """(1 - lambda) L1 + lambda (1 - SSIM) of a rendered view."""
        truth, rendered = self._ground_truth(outputs, batch), outputs["rgb"]
        if "mask" in batch:
            mask = self._downscale_if_required(batch["mask"]).to(self.device)
            if mask.shape[:2] != rendered.shape[:2]:
                raise ValueError(f"mask is {tuple(mask.shape[:2])}, the rendered image {tuple(rendered.shape[:2])}")
            truth, rendered = truth * mask, rendered * mask
        return photometric_loss(rendered, truth, self.config.ssim_lambda)

    def regularizers(self) -> dict[str, torch.Tensor]:
        """Losses that touch every row without needing a view; the runtime adds their gradients at publication."""
        losses: dict[str, torch.Tensor] = {}
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

    def elongation(self, log_scales: torch.Tensor) -> torch.Tensor:
        """By how much the ratio of largest to smallest scale exceeds ``max_gauss_ratio``. ``[N, 3]`` -> ``[N]``."""
        scales = torch.exp(log_scales)
        ratio = scales.amax(dim=-1) / scales.amin(dim=-1)
        return ratio.clamp_min(self.config.max_gauss_ratio) - self.config.max_gauss_ratio

    def get_image_metrics_and_images(
        self, outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """splatfacto's evaluation; LPIPS is left out where its weights cannot be had (NaN is not JSON)."""
        metrics, images = super().get_image_metrics_and_images(outputs, batch)
        return {k: v for k, v in metrics.items() if not (k.endswith("lpips") and math.isnan(v))}, images

    # Structural steps, checkpoints ----------------------------------------------------------------------------

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        """Only the one that notes the step: the trainer calls :meth:`surgery` when every contribution is in."""
        before = [TrainingCallbackLocation.BEFORE_TRAIN_ITERATION]
        return [TrainingCallback(before, self.step_cb, args=[training_callback_attributes.optimizers])]

    def surgery(self, step: int) -> None:
        """The strategy's structural step. The caller keys torch's global generators by (seed, step)."""
        self.strategy.step_post_backward(
            self.gauss_params, self.optimizers, self.strategy_state, step, info={}, packed=False
        )

    def load_state_dict(self, dict: dict[str, torch.Tensor], **kwargs: Any) -> Any:  # type: ignore[override]
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
            self.strategy_state[name] = value.to(self.device) if isinstance(value, torch.Tensor) else value
