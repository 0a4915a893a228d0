"""A small scene with the real CPU rasterizer, trained replicated or sharded; ranks are real processes.

Primitives lie along a strip, each view looks at a part of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gsplat_reference
import numpy as np
import pretend_device
import pytest
import quick_ranks
import torch
import torch.distributed as dist
from gsplat.strategy import DefaultStrategy
from runtime_toy import Outcome, Toy, ToyPlan, run_ranks
from torch import Tensor

from odin_nerfstudio.glue.mcmc import OdinMcmcStrategy
from odin_nerfstudio.glue.mcmc_shard import ShardMcmcStrategy
from odin_nerfstudio.glue.panel_outputs import painted
from odin_nerfstudio.rendering import rasterization, rasterization_2dgs
from odin_nerfstudio.rendering.stages import Projection, StageView, ViewSplats, project, splats_on
from odin_nerfstudio.rendering.surfel_stages import project_surfels, surfels_on
from odin_nerfstudio.runtime.candidates import ViewTest
from odin_nerfstudio.runtime.engine import Engine, EngineOptions
from odin_nerfstudio.runtime.faults import EXIT_CODE, FaultLimits, RankFailure
from odin_nerfstudio.runtime.gloo import GlooTransport
from odin_nerfstudio.runtime.keyed import derive_seed
from odin_nerfstudio.runtime.noise import PositionNoise
from odin_nerfstudio.runtime.policies import make_policy
from odin_nerfstudio.runtime.reads import MAX_LAG, VisibilityReads
from odin_nerfstudio.runtime.row_watch import KINDS
from odin_nerfstudio.runtime.sharded.engine import ShardedEngine
from odin_nerfstudio.runtime.sharded.requests import Requests
from odin_nerfstudio.runtime.sharded.surgery import ShardStrategy
from odin_nerfstudio.runtime.statistics import DensificationStatistics
from odin_nerfstudio.runtime.store import DenseTerm, RowTable
from odin_nerfstudio.runtime.surfel_candidates import SurfelReads
from odin_nerfstudio.runtime.throughput import DelayLimits
from odin_nerfstudio.runtime.transport import LocalTransport

WIDTH, HEIGHT = 48, 32


@dataclass(frozen=True)
class Run(Toy):
    """One run of the sharded toy; what `Toy` says of discs holds for splats."""

    primitives: int = 500
    steps: int = 20
    refine_every: int = 6
    reset_every: int = 9
    imbalance: float = 0.2
    local: bool = False
    """Several parts of space for each rank, where rows change hands."""
    watch: bool = False
    """Pictures are asked for meanwhile."""
    stop_at: int = -1
    """At this step the last rank says that all shall stop soon."""
    absgrad: bool = True
    antialiased: bool = False
    relocates: bool = False
    """Primitives are relocated and added, and get noise (3DGS-MCMC), instead of being split and pruned."""
    surfels: bool = False
    """Surfels instead of Gaussians, with losses of all of their images."""
    scattered: bool = False
    """Owners by turns instead of by position."""
    pretend: bool = False
    """Primitives are on a device that is none (`pretend_device`), with references of gsplat's functions."""


class SplatScene:
    """Parameters, optimizers, strategy and cameras; of some rows of the model, or of all."""

    def __init__(self, run: Run, rows: Tensor | None = None) -> None:
        self.run = run
        self.device = pretend_device.DEVICE if run.pretend else torch.device("cpu")
        self.kind: type[ViewSplats] = (surfels_on if run.surfels else splats_on)(self.device)
        g = torch.Generator().manual_seed(run.seed)
        n, length = run.primitives, 2.0 * run.views

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=g)

        values = {
            "means": torch.cat((rand(n, 1) * length, rand(n, 1) * 2 - 1, 2 + 2 * rand(n, 1)), 1),
            "scales": torch.log(0.03 + 0.1 * rand(n, 3)),
            "quats": rand(n, 4) - 0.5,
            "opacities": torch.logit(0.2 + 0.6 * rand(n, 1)),
            "features_dc": rand(n, 3),
            "features_rest": torch.zeros(n, 3, 3),
        }
        self.targets = rand(run.views, 4, 6, 3).repeat_interleave(8, 1).repeat_interleave(8, 2).to(self.device)
        if rows is not None:
            values = {k: v[rows] for k, v in values.items()}
        values = {k: v.to(self.device) for k, v in values.items()}
        self.rates = {
            "means": 2e-2, "scales": 1e-2, "quats": 5e-3, "opacities": 5e-2, "features_dc": 2e-2, "features_rest": 5e-3,
        }  # fmt: skip
        self.parameters = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in values.items()})
        self.optimizers = {k: torch.optim.Adam([p], lr=self.rates[k], eps=1e-15) for k, p in self.parameters.items()}
        self.noise: PositionNoise | None = None
        self.strategy: ShardStrategy | ShardMcmcStrategy
        self.stock: DefaultStrategy | OdinMcmcStrategy
        if run.relocates:
            settings = {
                "cap_max": 2 * n, "refine_start_iter": 3, "refine_every": run.refine_every, "min_opacity": 0.3,
            }  # fmt: skip
            self.strategy, self.stock = ShardMcmcStrategy(**settings), OdinMcmcStrategy(**settings)
            self.state = {}
            self.noise = PositionNoise(self.parameters, self.schedule, 300.0, run.seed)
            return
        settings = {
            "prune_opa": 0.08, "grow_grad2d": 0.003, "grow_scale3d": 0.11, "prune_scale3d": 0.15,
            "refine_start_iter": 5, "refine_every": run.refine_every, "reset_every": run.reset_every,
            "refine_stop_iter": 10**6, "absgrad": run.absgrad, "verbose": False,
        }  # fmt: skip
        if run.surfels:
            settings |= {"absgrad": False, "key_for_gradient": "gradient_2dgs", "grow_grad2d": 3e-4}
        self.strategy = ShardStrategy(**settings)
        self.stock = Fed(**settings)
        self.state = self.strategy.initialize_state(1.0)

    def structural(self, step: int) -> bool:
        s = self.strategy
        if isinstance(s, OdinMcmcStrategy):
            return s.acts_at(step)
        return (step > s.refine_start_iter and step % s.refine_every == 0) or step % s.reset_every == 0

    def schedule(self, step: int) -> dict[str, float]:
        return {k: r * 0.99**step for k, r in self.rates.items()}

    @staticmethod
    def degree(step: int) -> int:
        return min(1, step // 8)

    def columns(self, step: int) -> dict[str, int]:
        return {"features_rest": 9 * self.degree(step)}

    def view(self, step: int, view: int) -> StageView:
        center = -100.0 if self.run.empty_view and view == 0 else 2.0 * view + 1.0
        matrix = torch.eye(4)
        matrix[0, 3] = -center
        K = torch.tensor([[60.0, 0, WIDTH / 2], [0, 60.0, HEIGHT / 2], [0, 0, 1]])
        return StageView(matrix, K, WIDTH, HEIGHT, with_depth=True, antialiased=self.run.antialiased)

    def padding(self, view: int) -> dict[str, Tensor]:
        row = {k: torch.zeros(p.shape[1:]) for k, p in self.parameters.items()}
        return row | {"means": torch.tensor([2.0 * view, 0.0, -10.0]), "quats": torch.tensor([1.0, 0, 0, 0])}

    def inputs(self, step: int, leaves: Mapping[str, Any]) -> tuple[Tensor, ...]:
        bands = (self.degree(step) + 1) ** 2 - 1
        colors = torch.cat((leaves["features_dc"][:, None], leaves["features_rest"][:, :bands]), 1)
        opacities = torch.sigmoid(leaves["opacities"]).squeeze(-1)
        return leaves["means"], leaves["quats"], torch.exp(leaves["scales"]), opacities, colors

    def project(self, step: int, view: StageView, leaves: Mapping[str, Tensor]) -> Projection:
        means, quats, scales, opacities, colors = self.inputs(step, leaves)
        first = project_surfels if self.run.surfels else project
        return first(means, quats, scales, opacities, colors, self.degree(step), view)

    def render(self, step: int, view: StageView, leaves: Mapping[str, Any]) -> tuple[Any, ...]:
        means, quats, scales, opacities, colors = self.inputs(step, leaves)
        if self.run.surfels:
            return rasterization_2dgs(
                means, quats, scales, opacities, colors, view.viewmat[None], view.K[None], WIDTH, HEIGHT,
                sh_degree=self.degree(step), render_mode="RGB+ED",
            )  # fmt: skip
        return rasterization(
            means, quats, scales, opacities, colors, view.viewmat[None], view.K[None], WIDTH, HEIGHT,
            sh_degree=self.degree(step), render_mode="RGB+ED", absgrad=self.run.absgrad,
            rasterize_mode="antialiased" if view.antialiased else "classic",
        )  # fmt: skip

    def rasterize(self, splats: ViewSplats) -> tuple[Any, ...]:
        """What `render` gives, from splats."""
        options = {} if self.run.surfels else {"absgrad": self.run.absgrad}
        return splats.rasterize(expected_depth=True, **options)

    def loss(self, images: tuple[Any, ...], step: int, lane: int, view: int) -> Tensor:
        image, alphas, *geometry, _ = images
        g = torch.Generator().manual_seed(derive_seed(step, lane))
        rgb = image[0, ..., :3] + (1 - alphas[0]) * torch.rand(3, generator=g).to(self.device)
        depth = (image[0, ..., 3:] * (alphas[0].detach() > 0.1)).mean() * 1e-3
        if geometry:
            normals, surface, distortion, median = geometry
            depth = depth + 0.05 * (1 - (normals[0] * surface).sum(-1)).mean()
            depth = depth + 0.01 * distortion.mean() + 1e-3 * median.mean()
        return (((rgb - self.targets[view]) ** 2).mean() + depth) / self.run.lanes

    def surgery(self, step: int, strategy: Any) -> None:
        strategy.step_post_backward(self.parameters, dict(self.optimizers), self.state, step, {}, packed=False)


class Fed(DefaultStrategy):
    """The stock strategy without its statistics, which the runtime keeps."""

    def _update_state(self, *args: Any, **kwargs: Any) -> None:
        pass


def elongation(step: int, total: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient of the mean over all primitives of (range of log scales - 0.7)+."""
    scales = values["scales"].detach().clone().requires_grad_(True)
    (torch.clamp(scales.max(1).values - scales.min(1).values - 0.7, min=0).sum() * (0.1 / total)).backward()
    assert scales.grad is not None
    return {"scales": scales.grad}


def make_table(scene: SplatScene, total: Any = None) -> RowTable:
    tests: dict[int, ViewTest] = {}

    def view_test(step: int, view: int) -> ViewTest:
        if view not in tests:
            v = scene.view(step, view)
            tests[view] = ViewTest.of(v.viewmat, v.K, WIDTH, HEIGHT, near=0.01, max_lag=MAX_LAG)
        return tests[view]

    term = elongation if total is None else lambda step, _, values: elongation(step, total(), values)
    rule = SurfelReads if scene.run.surfels else VisibilityReads
    s = scene.strategy
    statistics = None
    if not isinstance(s, ShardMcmcStrategy):
        statistics = DensificationStatistics(scene.state, s.absgrad, s.key_for_gradient)
    return RowTable(
        "primitives", scene.parameters, scene.optimizers,
        rule(scene.parameters, scene.schedule, view_test, noise=scene.noise), scene.schedule, scene.padding,
        64, scene.columns, [DenseTerm("elongation", lambda step: step % 4 == 2, term)],
        statistics, scene.noise,
    )  # fmt: skip


def policy_of(run: Run) -> Any:
    return make_policy(run.mode, DelayLimits(run.max_delay, run.max_overlap, run.max_impact))


def replicated(run: Run, transport: Any) -> dict[str, Tensor]:
    """The whole run with the replicated engine."""
    scene = SplatScene(run)
    options = EngineOptions(run.lookahead, run.seed, stall=run.stall)
    engine = Engine(
        ToyPlan(run, transport.world_size), [make_table(scene)], transport, policy_of(run), options, scene.structural
    )
    for step in range(run.steps):
        for task in engine.tasks(step):
            shadow = engine.acquire(task)
            view = scene.view(step, task.view)
            images = scene.render(step, view, shadow["primitives"].leaves)
            images[-1]["gradient_2dgs" if run.surfels else "means2d"].retain_grad()
            scene.loss(images, step, task.lane, task.view).backward()
            engine.contribute(task, shadow, {**images[-1], "n_cameras": run.lanes})
        engine.publish(step)
        if scene.structural(step):
            engine.structural(step, lambda: scene.surgery(step, scene.stock), scene.state)  # noqa: B023
    engine.drain()
    return state_of(scene)


def state_of(scene: SplatScene) -> dict[str, Tensor]:
    """Parameters, moments and statistics of the scene's rows."""
    out = {k: v for k, v in scene.state.items() if isinstance(v, Tensor)}
    for k, p in scene.parameters.items():
        out[k] = p.detach()
        out |= {f"{k}.{name}": v for name, v in scene.optimizers[k].state[p].items()}
    return out


def owners_of(run: Run, ranks: int) -> Tensor:
    """Owner of each row at the start."""
    rows = torch.arange(run.primitives)
    if run.scattered:
        return rows * 7 % 11 % ranks
    x = SplatScene(run).parameters["means"].detach()[:, 0].cpu()
    return (x / (2.0 * run.views) * ranks).long().clamp(max=ranks - 1)


def sharded(run: Run, transport: Any) -> ShardedEngine:
    """The whole run of one rank with the sharded engine."""
    ids = (owners_of(run, transport.world_size) == transport.rank).nonzero().flatten()
    scene = SplatScene(run, ids)
    options = EngineOptions(run.lookahead, run.seed, stall=run.stall, debug=run.debug)
    holder: list[ShardedEngine] = []
    table = make_table(scene, lambda: holder[0].owner.total)
    engine = ShardedEngine(
        ToyPlan(run, transport.world_size), table, ids.int(), run.primitives, scene, transport, policy_of(run), options,
        scene.structural, imbalance=run.imbalance, local=run.local,
    )  # fmt: skip
    holder.append(engine)
    engine.requests = requests = Requests(engine, colored)  # type: ignore[attr-defined]
    watcher = Watcher(requests, scene) if run.watch and transport.rank == 0 else None
    scene.strategy.engine = engine
    if isinstance(scene.strategy, ShardMcmcStrategy):
        scene.strategy.requests = requests
    if scene.noise is not None:
        scene.noise.places = lambda: engine.owner.ids
    engine.scene = scene  # type: ignore[attr-defined]
    kind, rank, when = [*run.fault.split(":"), "", "-1", "-1"][:3] if run.fault.count(":") == 2 else ("", "-1", "-1")
    rng = np.random.default_rng(transport.rank)
    for step in range(run.steps):
        if step == run.stop_at and transport.rank == transport.world_size - 1:
            engine.announce("stop")
        if "stop" in engine.due(step):
            break
        if step == int(when) and transport.rank == int(rank):
            from runtime_toy import misbehave

            misbehave(kind)
        for task in engine.tasks(step):
            mine = engine.acquire(task)
            images = scene.rasterize(mine.splats)
            scene.loss(images, step, task.lane, task.view).backward()
            if run.jitter:
                time.sleep(float(rng.exponential(run.jitter)))
            engine.contribute(task, mine, {**images[-1], "n_cameras": run.lanes})
        engine.publish(step)
        if scene.structural(step):
            engine.structural(step, lambda: scene.surgery(step, scene.strategy), scene.state)  # noqa: B023
    engine.drain()
    if watcher is not None:
        watcher.end()
    if run.watch:  # the others answer until the watcher is gone
        engine.exchange_of_shards.broadcast(b"")
    return engine


def colored(rows: Mapping[str, Tensor], kind: str, values: Tensor | None) -> Mapping[str, Tensor]:
    """The painter of real trainings."""
    return painted(rows, kind, values, sh_degree=1, lookahead=MAX_LAG)


class Watcher(threading.Thread):
    """Asks for pictures all the time, as a viewer does, from a thread of its own; also for what happens to rows."""

    def __init__(self, requests: Requests, scene: SplatScene) -> None:
        super().__init__(daemon=True)
        self._requests, self._scene = requests, scene
        self._ends = False
        self.pictures = 0
        self.start()

    def run(self) -> None:
        for shows in itertools.cycle((None, *KINDS)):
            if self._ends:
                return
            splats = self._requests.splats(self._scene.view(0, 1), 0, shows=shows)
            with torch.no_grad():
                assert bool(torch.isfinite(splats.rasterize()[0]).all())
            self.pictures += 1
            time.sleep(0.002)

    def end(self) -> None:
        """Lets it end; answers what it still asks."""
        self._ends = True
        while self.is_alive():
            self._requests.pump()
            self.join(0.01)
        assert self.pictures


def gathered(engine: ShardedEngine, folder: Path) -> None:
    """Leaves the whole model's state in a file, with a picture of it and the size of each shard."""
    scene: SplatScene = engine.scene  # type: ignore[attr-defined]
    requests: Requests = engine.requests  # type: ignore[attr-defined]
    state = state_of(scene)
    rows = {k: v for k, v in state.items() if v.dim()}
    whole = requests.gather(rows, lambda _, shape, dtype: torch.full(shape, float("nan"), dtype=dtype))
    sizes = engine.gather(str(len(engine.owner.ids)).encode())
    if whole is not None and sizes is not None:
        view, step = scene.view(scene.run.steps, 1), scene.run.steps
        with torch.no_grad():
            pictures = scene.rasterize(requests.splats(view, step))[:-1]
            rest = {k: v for k, v in state.items() if not v.dim()}
            expected = scene.render(step, view, whole)[:-1]
        # the whole model is not padded, and torch's sigmoid rounds the last rows of a tensor otherwise
        for picture, one in zip(pictures[:3], expected[:3]):  # colours and depth, opacities, normals
            assert torch.allclose(picture.cpu(), one, rtol=0, atol=1e-3 if scene.run.pretend else 1e-5)
        shards = torch.tensor([int(size) for size in sizes])
        torch.save({"state": {**whole, **rest}, "shards": shards}, folder / "end.pt")
    engine.exchange_of_shards.broadcast(b"")


def collected(folder: Path) -> dict[str, Tensor]:
    """The whole model's state that `gathered` left."""
    return torch.load(folder / "end.pt")["state"]


def _rank_main(rank: int, world_size: int, folder: str, runs: dict[str, Run]) -> None:
    torch.set_num_threads(1)
    out = Path(folder)
    pretence = contextlib.ExitStack()
    if any(run.pretend for run in runs.values()):
        gsplat_reference.put_in_place(pytest.MonkeyPatch())
        pretence.enter_context(pretend_device.pretend_device())
    try:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        for name, run in runs.items():
            (out / name).mkdir(exist_ok=True)
            grace = 2.0 if run.fault.startswith("hang") else 8.0
            limits = FaultLimits(stall=run.stall, heartbeat=min(1.0, run.stall / 6), exit_grace=grace)
            device = pretend_device.DEVICE if run.pretend else None
            transport = GlooTransport(limits, device=device) if world_size > 1 else LocalTransport()
            engine = None
            try:
                engine = sharded(run, transport)
                gathered(engine, out / name)
                totals = engine.collect()
                if rank == 0:
                    (out / name / "totals.json").write_text(json.dumps(totals))
                engine.close()
            except Exception as error:
                transport.abort(f"raised {type(error).__name__}: {error}", getattr(error, "rank", None))
                raise
    except RankFailure as failure:
        (out / f"failure.{rank}").write_text(f"{failure.rank}\n{failure}")
        os._exit(EXIT_CODE)
    except Exception:
        (out / f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)


def run_sharded(ranks: int, folder: Path, runs: dict[str, Run], timeout: float = 300) -> Outcome:
    """Run the same runs, one after the other, in `ranks` processes."""
    quick_ranks.start_server("sharded_toy")
    return run_ranks(ranks, folder, {**runs}, timeout, main=_rank_main, start="forkserver")


__all__ = ["Run", "collected", "dataclasses", "replicated", "run_sharded"]
