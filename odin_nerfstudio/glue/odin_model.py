"""splatfacto's model on any device, with keyed randomness, exact resume and a seam for the runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.models.splatfacto import SplatfactoModelConfig
from torch import Tensor

from odin_nerfstudio.glue.cameras import world_to_camera
from odin_nerfstudio.glue.splats import ROW_FIELDS, OdinSplats
from odin_nerfstudio.rendering import rasterization
from odin_nerfstudio.rendering.stages import Projection, StageView, ViewSplats, project, splats_on

__all__ = ["ROW_FIELDS", "OdinSplatfactoModel", "OdinSplatfactoModelConfig"]

NEAR_PLANE, FAR_PLANE = 0.01, 1e10


@dataclass
class OdinSplatfactoModelConfig(SplatfactoModelConfig):
    """splatfacto's options, unchanged."""

    _target: type = field(default_factory=lambda: OdinSplatfactoModel)


class OdinSplatfactoModel(OdinSplats):
    """splatfacto with the same parameters, losses and outputs, on the CPU as well as on CUDA.

    ``task`` names what is being rendered in training, as (seed, step, lane); backgrounds and densification draw
    their random numbers from it.
    """

    config: OdinSplatfactoModelConfig  # type: ignore[assignment]
    remote: Callable[[dict[str, Any]], ViewSplats] | None = None
    """Where the primitives are sharded: the splats of a view (see ``render``), from whoever owns the primitives."""

    @property
    def splat_kind(self) -> type[ViewSplats]:
        """What ``remote`` gives, and ``project`` makes, on the model's device."""
        return splats_on(self.device)

    def get_outputs(self, camera: Cameras) -> dict[str, Tensor | list]:
        """Renders one camera.

        Returns:
            ``rgb [H, W, 3]``, ``accumulation [H, W, 1]``, ``depth [H, W, 1]`` (``None`` in training unless
            ``output_depth_during_training``), ``background``, and what :meth:`render` adds.
        """
        if not isinstance(camera, Cameras):
            raise TypeError(f"get_outputs takes nerfstudio Cameras, got {type(camera).__name__}")
        if self.training:
            if camera.shape[0] != 1:
                raise ValueError(f"a task renders one camera, got {camera.shape[0]}")
            camera_to_world = self.camera_optimizer.apply_to_camera(camera)
        else:
            camera_to_world = camera.camera_to_worlds

        rows = {name: cast(Tensor, row) for name, row in self.gauss_params.items()}
        if self.crop_box is not None and not self.training and self.remote is None:  # else owners crop
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
        view = {
            "viewmats": world_to_camera(camera_to_world),
            "Ks": intrinsics,
            "width": width,
            "height": height,
            "render_mode": "RGB+ED" if with_depth else "RGB",
        }
        render, alpha, more = self.render(rows, view)
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
            "depth": cast(Tensor, depth),
            "accumulation": alpha.squeeze(0),
            "background": background,
            **more,
        }

    def render(self, rows: dict[str, Tensor], view: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Rasterizes some rows of the primitives and keeps gsplat's ``meta`` in ``info``.

        Args:
            rows: the parameters, as stored; ``[n, ...]``.
            view: ``viewmats [1, 4, 4]``, ``Ks [1, 3, 3]``, ``width``, ``height`` and ``render_mode``.

        Returns:
            Colours (and depth, where the mode has it) ``[1, H, W, 3 or 4]``, opacities ``[1, H, W, 1]``, and further
            outputs of the model by name.
        """
        if self.remote is not None:
            absgrad = getattr(self.strategy, "absgrad", False)
            render, alpha, self.info = self.remote(view).rasterize(absgrad=absgrad, expected_depth=True)
            return render, alpha, {}
        colors, sh_degree = self.colors_at(rows, self.step)
        scales, opacities = self.scales_and_opacities(rows)
        render, alpha, self.info = rasterization(
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
            absgrad=getattr(self.strategy, "absgrad", False),
            rasterize_mode=self.config.rasterize_mode,
            **view,
        )
        return render, alpha, {}

    def project(self, rows: dict[str, Tensor], view: StageView, step: int) -> Projection:
        """``render`` up to the pixels, of rows of the primitives as they are at a step."""
        colors, sh_degree = self.colors_at(rows, step)
        scales, opacities = self.scales_and_opacities(rows)
        return project(rows["means"], rows["quats"], scales, opacities, colors, sh_degree, view)

    def renders_depth(self, step: int) -> bool:
        """Whether the training views of a step are rendered with a depth."""
        return self.config.output_depth_during_training

    def share_rows(self, largest: Callable[[float], float]) -> None:
        """Told before the first step that these are only some of the model's rows; nothing depends on that here.

        largest: the largest of all ranks' values; collective.
        """

    def scales_and_opacities(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Standard deviations ``[n, 3]`` and opacities ``[n]`` of rows of the primitives, for the rasterizer."""
        return torch.exp(rows["scales"]), torch.sigmoid(rows["opacities"]).squeeze(-1)

    def colors_at(self, rows: dict[str, Tensor], step: int) -> tuple[Tensor, int | None]:
        """Colours for the rasterizer at a step, and the degree to evaluate them at (``None``: plain RGB).

        Only the bands of the active degree are passed on: the others have no influence and no gradient.
        """
        if self.config.sh_degree == 0:
            return torch.sigmoid(rows["features_dc"]), None
        degree = self.sh_degree_at(step)
        bands = (degree + 1) ** 2 - 1
        return torch.cat((rows["features_dc"][:, None, :], rows["features_rest"][:, :bands]), dim=1), degree
