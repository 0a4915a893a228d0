"""Times of the two stages of a view, measured as placement sharded runs them, for the simulator."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.glue.odin_model import OdinSplatfactoModel
from odin_nerfstudio.glue.sharded_runner import ModelProjector, shard_strategy
from odin_nerfstudio.glue.sharding import renders_in_stages
from odin_nerfstudio.rendering.stages import ViewSplats
from odin_nerfstudio.runtime import rows
from odin_nerfstudio.runtime.shadow import ShadowPool, Task
from odin_nerfstudio.runtime.sharded.packets import SplatPacket
from odin_nerfstudio.runtime.sharded.views import MergedView, norms_of
from odin_nerfstudio.runtime.stage_costs import Linear, StageCosts
from odin_nerfstudio.runtime.telemetry import now

if TYPE_CHECKING:
    from odin_nerfstudio.glue.odin_trainer import OdinTrainer

PARTS = (1, 2, 8, 32)
"""Each view is projected whole, and by so many owners one of whom is looked at: short calls tell what a call costs."""
VIEWS = 12
REPEATS = 3
"""The shortest time counts."""


def measure_stages(trainer: OdinTrainer, compute: dict[int, float]) -> StageCosts | None:
    """Renders some training views in two stages; nothing is updated.

    Args:
        compute: Time of each view in one piece. [s]

    Returns:
        None where placement sharded cannot train the model, which has no stages then, and where calls return before
        their work is done, on CUDA.
    """
    model = cast(OdinSplatfactoModel, trainer.pipeline.model)
    if not renders_in_stages(type(model)) or model.device.type != "cpu":
        return None
    whole = model.strategy
    try:
        model.strategy = cast(Any, shard_strategy(whole))  # a whole model's wants what the first stage keeps
        return _measured(_Stages(trainer), compute)
    finally:
        model.remote, model.strategy = None, whole


def _measured(stages: _Stages, compute: dict[int, float]) -> StageCosts:
    times: dict[str, tuple[list[float], list[float]]] = {k: ([], []) for k in ("project", "back", "merge", "split")}
    shares = []
    views = sorted(compute)[:: max(1, len(compute) // VIEWS)][:VIEWS]
    for view in views:
        for parts in PARTS:
            runs = [stages.run(view, parts) for _ in range(REPEATS + (view == views[0]))]  # the first one warms up
            best = {name: min(run[name][1] for run in runs) for name in runs[0]}
            for name, (counts, seconds) in times.items():
                counts.append(runs[0][name][0])
                seconds.append(best[name])
            if parts == 1:
                shares.append(best["pixels"] / compute[view])
    fitted = {name: Linear.fit(*measured) for name, measured in times.items()}
    kind = stages.kind
    return StageCosts(
        **fitted,
        pixels=float(np.clip(statistics.median(shares), 0.05, 1.0)),
        splat_bytes=4 * (1 + kind.columns),
        gradient_bytes=4 * kind.gradient_columns,
        norm_bytes=4 * kind.has_norms,
    )


class _Stages:
    """One view in two stages."""

    def __init__(self, trainer: OdinTrainer) -> None:
        self._trainer, self._table = trainer, trainer.runner.engine.tables[0]
        self._model = cast(OdinSplatfactoModel, trainer.pipeline.model)
        self._projector = ModelProjector(self._model, trainer.pipeline.datamanager.train_dataset.cameras)
        self._pool, self._step = ShadowPool(self._table), trainer._start_step

    @property
    def kind(self) -> type[ViewSplats]:
        """What travels."""
        return self._projector.kind

    def run(self, view: int, parts: int) -> dict[str, tuple[int, float]]:
        """Rows and seconds of each part, where the view sees only the first of so many parts of its candidates."""
        table, step, projector = self._table, self._step, self._projector
        table.reads.mark(step, view, table.versions, 1, table.arrays["mask"])
        ids = rows.ids_of_mask(table.arrays["mask"])
        mine = ids[: max(1, ids.shape[0] // parts)].contiguous()
        camera = projector.view(step, view)
        times = [now()]
        shadow = self._pool.take(mine, view)
        projection = projector.project(step, camera, shadow.leaves)
        places = shadow.ids[projection.rows]
        times.append(now())
        half = places.shape[0] // 2  # as if from two owners, so that there is something to merge
        packets = {
            0: SplatPacket(step, 0, places[:half], projection.splats[:half]),
            1: SplatPacket(step, 0, places[half:], projection.splats[half:]),
        }
        merged = MergedView(packets, camera, projector.kind)
        times.append(now())
        task = Task(step, 0, view)
        self._render(task, merged)
        times.append(now())
        norms = None
        if self.kind.has_norms:
            norms = norms_of(table.statistics, step, self._model.info, merged.splats.count)
        back = merged.gradients(task, norms)
        times.append(now())
        active = torch.cat([back[0].rows, half + back[1].rows])
        projection.backward(active, torch.cat([back[0].gradients, back[1].gradients]))
        gradients = {n: leaf.grad.contiguous() for n, leaf in shadow.leaves.items() if leaf.grad is not None}
        layout = table.layout(step)
        rows.pack_active([gradients.get(n) for n in layout.names], layout.widths, shadow.ids, None)
        times.append(now())
        self._pool.give_back(shadow)
        candidates, splats = mine.shape[0], places.shape[0]
        counts = {"project": candidates, "merge": splats, "pixels": splats, "split": splats, "back": candidates}
        return {name: (count, b - a) for (name, count), (a, b) in zip(counts.items(), pairwise(times))}

    def _render(self, task: Task, merged: MergedView) -> None:
        """The second stage, loss and backward pass, as `ShardedRunner` does them."""
        model, trainer = self._model, self._trainer
        model.task = (trainer.pipeline.seed, task.step, task.lane)
        camera, batch = trainer.pipeline.datamanager.train_view(task.view)
        camera.metadata = {**(camera.metadata or {}), "cam_idx": 0}
        splats: Any = merged.splats
        model.remote = lambda _: splats
        outputs: dict[str, Tensor] = cast(Any, model)(camera)
        model.image_loss(outputs, batch).backward()
