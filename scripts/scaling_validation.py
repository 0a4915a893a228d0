"""Checks the simulator of sharded primitives against real runs of 2 and 4 ranks.

    python scripts/scaling_validation.py SCENE [--checkpoint FILE] [--json FILE]

SCENE is a capture with a COLMAP model. Every view of its checkpoint is recorded by one process (``odin-simulate
record``). Then 2 and 4 ranks train on, in stretches that alternate between the modes, on loopback and on links on which
a barrier's exchange takes a share of the compute time: two network namespaces, in which 4 ranks are two nodes of two
(needs root and iproute2; left out, and said, elsewhere). The simulator replays the views of each stretch.

The loopback stretches of mode barrier say how much slower than in the recording everything computes while all ranks
work on one machine: one factor for each number of ranks. The rest is predicted: mode quality, and all modes on slower
links. With fewer cores than ranks, what one rank does slows the others down, which the simulator does not know.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from bench_quality import put_between_marks
from bench_sharded import Options as ShardedOptions
from bench_sharded import job_of, run
from bench_sync import REPOSITORY, hosts, train_checkpoint

from odin_nerfstudio.glue.record_views import record_checkpoint
from odin_nerfstudio.runtime.recording import load_recording
from odin_nerfstudio.simulation.cluster import Setup
from odin_nerfstudio.simulation.fabric import Fabric
from odin_nerfstudio.simulation.network import Link
from odin_nerfstudio.simulation.sharded import ShardedOutcome, simulate_sharded
from odin_nerfstudio.simulation.shards import ShardedScene, sharded_scene_of

FRAMES = 1448 / 1514
"""Payload of a full Ethernet frame, which is what the token bucket counts."""
BURST = 256 * 1024 * FRAMES
LOOPBACK = Link("loopback", 2e9, 1e-4)
MODES = ("barrier", "quality")


@dataclass
class Options:
    """What to measure and where to write."""

    scene: Annotated[Path, tyro.conf.Positional]
    """Capture with a COLMAP model."""
    config: Path | None = None
    """config.yml of a run on the scene whose last checkpoint is used; None: train one."""
    train_steps: int = 700
    """Steps of training before measuring."""
    downscales: int = 0
    """Images are halved this many times."""
    ranks: list[int] = field(default_factory=lambda: [2, 4])
    """Numbers of ranks."""
    shares: list[float] = field(default_factory=lambda: [0.3])
    """Links on which a barrier's messages take this share of the compute time, beside loopback."""
    steps: int = 30
    """Steps in a stretch."""
    repeats: int = 3
    """Stretches of each mode."""
    json: Path | None = None
    """Write all figures here."""
    docs: Path | None = REPOSITORY / "docs" / "scaling.md"
    """Put the table between the marks of this file."""


class Replayed:
    """The views of one stretch of the real run."""

    def __init__(self, views: Sequence[Sequence[int]], ranks: int) -> None:
        self._views, self._ranks = views, ranks
        self.steps, self.views_per_step = len(views), len(views[0])

    def view(self, step: int, lane: int) -> int:
        return self._views[step][lane]

    def rank(self, step: int, lane: int) -> int:
        return lane * self._ranks // self.views_per_step


@contextmanager
def two_nodes(ranks: int, rate: float) -> Iterator[list[list[str]]]:
    """A command prefix for each rank: the first half on one host, the others on another. rate: [Mbit/s]"""
    with hosts(rate) as prefixes:
        yield [prefixes[rank * 2 // ranks] for rank in range(ranks)]


def total(found: Sequence[dict[str, Any]], mode: str, name: str) -> float:
    """Mean over stretches of a mode of a rank's total of something, per step, over all ranks."""
    per_rank = [[s.get(name, 0.0) / s["steps"] for s in one["stretches"] if s["mode"] == mode] for one in found]
    return float(sum(statistics.mean(one) for one in per_rank))


def calibrated(scene: ShardedScene, ranks: int, found: Sequence[dict[str, Any]]) -> tuple[ShardedScene, float]:
    """The scene at the speed that loopback stretches of mode barrier show, and how many times slower that is."""
    measured = statistics.median(s["seconds"] / s["steps"] for s in found[0]["stretches"] if s["mode"] == "barrier")
    slower = 1.0
    for _ in range(3):  # links do not become slower, so that one step may not be enough
        outcomes = predict(scene.faster(1 / slower), ranks, found, "barrier", LOOPBACK)
        slower *= measured / statistics.median(o.seconds / o.steps for o in outcomes)
    return scene.faster(1 / slower), slower


def predict(
    scene: ShardedScene, ranks: int, found: Sequence[dict[str, Any]], mode: Any, link: Link | Fabric
) -> list[ShardedOutcome]:
    """Simulations of the stretches of a mode."""
    out, begin = [], found[0]["first"]
    for stretch in found[0]["stretches"]:
        if stretch["mode"] == mode:
            at, steps = int(stretch["first"] - begin), int(stretch["steps"])
            plan = Replayed(found[0]["views"][at : at + steps], ranks)
            setup = Setup(ranks, plan.views_per_step, link, epochs=1e-9, least_steps=plan.steps, structural_every=0)
            out.append(simulate_sharded(scene, plan, setup, mode))
    return out


def compare(scene: ShardedScene, ranks: int, found: Any, link: Link | Fabric) -> list[dict[str, Any]]:
    """One row per mode: measured and predicted."""
    rows = []
    for mode in MODES:
        real = [s for s in found[0]["stretches"] if s["mode"] == mode]
        times = [1e3 * s["seconds"] / s["steps"] for s in real]
        outcomes = predict(scene, ranks, found, mode, link)
        rows.append(
            {
                "ranks": ranks, "link": link.name, "mode": mode, "measured": statistics.median(times),
                "spread": max(times) - min(times),
                "predicted": statistics.median(1e3 * o.seconds / o.steps for o in outcomes),
                "waits": total(found, mode, "wait") / total(found, mode, "seconds"),
                "predicted waits": statistics.mean(o.wait_share for o in outcomes),
                "bytes": total(found, mode, "sent"),
                "predicted bytes": statistics.mean(o.sent / o.steps for o in outcomes),
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure(options: Options, scene: ShardedScene, checkpoint: Path) -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    given = ShardedOptions(options.scene, downscales=options.downscales, steps=options.steps)
    cores = len(os.sched_getaffinity(0))
    for ranks in options.ranks:
        job = job_of(given, checkpoint, "sharded", ranks, modes=list(MODES), repeats=options.repeats)
        if ranks > cores:
            print(f"{ranks} ranks share {cores} cores: what one does slows the others down")
        found = run(job, [[]] * ranks)
        here, slower = calibrated(scene, ranks, found)
        print(f"{ranks} ranks: {slower:.2f} times as slow as recorded", flush=True)
        rows += compare(here, ranks, found, LOOPBACK)
        sent = total(found, "barrier", "sent")
        compute = sum(total(found, "barrier", name) for name in ("compute", "acquire", "contribute")) / ranks
        for share in options.shares:
            if os.geteuid() != 0 or not shutil.which("tc"):
                print("slower links need root and iproute2: left out")
                break
            nodes = min(2, ranks)
            crossing = sent / ranks * (ranks / nodes) * (ranks - ranks // nodes) / (ranks - 1)  # leaves a node per step
            rate = 8e-6 * crossing / (share * compute)
            between = Link(f"{rate:.0f} Mbit/s", rate * 1e6 / 8 * FRAMES, 2e-4, BURST)
            link: Link | Fabric = between
            if ranks > 2:
                link = Fabric(between.name, LOOPBACK, between, ranks // nodes, shared=True)
            with two_nodes(ranks, rate) as prefixes:
                rows += compare(here, ranks, run(job, prefixes, "10.77.0.1"), link)
    return rows


def table(rows: Sequence[dict[str, Any]], options: Options) -> str:
    """Markdown."""
    cores = len(os.sched_getaffinity(0))
    out = [
        f"`python scripts/scaling_validation.py {options.scene.name} --steps {options.steps} --repeats "
        f"{options.repeats}`, {cores} cores. Mode barrier on loopback is what the rest is predicted from.",
        "",
        "| ranks | link | mode | measured ms/step (spread) | predicted | waits measured | predicted | MB/step measured "
        "| predicted |",
        "| --- " * 9 + "|",
    ]
    for r in rows:
        out.append(
            f"| {r['ranks']} | {r['link']} | {r['mode']} | {r['measured']:.1f} ({r['spread']:.1f}) "
            f"| {r['predicted']:.1f} ({r['predicted'] / r['measured'] - 1:+.1%}) | {r['waits']:.0%} "
            f"| {r['predicted waits']:.0%} | {r['bytes'] / 1e6:.2f} | {r['predicted bytes'] / 1e6:.2f} |"
        )
    return "\n".join(out)


def main() -> None:
    """Records, measures, compares."""
    options = tyro.cli(Options, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.config is None:
            train_checkpoint(options.scene, options.train_steps, options.downscales, folder)
            options.config = next(folder.rglob("config.yml"))
        checkpoint = next(options.config.parent.rglob("step-*.ckpt"))
        record_checkpoint(options.config, folder / "recording", block=1)
        scene = sharded_scene_of(load_recording(folder / "recording"))
        rows = measure(options, scene, checkpoint)
    print(table(rows, options))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.docs is not None:
        put_between_marks(options.docs, table(rows, options), "scaling_validation")


if __name__ == "__main__":
    main()
