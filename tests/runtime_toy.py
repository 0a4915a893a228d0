"""A small scene, renderer and training loop for the runtime's tests.

Primitives are discs on a strip; a view sees a window of it. The renderer picks its visible rows first, as a rasterizer
does, so that its bits do not depend on what else the shadow holds. Run through `run_ranks`, which starts real
processes.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from broken_rules import break_rule
from gsplat.strategy import DefaultStrategy
from read_checker import ReadChecker
from torch import Tensor

from odin_nerfstudio.runtime.channels import GlooChannel
from odin_nerfstudio.runtime.engine import Engine, EngineOptions
from odin_nerfstudio.runtime.faults import EXIT_CODE, FaultLimits, RankFailure
from odin_nerfstudio.runtime.gloo import GlooTransport
from odin_nerfstudio.runtime.keyed import derive_seed, keyed_randomness
from odin_nerfstudio.runtime.ordered import OrderedTransport
from odin_nerfstudio.runtime.policies import make_policy
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.runtime.statistics import DensificationStatistics
from odin_nerfstudio.runtime.store import DenseTerm, RowTable, ViewRow
from odin_nerfstudio.runtime.throughput import DelayLimits
from odin_nerfstudio.runtime.transport import LocalTransport

HALF = 1.0
"""Half the width of a view's window."""
ADAM_BOUND = 7.2703
"""Largest move of Adam per step in units of the learning rate, default betas."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Toy:
    """One run."""

    mode: str = "quality"
    lanes: int = 4
    views: int = 8
    primitives: int = 700
    steps: int = 45
    seed: int = 3
    refine_every: int = 10
    reset_every: int = 30
    jitter: float = 0.0
    """Mean of the random pause after each task. [s]"""
    empty_view: bool = False
    """View 0 looks away from everything."""
    empty_lanes: bool = False
    """With fewer views than lanes, leave lanes empty instead of repeating views."""
    lookahead: int = 2
    max_delay: int = 2
    max_overlap: float = 0.3
    max_impact: float = 0.05
    slow: tuple[int, float] = (-1, 0.0)
    """A rank and the mean of the random pause before each of its tasks. [s]"""
    check: bool = False
    """Watch every read (`read_checker`)."""
    broken: str = ""
    """A rule that is broken on purpose (`broken_rules`)."""
    debug: bool = True
    wide: int = 0
    """Spare columns per primitive, to make messages large."""
    save_at: tuple[int, ...] = ()
    start_from: str = ""
    reduce: Literal["auto", "always", "never"] = "never"
    linger: bool = False
    """Off by default: steps of a toy are so cheap that waiting for them would leave nothing to publish in parts."""
    turn_every: int = 0
    """Steps after which lanes go on to the next rank."""
    announce: bool = False
    """Every rank announces a word, each at another step."""
    fault: str = ""
    """What goes wrong, as kind:rank:step."""
    stall: float = 120.0
    carrier: Literal["gloo", "copies", "ordered"] = "gloo"
    """How messages travel: as on the CPU; through buffers, as from a device; in the plan's order, as with NCCL."""
    trace: bool = False


class ToyPlan:
    """Random order, lanes dealt to ranks in turn."""

    def __init__(self, toy: Toy, world_size: int) -> None:
        self.views_per_step, self.steps, self._ranks = toy.lanes, toy.steps, world_size
        self._turn_every = toy.turn_every
        rng = np.random.default_rng(toy.seed)
        if toy.empty_lanes:
            order = [
                np.concatenate([rng.permutation(toy.views), -np.ones(toy.lanes, int)])[: toy.lanes]
                for _ in range(toy.steps)
            ]
            self._order = np.concatenate(order)
        else:
            epochs = toy.steps * toy.lanes // toy.views + 2
            self._order = np.concatenate([rng.permutation(toy.views) for _ in range(epochs)])

    def view(self, step: int, lane: int) -> int:
        return int(self._order[step * self.views_per_step + lane])

    def rank(self, step: int, lane: int) -> int:
        turn = step // self._turn_every if self._turn_every else 0
        return (lane + turn) % self._ranks


class Scene:
    """Parameters, optimizers, strategy and renderer."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        g = torch.Generator().manual_seed(toy.seed)
        n, length = toy.primitives, 2.0 * toy.views

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=g)

        values = {
            "means": torch.cat((rand(n, 1) * length, rand(n, 2) * 2 - 1), 1),
            "scales": torch.log(0.02 + 0.1 * rand(n, 3)),
            "quats": rand(n, 4) - 0.5,
            "opacities": torch.logit(0.1 + 0.5 * rand(n, 1)),
            "features_dc": rand(n, 3),
            "features_rest": torch.zeros(n, 3, 3),
        }
        if toy.wide:
            values["spare"] = rand(n, toy.wide)
        self.rates = {
            "means": 2e-2,
            "scales": 5e-3,
            "quats": 1e-3,
            "opacities": 5e-2,
            "features_dc": 2e-2,
            "features_rest": 1e-2,
            "spare": 1e-3,
        }
        self.parameters = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in values.items()})
        self.optimizers = {k: torch.optim.Adam([p], lr=self.rates[k], eps=1e-15) for k, p in self.parameters.items()}
        self.cameras = torch.nn.ParameterDict({"shift": torch.nn.Parameter(torch.zeros(toy.views, 2))})
        self.camera_optimizers = {"shift": torch.optim.Adam([self.cameras["shift"]], lr=1e-3, eps=1e-15)}
        self.targets = rand(toy.views, 8, 8, 3)
        self.strategy = DefaultStrategy(
            prune_opa=0.05, grow_grad2d=0.2, grow_scale3d=0.06, prune_scale3d=0.5, refine_start_iter=5,
            refine_every=toy.refine_every, reset_every=toy.reset_every, refine_scale2d_stop_iter=1000,
            refine_stop_iter=10**6, absgrad=False, verbose=False,
        )  # fmt: skip
        self.state = self.strategy.initialize_state(1.0)

    def structural(self, step: int) -> bool:
        s = self.strategy
        return (step > s.refine_start_iter and step % s.refine_every == 0) or step % s.reset_every == 0

    def schedule(self, step: int) -> dict[str, float]:
        return {k: r * 0.99**step for k, r in self.rates.items() if k in self.parameters}

    def columns(self, step: int) -> dict[str, int]:
        return {"features_rest": 3 * min(3, step // 15)}

    def center(self, view: int) -> float:
        return -100.0 if self.toy.empty_view and view == 0 else 2.0 * view + 1.0

    def padding(self, view: int) -> dict[str, Tensor]:
        row = {k: torch.zeros(p.shape[1:]) for k, p in self.parameters.items()}
        row["means"] = torch.tensor([1e6, 0.0, 0.0])
        row["quats"] = torch.tensor([1.0, 0, 0, 0])
        return row

    def surgery(self, step: int) -> Callable[[], None]:
        """The stock strategy without its statistics, which the runtime keeps."""

        def act() -> None:
            class Quiet(type(self.strategy)):  # type: ignore[misc]
                def _update_state(self, *args: Any, **kwargs: Any) -> None:
                    pass

            quiet = Quiet(**asdict(self.strategy))
            quiet.step_post_backward(self.parameters, dict(self.optimizers), self.state, step, {}, packed=False)  # type: ignore[arg-type]

        return act

    def render(
        self, leaves: Mapping[str, Tensor] | torch.nn.ParameterDict, shift: Tensor, view: int, bands: int
    ) -> tuple[Tensor, dict[str, Any]]:
        """Image [8, 8, 3] and gsplat-like meta. bands: active columns of features_rest, over 3."""
        means = leaves["means"]
        x = means[:, :1].detach() - self.center(view) - shift[0].detach()
        radius = 3 * torch.exp(leaves["scales"].detach()).max(1).values
        visible = ((x[:, 0].abs() - radius) < HALF).nonzero().flatten()
        radii = torch.zeros(1, means.shape[0])
        radii[0, visible] = radius[visible] * 10
        means2d = torch.zeros(1, means.shape[0], 2, requires_grad=True)
        at = means[visible, :2] - torch.tensor([self.center(view), 0.0]) - shift + means2d[0, visible]
        size = torch.exp(leaves["scales"][visible]).mean(1)
        turn = torch.nn.functional.normalize(leaves["quats"][visible], dim=-1)[:, 0]
        grid = torch.linspace(-HALF, HALF, 8)
        dx, dy = at[:, :1] - grid, at[:, 1:] - grid
        weight = torch.exp(-(dx[:, :, None] ** 2 + dy[:, None, :] ** 2) / (2 * size[:, None, None] ** 2))
        weight = weight * (torch.sigmoid(leaves["opacities"][visible]) * (1 + 0.1 * turn[:, None]))[:, :, None]
        colour = leaves["features_dc"][visible]
        for b in range(bands):
            colour = colour + 0.3 * (b + 1) * leaves["features_rest"][visible, b]
        if "spare" in leaves:
            colour = colour + leaves["spare"][visible].mean(1, keepdim=True)
        image = (weight[..., None] * colour[:, None, None]).sum(0)
        return image, {"means2d": means2d, "radii": radii, "width": 8, "height": 8, "n_cameras": self.toy.lanes}

    def loss(self, image: Tensor, step: int, lane: int, view: int) -> Tensor:
        g = torch.Generator().manual_seed(derive_seed(step, lane))
        return ((image + 0.05 * torch.rand(3, generator=g) - self.targets[view]) ** 2).mean() / self.toy.lanes


def flatness(step: int, total: int, values: Mapping[str, Tensor] | torch.nn.ParameterDict) -> dict[str, Tensor]:
    """Gradient of 0.1 * mean over primitives of (largest / smallest scale - 3)+."""
    scales = values["scales"].detach().clone().requires_grad_(True)
    ratio = scales.max(1).values - scales.min(1).values
    (0.1 * torch.clamp(ratio - 0.7, min=0).sum() / total).backward()
    assert scales.grad is not None
    return {"scales": scales.grad}


def term_due(step: int) -> bool:
    return step % 4 == 2


@dataclass
class ToyReads:
    """Windows widened by how far Adam can have moved means and scales."""

    scene: Scene
    cameras: RowTable | None = None

    def mark(self, step: int, view: int, versions: Tensor, least_lag: int, out: Tensor) -> int:
        scene = self.scene
        lag = (step - versions).clamp(min=least_lag).float()
        oldest = scene.schedule(max(0, step - int(lag.max()) if lag.numel() else step))
        move = ADAM_BOUND * lag * 1.001
        x = scene.parameters["means"].detach()[:, 0] - scene.center(view) - scene.cameras["shift"].detach()[view, 0]
        radius = 3.001 * torch.exp(scene.parameters["scales"].detach().max(1).values + oldest["scales"] * move)
        camera_lag = max(least_lag, step - int(self.cameras.versions[view]) if self.cameras is not None else 1)
        slack = oldest["means"] * move + 1e-3 * ADAM_BOUND * camera_lag + 1e-5
        out.copy_((x.abs() - radius - slack) < HALF)
        return int(out.sum())


def make_engine(toy: Toy, scene: Scene, transport: Any) -> Engine:
    start = load(scene, Path(toy.start_from)) if toy.start_from else 0
    cameras = RowTable(
        "cameras", scene.cameras, scene.camera_optimizers, ViewRow(), lambda step: {"shift": 1e-3}, defer=False
    )
    table = RowTable(
        "primitives", scene.parameters, scene.optimizers, ToyReads(scene, cameras), scene.schedule, scene.padding, 64,
        scene.columns, [DenseTerm("flatness", term_due, flatness)], DensificationStatistics(scene.state),
    )  # fmt: skip
    options = EngineOptions(
        toy.lookahead, toy.seed, stall=toy.stall, debug=toy.debug, trace=toy.trace, reduce=toy.reduce,
        linger=toy.linger,
    )  # fmt: skip
    plan = ToyPlan(toy, transport.world_size)
    policy = make_policy(toy.mode, DelayLimits(toy.max_delay, toy.max_overlap, toy.max_impact))
    return Engine(plan, [table, cameras], transport, policy, options, scene.structural, start)


def render_task(scene: Scene, engine: Engine, task: Task) -> None:
    """One task through hooks 1 and 2."""
    if scene.toy.slow[0] == engine.transport.rank:
        time.sleep(float(np.random.default_rng((task.step, task.lane, 1)).exponential(scene.toy.slow[1])))
    shadow = engine.acquire(task)
    bands = scene.columns(task.step)["features_rest"] // 3
    image, info = scene.render(shadow["primitives"].leaves, shadow["cameras"].leaves["shift"][0], task.view, bands)
    info["means2d"].retain_grad()
    scene.loss(image, task.step, task.lane, task.view).backward()
    if scene.toy.jitter:
        time.sleep(float(np.random.default_rng((task.step, task.lane)).exponential(scene.toy.jitter)))
    engine.contribute(task, shadow, info)


def train(toy: Toy, transport: Any, folder: Path | None = None) -> Engine:
    """The whole run of one rank."""
    scene = Scene(toy)
    engine = make_engine(toy, scene, transport)
    engine.scene = scene  # type: ignore[attr-defined]
    if toy.broken:
        break_rule(engine, toy.broken)
    checker = ReadChecker(engine, DelayLimits(toy.max_delay, toy.max_overlap, toy.max_impact)) if toy.check else None
    kind, rank, when = [*toy.fault.split(":"), "", "-1", "-1"][:3] if toy.fault.count(":") == 2 else ("", "-1", "-1")
    engine.heard = []  # type: ignore[attr-defined]
    for step in range(engine.current, toy.steps):
        for word in engine.due(step):
            engine.heard.append([step, word])  # type: ignore[attr-defined]
        if toy.announce and step == 3 + 2 * transport.rank:
            engine.announce(f"hello-{transport.rank}")
        if step == int(when) and transport.rank == int(rank):
            misbehave(kind)
        for task in engine.tasks(step):
            render_task(scene, engine, task)
        engine.publish(step)
        if scene.structural(step):
            engine.structural(step, scene.surgery(step), scene.state)
        if step + 1 in toy.save_at:
            engine.drain()
            if transport.rank == 0 and folder is not None:
                save(scene, step + 1, folder / f"{step + 1}.pt")
    engine.drain()
    if toy.debug:
        engine.check_ranks()
    if checker is not None and folder is not None:
        checker.write(folder / f"reads.{transport.rank}.json")
    return engine


def misbehave(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), 9)
    elif kind == "stop":
        os.kill(os.getpid(), 19)
    elif kind == "raise":
        raise RuntimeError("the picture is broken")
    elif kind == "hang":
        time.sleep(1000)


def plain_loop(toy: Toy) -> Scene:
    """One process, gradients accumulated over the lanes, stock Adam, stock strategy fed lane by lane."""
    scene, plan = Scene(toy), ToyPlan(toy, 1)
    up = scene.strategy._update_state
    for step in range(toy.steps):
        infos = []
        bands = scene.columns(step)["features_rest"] // 3
        for lane in range(toy.lanes):
            view = plan.view(step, lane)
            if view < 0:
                continue
            image, info = scene.render(scene.parameters, scene.cameras["shift"][view], view, bands)
            info["means2d"].retain_grad()
            scene.loss(image, step, lane, view).backward()
            infos.append(info)
        if term_due(step):
            for name, gradient in flatness(step, len(scene.parameters["means"]), scene.parameters).items():
                scene.parameters[name].grad += gradient
        for name, optimizer in (scene.optimizers | scene.camera_optimizers).items():
            optimizer.param_groups[0]["lr"] = (scene.schedule(step) | {"shift": 1e-3})[name]
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for info in infos:
            up(scene.parameters, scene.state, info | {"gaussian_ids": None}, packed=False)
        with keyed_randomness(toy.seed, step, CPU):
            scene.surgery(step)()
    return scene


def snapshot(scene: Scene) -> dict[str, Tensor]:
    """Parameters, moments and statistics."""
    out = {k: v for k, v in scene.state.items() if isinstance(v, Tensor)}
    for parameters, optimizers in ((scene.parameters, scene.optimizers), (scene.cameras, scene.camera_optimizers)):
        for k, p in parameters.items():
            out[k] = p.detach()
            out |= {f"{k}.{name}": v for name, v in optimizers[k].state[p].items()}
    return out


def save(scene: Scene, step: int, path: Path) -> None:
    torch.save(snapshot(scene) | {"next_step": torch.tensor(step)}, path)


def load(scene: Scene, path: Path) -> int:
    """Restore a snapshot; returns the step to go on with."""
    data = torch.load(path)
    for key in ("grad2d", "count", "radii"):
        scene.state[key] = data.get(key)
    for parameters, optimizers in ((scene.parameters, scene.optimizers), (scene.cameras, scene.camera_optimizers)):
        for k in list(parameters):
            p = parameters[k] = torch.nn.Parameter(data[k])
            optimizers[k].param_groups[0]["params"] = [p]
            optimizers[k].state.clear()
            optimizers[k].state[p] = {name: data[f"{k}.{name}"] for name in ("step", "exp_avg", "exp_avg_sq")}
    return int(data["next_step"])


def _rank_main(rank: int, world_size: int, folder: str, runs: dict[str, Toy]) -> None:
    torch.set_num_threads(1)
    out = Path(folder)
    try:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        for name, toy in runs.items():
            (out / name).mkdir(exist_ok=True)
            grace = 60.0 if toy.fault == "setup" else 8.0  # set-up is long where many tests compile at once
            limits = FaultLimits(stall=toy.stall, heartbeat=min(1.0, toy.stall / 6), exit_grace=grace)
            transport = connect(toy.carrier, limits) if world_size > 1 else LocalTransport()
            if toy.fault.startswith("setup") and rank == 1:
                transport.abort("raised ValueError in set-up: no such capture")
                raise ValueError("no such capture")
            engine = None
            try:
                engine = train(toy, transport, out / name)
                totals = engine.collect()
                heard = engine.gather(json.dumps(engine.heard).encode())  # type: ignore[attr-defined]
                if heard is not None:
                    (out / name / "heard.json").write_text(json.dumps([json.loads(h) for h in heard]))
                if rank == 0:
                    torch.save(snapshot(engine.scene), out / name / "end.pt")  # type: ignore[attr-defined]
                    (out / name / "totals.json").write_text(json.dumps(totals))
                if toy.trace:
                    write_trace(engine, out / name / "trace.json")
                engine.close()
            except Exception as error:
                if engine is not None:
                    engine.abort(error)
                else:
                    transport.abort(f"raised {type(error).__name__}: {error}", getattr(error, "rank", None))
                raise
    except RankFailure as failure:
        (out / f"failure.{rank}").write_text(f"{failure.rank}\n{failure}")
        os._exit(EXIT_CODE)
    except Exception:
        (out / f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)


def connect(carrier: str, limits: FaultLimits) -> GlooTransport:
    if carrier == "ordered":
        return OrderedTransport(GlooChannel, limits)
    return GlooTransport(limits, device=CPU if carrier == "copies" else None)


def write_trace(engine: Engine, path: Path) -> None:
    from odin_nerfstudio.runtime.trace import pack_spans, write_chrome_trace

    parts = engine.gather(pack_spans(engine.telemetry))
    if parts is not None:
        write_chrome_trace(path, parts)


@dataclass(frozen=True)
class Outcome:
    """How a group of processes ended."""

    codes: list[int | None]
    failures: dict[int, tuple[int, str]]
    """By rank: the rank at fault and the message."""
    errors: dict[int, str]
    seconds: list[float]
    """When each process ended, after the start."""


def run_ranks(
    world_size: int,
    folder: Path,
    runs: dict[str, Toy],
    timeout: float = 120,
    during: Callable[[list[Any]], None] | None = None,
    main: Callable[..., None] = _rank_main,
    start: Literal["spawn", "forkserver"] = "spawn",
) -> Outcome:
    """Run the same runs, one after the other, in `world_size` processes; every process is gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    context = cast(SpawnContext, mp.get_context(start))  # either kind; the base class has no Process for a type checker
    begin = time.monotonic()
    processes = [
        context.Process(target=main, args=(r, world_size, str(folder), runs), daemon=True) for r in range(world_size)
    ]
    for p in processes:
        p.start()
    if during is not None:
        during(processes)
    ended: dict[int, float] = {}
    while len(ended) < world_size and time.monotonic() - begin < timeout:
        for r, p in enumerate(processes):
            if r not in ended and p.exitcode is not None:
                ended[r] = time.monotonic() - begin
        time.sleep(0.05)
    codes = [p.exitcode for p in processes]
    for p in processes:
        if p.exitcode is None:
            p.kill()
            p.join(5)
    failures = {}
    for path in folder.glob("failure.*"):
        culprit, text = path.read_text().split("\n", 1)
        failures[int(path.suffix[1:])] = (int(culprit), text)
    errors = {int(p.suffix[1:]): p.read_text() for p in folder.glob("error.*")}
    return Outcome(codes, failures, errors, [ended.get(r, float("inf")) for r in range(world_size)])


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that differ."""
    names = sorted(a.keys() | b.keys())
    return [n for n in names if n not in a or n not in b or a[n].shape != b[n].shape or not torch.equal(a[n], b[n])]


__all__ = ["Outcome", "Toy", "plain_loop", "replace", "run_ranks", "same", "snapshot", "train"]
