"""One step of training through the runtime's three hooks."""

from __future__ import annotations

from typing import Any, cast

import torch
from nerfstudio.engine.optimizers import Optimizers

from odin_nerfstudio.glue.agreement import facts_of, require_agreement
from odin_nerfstudio.glue.odin_pipeline import OdinPipeline
from odin_nerfstudio.glue.step_timer import StepTimer
from odin_nerfstudio.glue.tables import CAMERAS, GRIDS, PRIMITIVES, model_tables
from odin_nerfstudio.runtime.engine import Engine
from odin_nerfstudio.runtime.shadow import Shadow, Task
from odin_nerfstudio.runtime.transport import Transport

PARAMETER_PREFIX = {PRIMITIVES: "gauss_params", CAMERAS: "camera_optimizer", GRIDS: "bil_grids"}
"""Where a table's parameters live in the model, if not in the submodule of its name."""


class StepRunner:
    """Renders this rank's tasks of a step and hands their gradients to the engine.

    splatfacto's rendering code runs unchanged on a shadow: for the time of a task, torch's ``functional_call`` puts
    the shadow's rows in the place of the model's parameters.
    """

    def __init__(
        self, pipeline: OdinPipeline, optimizers: Optimizers, transport: Transport, start_step: int, timer: StepTimer
    ) -> None:
        options = pipeline.config.odin
        self.pipeline, self.model, self.timer = pipeline, pipeline.splats, timer
        self.plan = pipeline.prepare_training(transport.rank, transport.world_size)
        cameras = pipeline.datamanager.train_dataset.cameras
        self.engine = Engine(
            self.plan,
            model_tables(self.model, optimizers, cameras, start_step, pipeline.seed),
            transport,
            options.policy(),
            options.engine_options(pipeline.seed),
            self.model.acts_at,
            start_step,
        )
        if transport.world_size > 1:
            facts = facts_of(self.plan.fingerprint(), odin=options, model=pipeline.config.model)
            require_agreement(self.engine, facts)

    def run(self, step: int, with_metrics: bool) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
        """Renders, contributes, publishes and, where it is due, changes the primitives.

        Args:
            step: the step; one after the last.
            with_metrics: whether regularizers and metrics are wanted for the log.

        Returns:
            Mean loss of this rank's views, losses and metrics (of the last one), all detached.
        """
        engine, datamanager = self.engine, self.pipeline.datamanager
        tasks = engine.tasks(step)
        datamanager.prefetch([self.plan.view(step + 1, task.lane) for task in tasks])
        total = torch.zeros((), device=self.model.device)
        losses: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        for task in tasks:
            loss, metrics = self._run_task(task, with_metrics)
            total += loss
        with self.timer.phase("publish"):
            engine.publish(step)
        mean = total / max(len(tasks), 1)
        losses["main_loss"] = mean
        if with_metrics:
            with torch.no_grad():
                losses |= self.model.regularizers()
        if self.model.acts_at(step):
            with self.timer.phase("structural"):
                engine.structural(step, lambda: self.model.surgery(step), self.model.strategy_state)
        return sum(losses.values(), torch.zeros((), device=self.model.device)), losses, metrics

    def _run_task(self, task: Task, with_metrics: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        model, timer, lanes = self.model, self.timer, self.plan.views_per_step
        model.task = (self.pipeline.seed, task.step, task.lane)
        with timer.phase("data"):
            camera, batch = self.pipeline.datamanager.train_view(task.view)
            camera.metadata = {**(camera.metadata or {}), "cam_idx": 0}  # the only row of a shadow's per-view tables
        with timer.phase("acquire"):
            shadow = self.engine.acquire(task)
        with timer.phase("render"):
            outputs = torch.func.functional_call(cast(torch.nn.Module, model), self._rows_of(shadow), (camera,))
        with timer.phase("loss"):
            loss = model.image_loss(outputs, batch)
            metrics = model.get_metrics_dict(outputs, batch) if with_metrics else {}
        with timer.phase("backward"):
            (loss / lanes).backward()
        with timer.phase("contribute"):
            # The loss is a mean over lanes; counted as so many cameras, 2D gradients keep the size of one view's.
            self.engine.contribute(task, shadow, {**model.info, "n_cameras": lanes})
        return loss.detach(), metrics

    @staticmethod
    def _rows_of(shadow: Shadow) -> dict[str, torch.Tensor]:
        return {
            f"{PARAMETER_PREFIX.get(table, table)}.{name}": leaf
            for table, rows in shadow.tables.items()
            for name, leaf in rows.leaves.items()
        }
