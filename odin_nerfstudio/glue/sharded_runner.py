"""One step of training with sharded primitives: the model renders splats that the ranks' owners have projected."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from odin_nerfstudio.glue.agreement import facts_of, require_agreement
from odin_nerfstudio.glue.cameras import world_to_camera
from odin_nerfstudio.glue.mcmc import OdinMcmcStrategy
from odin_nerfstudio.glue.mcmc_shard import ShardMcmcStrategy
from odin_nerfstudio.glue.odin_model import FAR_PLANE, NEAR_PLANE, OdinSplatfactoModel
from odin_nerfstudio.glue.odin_pipeline import OdinPipeline
from odin_nerfstudio.glue.panel_outputs import painted
from odin_nerfstudio.glue.shard_rows import cut_model, rows_of, shard_tree
from odin_nerfstudio.glue.step_runner import StepRunner
from odin_nerfstudio.glue.step_timer import StepTimer
from odin_nerfstudio.glue.strategies import FedStrategy
from odin_nerfstudio.glue.tables import CAMERAS, GRIDS, model_tables
from odin_nerfstudio.rendering.stages import Projection, StageView, ViewSplats, viewmat_gradient
from odin_nerfstudio.runtime.noise import PositionNoise
from odin_nerfstudio.runtime.shadow import TableShadow, Task
from odin_nerfstudio.runtime.sharded.crop import Crop
from odin_nerfstudio.runtime.sharded.engine import ShardedEngine
from odin_nerfstudio.runtime.sharded.requests import Requests
from odin_nerfstudio.runtime.sharded.surgery import ShardStrategy
from odin_nerfstudio.runtime.sharded.views import ViewTask
from odin_nerfstudio.runtime.store import DenseTerm
from odin_nerfstudio.runtime.transport import Transport


class FedShardStrategy(ShardStrategy, FedStrategy):
    """splatfacto's strategy on a shard."""

    def step_pre_backward(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: what is rasterized are leaves, whose gradients stay."""


def shard_strategy(strategy: Any) -> FedShardStrategy | ShardMcmcStrategy:
    """The strategy of a shard for one of a whole model."""
    kind: Any = ShardMcmcStrategy if isinstance(strategy, OdinMcmcStrategy) else FedShardStrategy
    made = kind.like(strategy)
    made.verbose = False
    return made


class ModelProjector:
    """Projects rows of splatfacto's parameters into training views."""

    def __init__(self, model: OdinSplatfactoModel, cameras: Cameras) -> None:
        """cameras: all training views ``[V]``, undistorted, on the CPU."""
        self._model, self._cameras = model, cameras
        self._known: dict[tuple[int, int, bool], StageView] = {}
        self._poses: Tensor | None = None
        if model.camera_optimizer.config.mode != "off":
            self._poses = model.camera_optimizer.pose_adjustment
            # One of its own: the model's belongs to the training thread, and owners may work in another.
            self._mover = model.camera_optimizer.config.setup(num_cameras=1, device="cpu")

    @property
    def kind(self) -> type[ViewSplats]:
        """What kind of splats the model renders."""
        return self._model.splat_kind

    def view(self, step: int, view: int) -> StageView:
        """The camera of a training view, as ``get_outputs`` renders it."""
        downscale, with_depth = self._model.downscale_at(step), self._model.renders_depth(step)
        key = (view, downscale, with_depth)
        if key not in self._known:
            camera = self._cameras[view : view + 1]
            camera.rescale_output_resolution(1 / downscale)
            self._known[key] = self.stage_view(
                world_to_camera(camera.camera_to_worlds),
                camera.get_intrinsics_matrices(),
                int(camera.width.item()),
                int(camera.height.item()),
                with_depth,
            )
        if self._poses is None:
            return self._known[key]
        with torch.no_grad():
            matrix = self._moved(view, self._poses.detach()[view : view + 1].cpu())[0]
        return dataclasses.replace(self._known[key], viewmat=matrix, trained=True)

    def _moved(self, view: int, pose: Tensor) -> Tensor:
        """World to camera of a training view whose pose is trained. pose [1, 6] -> [1, 4, 4]."""
        camera = self._cameras[view : view + 1]
        camera.metadata = {"cam_idx": 0}
        self._mover.pose_adjustment.data = pose
        return world_to_camera(self._mover.apply_to_camera(camera)).float().contiguous()

    def pose_backward(self, task: Task, sums: Tensor, tables: Mapping[str, TableShadow]) -> None:
        """Leave the gradient of a view's pose in its shadow; see `runtime.sharded.view_rows`."""
        leaf = tables[CAMERAS].leaves["pose_adjustment"]
        gradient = viewmat_gradient(sums, self.view(task.step, task.view))
        with torch.enable_grad():
            matrix = self._moved(task.view, leaf.detach().cpu())
            (found,) = torch.autograd.grad(matrix, self._mover.pose_adjustment, gradient[None])
        leaf.grad = found.to(leaf.device)

    def stage_view(self, viewmats: Tensor, Ks: Tensor, width: int, height: int, with_depth: bool) -> StageView:
        """One camera, as the model's ``render`` is given it, on the CPU."""
        antialiased = self._model.config.rasterize_mode == "antialiased"
        matrix, K = (t.detach()[0].float().cpu().contiguous() for t in (viewmats, Ks))
        return StageView(matrix, K, width, height, NEAR_PLANE, FAR_PLANE, 0.0, 0.3, with_depth, antialiased)

    def project(self, step: int, view: StageView, leaves: Mapping[str, Tensor]) -> Projection:
        """As the model's ``render`` up to the pixels."""
        return self._model.project(dict(leaves), view, step)


class ShardedRunner(StepRunner):
    """Renders this rank's tasks and owns its shard of the primitives."""

    def __init__(
        self,
        pipeline: OdinPipeline,
        optimizers: Optimizers,
        transport: Transport,
        start_step: int,
        timer: StepTimer,
        rows: tuple[Tensor, int] | None,
        is_fence: Callable[[int], bool],
    ) -> None:
        """
        Args:
            rows: Places of the model's rows in the whole model and its total, where the model has been cut; else None.
            is_fence: Whether something is saved or evaluated after a step; the same on all ranks.

        Raises:
            ValueError: The model has something that sharded placement cannot do.
        """
        options = pipeline.config.odin
        self.pipeline, self.model, self.timer = pipeline, pipeline.splats, timer
        model = self._model = cast(OdinSplatfactoModel, pipeline.model)
        self.plan = pipeline.prepare_training(transport.rank, transport.world_size)
        if rows is None:
            means = model.gauss_params["means"].detach()
            ids = rows_of(shard_tree(means, self.plan, pipeline, transport.world_size), means, transport.rank)
            rows = (ids, means.shape[0])
            cut_model(model, ids)
        cameras = pipeline.datamanager.train_dataset.cameras
        strategy = shard_strategy(model.strategy)
        model.strategy = cast(Any, strategy)
        table, *views = model_tables(self.model, optimizers, cameras, start_step, pipeline.seed)
        strange = [other.name for other in views if other.name not in (CAMERAS, GRIDS)]
        if strange or not isinstance(table.noise, PositionNoise | None):
            raise ValueError("placement sharded trains primitives, poses and grids; see glue.sharding.refusal")
        table.dense_terms = [self._over_all(term) for term in table.dense_terms]
        self.projector = ModelProjector(model, cameras)
        self.engine: Any = ShardedEngine(
            self.plan,
            table,
            rows[0].int(),
            rows[1],
            self.projector,
            transport,
            options.policy(),
            options.engine_options(pipeline.seed),
            self.model.acts_at,
            is_fence,
            start_step,
            local=self.plan.local,
            view_tables=views,
            pose_backward=self.projector.pose_backward if any(v.name == CAMERAS for v in views) else None,
        )
        strategy.engine = self.engine
        self.requests = Requests(self.engine, self._painted)
        if isinstance(strategy, ShardMcmcStrategy):
            strategy.requests = self.requests
        for noise in (table.noise, getattr(table.reads, "noise", None)):
            if noise is not None:
                noise.places = lambda: self.engine.owner.ids
        model.share_rows(self._largest)
        self._splats: ViewSplats | None = None
        self._training = threading.get_ident()
        model.remote = self._splats_of
        if transport.world_size > 1:
            facts = facts_of(self.plan.fingerprint(), odin=options, model=pipeline.config.model)
            facts["options"]["device type"] = model.device.type  # splats of the CPU have other columns
            require_agreement(self.engine, facts)
        counts = self.engine.exchange(rows[0].shape[0].to_bytes(8, "little"))
        if transport.rank == 0:
            shares = ", ".join(str(int.from_bytes(c, "little")) for c in counts)
            CONSOLE.log(f"Sharded: {rows[1]} primitives, {shares} by rank (--pipeline.odin.placement)")

    def _largest(self, value: float) -> float:
        """The largest of all ranks' values; collective."""
        return max(float(v) for v in self.engine.exchange(repr(value).encode()))

    def _over_all(self, term: DenseTerm) -> DenseTerm:
        """A term over this rank's rows, weighted by the number of all."""
        return dataclasses.replace(
            term, gradient=lambda step, _, values: term.gradient(step, self.engine.owner.total, values)
        )

    def _painted(self, rows: Mapping[str, Tensor], kind: str, values: Tensor | None) -> Mapping[str, Tensor]:
        """Rows with colours that show what happens to them."""
        return painted(rows, kind, values, self._model.config.sh_degree, self.engine.owner.lookahead)

    def _splats_of(self, view: dict[str, Any], shows: str | None = None) -> ViewSplats:
        """What the model's ``render`` rasterizes: the task's splats or, for any other picture, what owners answer.

        shows: One of `row_watch.KINDS`, to be seen instead of colours.
        """
        if self._splats is not None and threading.get_ident() == self._training:
            return self._splats
        with_depth = view["render_mode"] != "RGB"
        stage = self.projector.stage_view(view["viewmats"], view["Ks"], view["width"], view["height"], with_depth)
        box = self._model.crop_box
        crop = None if box is None else Crop(box.R.float(), box.T.float(), box.S.float())
        return self.requests.splats(stage, self._model.step, crop, shows)

    def _run_task(self, task: Task, with_metrics: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        model, timer, lanes = self._model, self.timer, self.plan.views_per_step
        model.task = (self.pipeline.seed, task.step, task.lane)
        with timer.phase("data"):
            camera, batch = self.pipeline.datamanager.train_view(task.view)
            camera.metadata = {**(camera.metadata or {}), "cam_idx": 0}
        with timer.phase("acquire"):
            mine: ViewTask = self.engine.acquire(task)
        self._splats = mine.splats
        try:
            with timer.phase("render"):
                grids = {} if mine.view is None or GRIDS not in mine.view.tables else mine.view[GRIDS].leaves
                given = {f"bil_grids.{name}": leaf for name, leaf in grids.items()}
                outputs = torch.func.functional_call(model, given, (camera,))
        finally:
            self._splats = None
        with timer.phase("loss"):
            loss = model.image_loss(outputs, batch)
            metrics = model.get_metrics_dict(outputs, batch) if with_metrics else {}
            if metrics:
                metrics["gaussian_count"] = self.engine.owner.total
        with timer.phase("backward"):
            (loss / lanes).backward()
        with timer.phase("contribute"):
            self.engine.contribute(task, mine, {**model.info, "n_cameras": lanes})
        return loss.detach(), metrics
