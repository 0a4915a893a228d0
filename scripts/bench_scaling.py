"""The case study: sharded primitives on 2 to 64 simulated devices, against Grendel's way of synchronizing.

    python scripts/bench_scaling.py RECORDING [RECORDING ...] [--json FILE]

RECORDING is the folder of an ``odin-simulate record``. Every recording is simulated on two classes of clusters, NVLink
with InfiniBand and PCIe with 100 Gbit/s Ethernet, in nodes of 8. The baseline is mode ``barrier``: owners project all
views of a step, exchange all to all, render, exchange all to all. ``random`` is the same in random order, as Grendel
trains; ``strips`` spreads the pixels of a step evenly over all ranks at no cost, the best that splitting views into
strips could do; ``nearby`` gives the views of each step to the ranks that own most of what they see; in ``local`` order
ranks keep to their parts of the scene, and shards follow. Tables, a plot and all figures are written.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import tyro
from bench_quality import put_between_marks
from bench_sync import REPOSITORY
from scaling_tables import plot, tables

from odin_nerfstudio.planning.schedule import ORDERS, Order, Plan
from odin_nerfstudio.planning.shards import assign
from odin_nerfstudio.runtime.recording import load_recording
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.simulation.cluster import MODES, Setup, compute_seconds, plan_of, simulate
from odin_nerfstudio.simulation.fabric import FABRICS, Fabric
from odin_nerfstudio.simulation.network import Link
from odin_nerfstudio.simulation.sharded import STATE_BYTES, ShardedOutcome, simulate_sharded
from odin_nerfstudio.simulation.shards import Cut, ShardedScene, sharded_scene_of

COLUMNS = 59
"""Gradient columns of an active primitive with three bands of harmonics, which replicated ranks send."""
HALO = 0.02
"""Pixels that strips render twice: 10 rows (the loss's window, there and back) in strips of some hundred rows."""


@dataclass
class Options:
    """What to simulate and where to write."""

    recordings: Annotated[list[Path], tyro.conf.Positional]
    """Folders with recordings of checkpoints; the tables call them by their names."""
    ranks: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32, 64])
    """Devices; each renders one view per step."""
    fabrics: list[str] = field(default_factory=lambda: list(FABRICS))
    """Classes of clusters."""
    speed: float = 30.0
    """How many times as fast as recorded the devices project and render."""
    overhead_speed: float = 100.0
    """How many times as fast they do everything else."""
    detail: float = 100.0
    """Primitives that each recorded one stands for, and pixels that each pixel stands for."""
    skew: float = 0.1
    """Spread of compute times beside that of the views."""
    smooth: bool = True
    """Take views' times from a line through their numbers of primitives."""
    steps: int = 16
    """Steps of each simulation."""
    replicated: int = 4
    """Up to so many ranks, placement replicated is simulated, too."""
    variants: list[int] = field(default_factory=lambda: [4, 16, 64])
    """At these numbers of ranks, also with pixels spread evenly, and with views at the ranks that own most of them."""
    what_decides: int = 64
    """At so many ranks of the first recording, also change one assumption at a time; 0: nowhere."""
    seed: int = 0
    """Of plans and everything drawn."""
    json: Path | None = None
    """Keep all figures here; what is there already is not simulated again."""
    plot: Path | None = REPOSITORY / "docs" / "scaling.png"
    """Draw to this image."""
    docs: Path | None = REPOSITORY / "docs" / "scaling.md"
    """Put the tables between the marks of this file."""


@dataclass(frozen=True)
class Device:
    """What is assumed of devices and scene."""

    speed: float
    overhead_speed: float
    detail: float
    skew: float

    def scene(self, sharded: ShardedScene) -> ShardedScene:
        """More detail takes longer per recorded row and pixel, and not per call or task."""
        scene = sharded.scene.faster(self.speed / self.detail, self.overhead_speed / self.detail)
        between = sharded.scene.overheads.between / self.overhead_speed
        scene = replace(scene, overheads=replace(scene.overheads, between=between))
        stages = sharded.stages.faster(self.speed / self.detail, self.overhead_speed)
        return ShardedScene(scene, sharded.means, stages)

    def fabric(self, fabric: Fabric) -> Fabric:
        """Messages are as large as recorded, so that the links are narrower instead."""

        def narrow(link: Link) -> Link:
            return replace(link, bandwidth=link.bandwidth / self.detail)

        return replace(fabric, inside=narrow(fabric.inside), between=narrow(fabric.between))


def smooth(sharded: ShardedScene) -> ShardedScene:
    """Views' times as a line through their visible and candidate primitives: on a busy machine the rest is noise."""
    scene = sharded.scene
    sets = [scene.sets[view] for view in range(scene.views)]
    columns = np.array([[1.0, s.visible, len(s.candidates)] for s in sets])
    line = columns @ np.linalg.lstsq(columns, scene.seconds, rcond=None)[0]
    return replace(sharded, scene=replace(scene, seconds=np.maximum(line, 0.2 * scene.seconds.mean())))


def evenly(scene: ShardedScene, setup: Setup, plan: Plan) -> Any:
    """Compute time of a task where the pixels of a step are spread over all ranks."""
    whole = compute_seconds(scene.scene, setup)
    known: dict[int, float] = {}

    def seconds(task: Task) -> float:
        if task.step not in known:
            lanes = range(plan.views_per_step)
            times = [whole(Task(task.step, n, plan.view(task.step, n))) for n in lanes]
            known[task.step] = (1 + HALO) * statistics.mean(times)
        return known[task.step]

    return seconds


class Nearby:
    """A plan whose views of each step go to the ranks that own most of what they see; steps stay what they are."""

    def __init__(self, plan: Plan, cut: Cut, steps: int) -> None:
        self.steps, self.views_per_step, self.order, self._plan = plan.steps, plan.views_per_step, plan.order, plan
        lanes = range(plan.views_per_step)
        self._views = []
        for step in range(steps):
            views = [plan.view(step, n) for n in lanes]
            own = np.array([cut.visible(v) for v in views])
            self._views.append([views[k] for k in assign(own[:, [plan.rank(step, n) for n in lanes]].T)])

    def view(self, step: int, lane: int) -> int:
        return self._views[step][lane]

    def rank(self, step: int, lane: int) -> int:
        return self._plan.rank(step, lane)


class Study:
    """Simulations of one recording, each of them once."""

    def __init__(self, options: Options, name: str, sharded: ShardedScene, known: list[dict[str, Any]]) -> None:
        self.options, self.name, self.sharded, self.rows = options, name, sharded, known

    def row(self, fabric: str, ranks: int, kind: str, device: Device, case: str = "") -> dict[str, Any]:
        """Figures of one simulation. kind: a mode, or a mode with what is other."""
        key = {"scene": self.name, "fabric": fabric, "ranks": ranks, "kind": kind, "case": case}
        key |= {**vars(device), "steps": self.options.steps}
        for row in self.rows:
            if all(row[k] == v for k, v in key.items()):
                return row
        mode, _, more = kind.partition(", ")
        order: Order = cast(Order, more) if more in ORDERS else "rlg"
        scene, setup = device.scene(self.sharded), self._setup(ranks, FABRICS[fabric], device)
        plan: Any = plan_of(scene.scene, setup, order)
        if more == "nearby":
            plan = Nearby(plan, Cut(scene, plan, ranks, self.options.steps), self.options.steps)
        if more == "replicated":
            row = key | self._replicated(scene, setup, plan, mode)
        else:
            seconds = evenly(scene, setup, plan) if more == "strips" else None
            outcome = simulate_sharded(scene, plan, setup, mode, order, seconds)  # type: ignore[arg-type]
            row = key | self._figures(outcome, scene, setup, plan, device.detail)
        self.rows.append(row)
        print(" ".join(f"{k} {row[k]}" for k in ("scene", "fabric", "ranks", "kind", "case", "rate")), flush=True)
        return row

    def _setup(self, ranks: int, fabric: Fabric, device: Device) -> Setup:
        return Setup(
            ranks=ranks, link=device.fabric(fabric), skew=device.skew, epochs=1e-9, least_steps=self.options.steps,
            seed=self.options.seed, structural_every=0,
        )  # fmt: skip

    def _figures(
        self, outcome: ShardedOutcome, scene: ShardedScene, setup: Setup, plan: Plan, detail: float
    ) -> dict[str, Any]:
        cut = Cut(scene, plan, setup.ranks, outcome.steps)
        views = [(plan.view(s, n), plan.rank(s, n)) for s in range(outcome.steps) for n in range(setup.lanes)]
        seen = [cut.visible(v) for v, _ in views]
        return {
            "rate": outcome.views_per_second,
            "seconds": outcome.seconds,
            "waits": outcome.wait_share,
            "wait": outcome.wait_per_task,
            "late": outcome.delayed_share,
            "efficiency": self._one_rank(scene, setup, plan, outcome.steps) / (setup.ranks * outcome.seconds),
            "busiest": max(outcome.busy) / float(np.mean(outcome.busy)),
            "bytes": detail * outcome.sent / outcome.steps,
            "replicated bytes": detail * self._replicated_bytes(scene, setup.ranks),
            "memory": detail * outcome.memory,
            "whole memory": detail * STATE_BYTES * float(scene.scene.row_sizes.sum()),
            "far": 1 - sum(s[r] for s, (_, r) in zip(seen, views)) / sum(s.sum() for s in seen),
            "owners": float(np.mean([np.count_nonzero(s) for s in seen])),
            "splats": detail * float(np.mean([s.sum() for s in seen])),
        }

    def _replicated_bytes(self, scene: ShardedScene, ranks: int) -> float:
        """Of a step in which every rank sends its view's rows to all others."""
        sets = scene.scene.sets.values()
        mean = statistics.mean(float(s.counts.sum()) * 4 * (1 + COLUMNS) + 12 * s.visible for s in sets)
        return ranks * (ranks - 1) * mean

    @staticmethod
    def _one_rank(scene: ShardedScene, setup: Setup, plan: Plan, steps: int) -> float:
        """Seconds of one device for the same views in steps as large: the sum of all work."""
        costs, stages, sizes = scene.scene.overheads, scene.stages, scene.scene.row_sizes
        whole = compute_seconds(scene.scene, setup)
        total = steps * (costs.publish + costs.bound)
        for task in (Task(s, n, plan.view(s, n)) for s in range(steps) for n in range(setup.lanes)):
            sets = scene.scene.sets[task.view]
            rows = float(sizes[sets.candidates].sum())
            total += costs.between + costs.mark + stages.project.seconds(rows) + stages.back.seconds(rows)
            total += stages.merge.seconds(sets.visible) + stages.split.seconds(sets.visible)
            total += stages.pixels * whole(task)
        return total

    def _replicated(self, scene: ShardedScene, setup: Setup, plan: Plan, mode: str) -> dict[str, Any]:
        outcome = simulate(replace(scene.scene, columns=COLUMNS), plan, setup, mode)  # type: ignore[arg-type]
        return {"rate": outcome.views_per_second, "seconds": outcome.seconds, "waits": outcome.wait_share}


def kinds_at(options: Options, ranks: int) -> list[str]:
    """What is simulated at a number of ranks."""
    kinds = [*MODES, "barrier, random", *(f"{mode}, local" for mode in MODES)]
    if ranks <= options.replicated:
        kinds += [f"{mode}, replicated" for mode in MODES]
    others = [f"{mode}, {what}" for what in ("strips", "nearby") for mode in ("barrier", "throughput")]
    return [*kinds, *others] if ranks in options.variants else kinds


def cases(device: Device) -> dict[str, Device]:
    """One assumption changed at a time."""
    return {
        "no skew": replace(device, skew=0.0),
        "rendering 3 times as fast": replace(device, speed=3 * device.speed),
        "rendering 10 times as fast": replace(device, speed=10 * device.speed),
        "all else than rendering a third as fast": replace(device, overhead_speed=device.overhead_speed / 3),
        "as recorded, no more detail": replace(device, detail=1.0),
    }


def main() -> None:
    """Simulates what the options ask for."""
    options = tyro.cli(Options, description=__doc__)
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())
    device = Device(options.speed, options.overhead_speed, options.detail, options.skew)
    facts = {}
    for number, path in enumerate(options.recordings):
        recording = load_recording(path)
        sharded = sharded_scene_of(recording)
        sharded = smooth(sharded) if options.smooth else sharded
        name = path.name if path.is_dir() else path.parent.name
        facts[name] = {"views": recording.views, "primitives": recording.primitives}
        facts[name] |= {"ms": 1e3 * float(sharded.scene.seconds.mean()), "pixels": sharded.stages.pixels}
        study = Study(options, name, sharded, rows)
        for fabric in options.fabrics:
            for ranks in options.ranks:
                for kind in kinds_at(options, ranks):
                    study.row(fabric, ranks, kind, device)
                if options.json is not None:
                    options.json.write_text(json.dumps(rows, indent=1))
            if options.what_decides and number == 0:
                for case, other in cases(device).items():
                    for kind in ("barrier", "throughput", "barrier, random", "barrier, local", "throughput, local"):
                        study.row(fabric, options.what_decides, kind, other, case)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    mine = [r for r in rows if r["steps"] == options.steps]
    shown = [r for r in mine if r["case"] or all(r[k] == v for k, v in vars(device).items())]
    text = tables(shown, facts, options)
    print(text)
    if options.docs is not None:
        put_between_marks(options.docs, text, "bench_scaling")
    if options.plot is not None:
        plot(shown, options.plot)


if __name__ == "__main__":
    main()
