"""One process of scripts/bench_bookkeeping.py. Not for direct use."""

from __future__ import annotations

import resource
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.rendering.stages import GRADIENT_COLUMNS, SPLAT_COLUMNS, StageView
from odin_nerfstudio.runtime import engine as engine_module
from odin_nerfstudio.runtime import exchange, messages, publication, rows
from odin_nerfstudio.runtime.candidate_blocks import LEAST_ROWS, BlockBoxes
from odin_nerfstudio.runtime.candidates import MotionBound, ViewTest, candidate_mask
from odin_nerfstudio.runtime.engine import Engine, EngineOptions
from odin_nerfstudio.runtime.gate import QualityPolicy
from odin_nerfstudio.runtime.messages import Contribution, Section
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.reads import MAX_LAG, VisibilityReads, behind_camera
from odin_nerfstudio.runtime.sharded.owner import Owner
from odin_nerfstudio.runtime.sharded.packets import GradientPacket, SplatPacket
from odin_nerfstudio.runtime.statistics import DensificationStatistics
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.telemetry import Telemetry, now
from odin_nerfstudio.runtime.transport import Activity, Kind, LocalTransport, PeerReport, Received

SIDE = 100.0
"""Side of the terrain in scene units."""
CELLS = 1 << 16
"""Cells of the curve along which rows lie."""
SIZE = 800
"""Pixels of an image's side."""
EPOCH = 3
"""Steps after which views come again."""
WARM = 2
IN_TIME = 4
"""Contributions of other ranks that arrive before this rank's next task."""
RATES = {"means": 1.6e-4, "scales": 5e-3}
WIDTHS = {"means": 3, "scales": 3, "quats": 4, "opacities": 1, "features_dc": 3, "features_rest": 45}


@dataclass(frozen=True)
class Job:
    """What a process measures."""

    kind: str
    """"replicated", "owner" or "kernels"."""
    rows: int
    """Rows that it holds."""
    total: int
    """Rows of the whole model."""
    columns: int
    """6: positions and scales; 59: all."""
    ranks: int
    share: float
    steps: int
    order: str

    def expected_bytes(self) -> float:
        """About what it will need at most."""
        seen = self.share * self.total
        steps = EPOCH if self.kind == "owner" else 2 * self.ranks
        return self.rows * (12 * self.columns + 17 + 3 * (self.ranks + 1) + 12) + seen * 12 * self.columns * steps + 6e8


class Stopwatch:
    """Time by category; what lies inside a stretch of another category does not count for the outer one."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, category: str) -> Iterator[None]:
        self._turn()
        self._stack.append(category)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def _turn(self) -> None:
        at = time.perf_counter()
        if self._stack:
            self.spent[self._stack[-1]] += at - self._since
        self._since = at

    def around(self, category: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does the same and counts its time."""

        def timed(*args: Any, **more: Any) -> Any:
            with self(category):
                return call(*args, **more)

        return timed


class Terrain:
    """Primitives and views."""

    def __init__(self, job: Job) -> None:
        self.job = job
        torch.manual_seed(0)
        n, cells = job.rows, max(1, CELLS * job.rows // job.total)
        means, cell = torch.zeros(n, 3), torch.arange(cells)
        noise = np.random.default_rng(0).random((2, CELLS + 1), np.float32)
        for axis in range(2):
            corner = _even_bits(cell >> axis).float().numpy()
            means[:, axis] = torch.from_numpy(np.repeat(corner, -(-n // cells))[:n] + np.resize(noise[axis], n))
            means[:, axis] *= SIDE / CELLS**0.5
        if job.order == "shuffled":
            means = means[torch.randperm(n)]
        spacing = SIDE / job.total**0.5
        values = {"means": means, "scales": torch.full((n, 3), float(np.log(spacing)))}
        if job.columns == 59:
            values |= {k: torch.zeros(n, w) for k, w in WIDTHS.items() if k not in values}
        self.parameters = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in values.items()})
        g = np.random.default_rng(1)
        parts = g.random((EPOCH, job.ranks)) * CELLS / job.ranks + np.arange(job.ranks) * CELLS / job.ranks
        at = torch.from_numpy(parts.astype(np.int64)).reshape(-1)
        self.centers = torch.stack([_even_bits(at), _even_bits(at >> 1)], 1) * (SIDE / CELLS**0.5)

    def view(self, view: int, zoom: float = 1.0) -> StageView:
        """A camera that looks down on its share of the terrain."""
        x, y = self.centers[view].tolist()
        height, half = 30.0, SIDE * self.job.share**0.5 / 2
        matrix = torch.tensor([[1.0, 0, 0, -x], [0, -1, 0, y], [0, 0, -1, height], [0, 0, 0, 1]])
        focal = zoom * SIZE / 2 * height / half
        return StageView(matrix, torch.tensor([[focal, 0, SIZE / 2], [0, focal, SIZE / 2], [0, 0, 1]]), SIZE, SIZE)

    def test(self, view: int, zoom: float = 1.0) -> ViewTest:
        """Its visibility test."""
        v = self.view(view, zoom)
        return ViewTest.of(v.viewmat, v.K, SIZE, SIZE, max_lag=MAX_LAG)

    def table(self) -> RowTable:
        """Rows as the runtime wants them, all moments made."""
        tests = [self.test(view) for view in range(len(self.centers))]
        rates = {name: RATES.get(name, 1e-3) for name in self.parameters}
        state: dict[str, Any] = {"grad2d": None, "count": None, "radii": None}
        table = RowTable(
            "primitives", self.parameters, {k: torch.optim.Adam([p], eps=1e-15) for k, p in self.parameters.items()},
            VisibilityReads(self.parameters, lambda _: rates, lambda _, view: tests[view]), lambda _: rates,
            self._padding, 64, statistics=DensificationStatistics(state),
        )  # fmt: skip
        none = torch.empty(0)
        assert table.statistics is not None
        table.statistics.apply(table.count, none.int(), none, none)
        for name in table.names:
            table.adam_state(name)
        return table

    def _padding(self, view: int) -> dict[str, Tensor]:
        rest = {k: torch.zeros(p.shape[1:]) for k, p in self.parameters.items()}
        return rest | {"means": behind_camera(self.view(view).viewmat)}


def _even_bits(code: Tensor) -> Tensor:
    """The number made of bits 0, 2, 4, ... of a curve's cell."""
    return sum((((code >> (2 * bit)) & 1) << bit for bit in range(8)), torch.zeros_like(code))


class Turns:
    """Lane k is rank k's; views of rank k lie around its own part of the curve."""

    steps = None

    def __init__(self, ranks: int) -> None:
        self.views_per_step = ranks

    def view(self, step: int, lane: int) -> int:
        """View of a task."""
        return step % EPOCH * self.views_per_step + lane

    def rank(self, step: int, lane: int) -> int:
        """Rank of a task."""
        return lane


class Script(LocalTransport):
    """Hands out prepared messages: some at once, the others when the engine waits or a step later."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.world_size = ranks
        self.arrived: deque[Received] = deque()
        self.coming: deque[Received] = deque()

    def send(self, peers: Iterable[int], kind: Kind, words: Tensor, body: Tensor | None = None) -> None:
        """Nobody listens."""

    def receive(self, timeout: float | None) -> Received | None:
        """What has arrived or, if the engine waits, is still coming."""
        if self.arrived:
            return self.arrived.popleft()
        return self.coming.popleft() if timeout != 0 and self.coming else None

    def activity(self, peer: int) -> PeerReport:
        """All are well."""
        return PeerReport(0, Activity.TRAINING, True)


def size(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def state_bytes(table: RowTable) -> int:
    """Everything that a table holds per row."""
    return size([*table.state_tensors().values(), *(table.arrays[name] for name in table.arrays.names())])


def staged_bytes(steps: Mapping[int, Any], pools: Iterable[Any]) -> int:
    """What is held for the steps under way."""
    held: list[Tensor | None] = []
    for staged in steps.values():
        held += [*(staged.pending or [])]
        for lane in staged.lanes:
            held += [*(lane.candidates or []), *lane.rest, *(t for part in lane.parts for pair in part for t in pair)]
    held += [leaf for pool in pools for buffers in pool._buffers for leaf in buffers.values()]
    return size(held)


def watch_publication(watch: Stopwatch, table: RowTable, publisher: Publisher) -> None:
    """Count candidates, Adam and publication."""
    for name in ("whole", "some", "finish", "statistics"):
        setattr(publisher, name, watch.around("publish", getattr(publisher, name)))
    publication.step_parts = watch.around("adam", publication.step_parts)
    object.__setattr__(table, "reads", SimpleNamespace(mark=watch.around("lanes", table.reads.mark)))


def replicated(job: Job, watch: Stopwatch, terrain: Terrain, table: RowTable) -> Iterator[int]:
    """Steps of rank 0; yields the bytes held for steps under way."""
    plan, transport = Turns(job.ranks), Script(job.ranks)
    options = EngineOptions(reduce="never", linger=False)
    engine: Any = Engine(plan, [table], transport, QualityPolicy(), options)
    watch_publication(watch, table, engine.publisher)
    engine.frontier.stage = watch.around("pack", engine.frontier.stage)
    engine_module.contributions = SimpleNamespace(collect=watch.around("pack", engine_module.contributions.collect))
    exchange.messages = SimpleNamespace(**{
        name: watch.around("pack", getattr(messages, name)) for name in ("encode", "decode", "to_device")
    })  # fmt: skip
    width = table.layout(0).total
    # a smaller part of each view, so that steps of the optimizer carry no row across the border
    active = [rows.ids_of_mask(_mask(terrain, table, view)) for view in range(EPOCH * job.ranks)]
    longest = max(len(ids) for ids in active)
    values, norms, radii = 1e-3 * torch.randn(longest, width), torch.rand(longest), torch.rand(longest)
    step = 0
    while True:
        (task,) = engine.tasks(step)
        with watch("gates"):
            shadow = engine.acquire(task)
        mine = shadow[table.name]
        for leaf in mine.leaves.values():
            leaf.grad = torch.full_like(leaf, 1e-3)
        info = {
            "radii": torch.ones(next(iter(mine.leaves.values())).shape[0], dtype=torch.int32), "width": SIZE,
            "height": SIZE, "n_cameras": 1, "means2d": SimpleNamespace(grad=torch.ones(mine.count, 2)),
        }  # fmt: skip
        info["radii"][mine.count :] = 0
        with watch("gates"):
            engine.contribute(task, shadow, info)
        transport.arrived.extend(transport.coming)  # those of the step before, too late for its own gate
        transport.coming.clear()
        with watch("gates"):
            engine.publish(step)
        for lane in range(1, job.ranks):
            ids = active[plan.view(step, lane)]
            n = len(ids)
            section = Section(ids, n, values[:n], values[:0], table.count)
            message = Contribution(step, lane, [section], (ids, norms[:n], radii[:n]))
            words = messages.encode(message, first=True, rest=True)
            line = transport.arrived if lane <= IN_TIME else transport.coming
            line.append(Received(lane, Kind.CONTRIBUTION, words, now()))
        yield staged_bytes(engine.frontier._steps, engine._pools.values())
        step += 1


def _mask(terrain: Terrain, table: RowTable, view: int) -> Tensor:
    still = MotionBound.steady(0.0, 0.0, (0.9, 0.999), max_lag=0)
    return candidate_mask(
        table.parameters["means"].detach(), table.parameters["scales"].detach(), terrain.test(view, 1.1), still
    )[0]


class MadeUp:
    """Splats of rows, all visible, and gradients that cost nothing."""

    def __init__(self, watch: Stopwatch, leaves: Mapping[str, Tensor], count: int) -> None:
        self._watch, self._leaves = watch, leaves
        self.rows = torch.arange(count)
        self.splats = torch.zeros(count, SPLAT_COLUMNS)
        self.radii = torch.ones(count, dtype=torch.int32)

    def info(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def backward(self, rows: Tensor, gradients: Tensor) -> None:
        """Every leaf gets one."""
        with self._watch("made up"):
            for leaf in self._leaves.values():
                leaf.grad = torch.full_like(leaf, 1e-3)


def owner(job: Job, watch: Stopwatch, terrain: Terrain, table: RowTable) -> Iterator[int]:
    """Steps of an owner; yields the bytes held for steps under way."""
    plan, shipped = Turns(job.ranks), deque[SplatPacket]()
    pads = 64  # shadows end with fillers, at most that many
    telemetry, publisher = Telemetry(0), Publisher([table])

    def project(step: int, view: StageView, leaves: Mapping[str, Tensor], *_: Any) -> MadeUp:
        with watch("made up"):
            return MadeUp(watch, leaves, max(0, leaves["means"].shape[0] - pads))

    def ship(rank: int, packet: SplatPacket) -> int:
        if packet.ids.shape[0]:
            shipped.append(packet)
        return 0

    kind = SimpleNamespace(has_norms=True)
    projector: Any = SimpleNamespace(view=lambda step, view: terrain.view(view), project=project, kind=kind)
    ids = torch.arange(table.count, dtype=torch.int32)
    one: Any = Owner(
        plan, table, ids, job.total, QualityPolicy(), publisher, telemetry, projector, 2, lambda: 1 << 30, ship, 0
    )
    watch_publication(watch, table, publisher)
    one.returned = watch.around("pack", one.returned)
    with watch("gates"):
        one.advance()
    while True:
        held = staged_bytes(one._steps, [one._pool])
        step = one.low
        for packet in [p for p in shipped if p.step == step]:
            shipped.remove(packet)
            count = packet.ids.shape[0]
            back = GradientPacket(
                step, packet.lane, count, torch.arange(count), torch.ones(count, GRADIENT_COLUMNS), torch.ones(count)
            )
            with watch("gates"):
                one.returned(back, now())
                one.advance()
        if one.low == step:
            raise RuntimeError(f"step {step} is not published, though everything came back")
        one.current = one.low
        telemetry.finish(step)
        yield held


def run(job: Job) -> dict[str, Any]:
    """A job's figures: seconds per step by category, bytes."""
    torch.set_num_threads(1)
    before = _peak()
    watch, terrain = Stopwatch(), Terrain(job)
    if job.kind == "kernels":
        return asdict(job) | kernel_times(terrain)
    table = terrain.table()
    steps = {"replicated": replicated, "owner": owner}[job.kind](job, watch, terrain, table)
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(WARM + job.steps):
        watch.spent.clear()
        held = next(steps)
        if number < WARM:
            continue
        for name in ("lanes", "gates", "pack", "publish", "adam"):
            found[name].append(watch.spent[name])
        found["work"].append(held / job.rows)
    out: dict[str, Any] = {k: median(v) for k, v in found.items()}
    out |= candidate_times(terrain, table, WARM + job.steps)
    out |= {"kind": job.kind, "rows": job.rows, "total": job.total, "columns": job.columns, "order": job.order}
    out["state"] = state_bytes(table) / job.rows + (4 if job.kind == "owner" else 0)  # places in the whole model
    out["peak"] = _peak() - before
    return out


def candidate_times(terrain: Terrain, table: RowTable, step: int) -> dict[str, float]:
    """Seconds for the candidates of one view, row by row and by blocks, and for the boxes of the blocks."""
    means, scales, mask = table.parameters["means"], table.parameters["scales"], torch.empty_like(table.arrays["mask"])
    motion = MotionBound.steady(RATES["means"], RATES["scales"], (0.9, 0.999), MAX_LAG)
    found: dict[str, list[float]] = defaultdict(list)
    load_kernels(terrain, motion)
    blocks = BlockBoxes()
    for view in range(-1, EPOCH * terrain.job.ranks):
        test = terrain.test(max(view, 0))
        begin = time.perf_counter()
        count = blocks.mark(means, scales, test, motion, table.versions, step, 0, mask)
        found["boxes" if view < 0 else "view"].append(time.perf_counter() - begin)
        found["near"].append(float(blocks.near_share))
        found["candidates"].append(count)
        if view % 4 == 0:
            begin = time.perf_counter()
            known: dict[str, Any] = {"versions": table.versions, "step": step, "out": mask}
            candidate_mask(means.detach(), scales.detach(), test, motion, **known)
            found["each"].append(time.perf_counter() - begin)
    return {name: median(values) for name, values in found.items()}


def load_kernels(terrain: Terrain, motion: MotionBound) -> None:
    """Have what candidates need compiled or loaded."""
    means, scales = (terrain.parameters[name].detach()[:LEAST_ROWS] for name in ("means", "scales"))
    n = means.shape[0]
    versions, mask = torch.zeros(n, dtype=torch.int32), torch.empty(n, dtype=torch.uint8)
    BlockBoxes().mark(means, scales, terrain.test(0), motion, versions, 1, 0, mask)
    candidate_mask(means, scales, terrain.test(0), motion, versions=versions, step=1, out=mask)
    rows.publishable(versions, 0, mask, torch.empty_like(mask))


def kernel_times(terrain: Terrain) -> dict[str, float]:
    """Processor seconds of single passes over positions, scales and what is kept per row; nothing else is made."""
    means, scales = terrain.parameters["means"], terrain.parameters["scales"]
    n = means.shape[0]
    found: dict[str, list[float]] = defaultdict(list)
    versions, mask = torch.zeros(n, dtype=torch.int32), torch.empty(n, dtype=torch.uint8)
    motion = MotionBound.steady(RATES["means"], RATES["scales"], (0.9, 0.999), MAX_LAG)
    load_kernels(terrain, motion)
    blocks = BlockBoxes()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        value = call()
        found[name].append(time.thread_time() - begin)
        return value

    test = terrain.test(0)
    for view in range(4):
        test = terrain.test(view)
        name = "view" if view else "boxes"
        timed(name, lambda: blocks.mark(means, scales, test, motion, versions, 1, 0, mask))  # noqa: B023
    known: dict[str, Any] = {"versions": versions, "step": 1, "out": mask}
    timed("each", lambda: candidate_mask(means.detach(), scales.detach(), test, motion, **known))
    ids = rows.ids_of_mask(mask)
    timed("ids", lambda: rows.ids_of_mask(mask))
    pending = timed("new mask", lambda: torch.zeros(n, dtype=torch.uint8))
    timed("add mask", lambda: pending.add_(mask))
    timed("publishable rows", lambda: rows.publishable(versions, 0, pending, torch.empty_like(mask)))
    timed("fill versions", lambda: versions.fill_(1))
    return {name: median(values) for name, values in found.items()} | {"candidates": float(len(ids))}


def _peak() -> int:
    """Most memory of this process so far. [bytes]"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
