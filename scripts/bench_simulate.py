"""Checks the simulator against real runs of two ranks, and asks it about eight devices.

    python scripts/bench_simulate.py validate FOLDER [FOLDER ...] [--shares 0 0.3] [--json FILE]
    python scripts/bench_simulate.py scenes RECORDING [RECORDING ...] [--speed 10] [--json FILE] [--plot FILE]

``validate`` trains a capture with one process, then goes on with two ranks, on loopback and on slower links, as
bench_sync does: first a recorded calibration, one stretch of each mode, then stretches that alternate between the modes
and are only timed. The simulator replays the views of each of these, with the calibration's sets and overheads and the
rate of the link. Compute times are those of the very tasks (``same tasks``: a test of everything but these), or are
drawn from the calibration (``drawn``: a prediction). ``--kept`` predicts again from what an earlier run kept.
Slower links need root and iproute2.

``scenes`` simulates recordings (``odin-simulate record``) on eight devices, in all modes and orders, on several links.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from bench_quality import put_between_marks
from bench_sync import REPOSITORY, hosts, run_ranks, train_checkpoint
from predicted import RANKS, predictions

from odin_nerfstudio.runtime.recording import Recording, load_recording
from odin_nerfstudio.simulation.cluster import MODES, Setup, compare
from odin_nerfstudio.simulation.network import Link, parse_link
from odin_nerfstudio.simulation.results import table_rows
from odin_nerfstudio.simulation.scene import Scene, scene_of

FRAMES = 1448 / 1514
"""Payload of a full Ethernet frame, which is what the token bucket counts."""
BURST = 256 * 1024 * FRAMES
"""Of the token bucket in `bench_sync.hosts`."""
LOOPBACK = Link("loopback", 2e9, 1e-4)
"""What gloo reaches between two processes here, roughly; messages of a megabyte take half a millisecond."""
TURNING = "rlg, lanes turn"
"""RLG order with --pipeline.odin.turn-lanes; compared with a barrier that has it, too."""
KINDS = [*((mode, order) for mode in MODES for order in ("random", "rlg")), ("throughput", TURNING)]
"""Columns of the table, in which a barrier in RLG order is the second."""


@dataclass
class Validate:
    """Measure two ranks and compare with the simulator."""

    folders: Annotated[list[Path], tyro.conf.Positional]
    """Captures with a COLMAP model."""
    checkpoints: Path | None = None
    """Keep trained checkpoints in this folder, and use those that are there."""
    train_steps: int = 700
    """Steps of training before measuring."""
    downscales: int = 1
    """Images are halved this many times."""
    steps: int = 40
    """Steps in a stretch."""
    repeats: int = 4
    """Stretches of each mode."""
    shares: list[float] = field(default_factory=lambda: [0.0, 0.3])
    """Links on which messages take this share of the compute time; 0 is loopback."""
    skew_ms: list[float] = field(default_factory=lambda: [0.0])
    """On loopback, also with a sleep in every task, exponentially distributed with this mean."""
    keep: Path | None = None
    """Keep recordings and times of the ranks in this folder."""
    kept: bool = False
    """The folders are such kept ones: predict again, measure nothing."""
    json: Path | None = None
    """Write all figures here."""
    docs: Path | None = REPOSITORY / "docs" / "simulation.md"
    """Put the table between the marks of this file."""

    def run(self) -> None:
        rows: list[dict[str, Any]] = []
        for folder in self.folders:
            if self.kept:
                found = json.loads((folder / "ranks.json").read_text())
                link = Link(**found["link"])
                rows += self._predict(found["scene"], link, found["skew_ms"], found["ranks"], load_recording(folder))
            else:
                rows += self._measure(folder.resolve())
        print(self.table(rows))
        if self.json:
            self.json.write_text(json.dumps(rows, indent=1))
        if self.docs:
            put_between_marks(self.docs, self.table(rows), "validation")

    def _measure(self, scene: Path) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            kept = (self.checkpoints or folder) / f"{scene.name}-{self.train_steps}-{self.downscales}"
            found = next(kept.rglob("step-*.ckpt"), None)
            checkpoint = found or train_checkpoint(scene, self.train_steps, self.downscales, kept)
            job: dict[str, Any] = {
                **{"scene": str(scene), "checkpoint": str(checkpoint), "downscales": self.downscales, "lanes": RANKS},
                **{"modes": list(MODES), "steps": self.steps, "repeats": self.repeats, "order": "rlg"},
            }
            compute, sent = 0.0, 0.0
            for share in sorted(self.shares):
                for skew in self.skew_ms if share == 0 else [0.0]:
                    job["skew_ms"] = skew
                    if share == 0:
                        ranks, link = run_ranks(job, folder, [[]] * RANKS, worker="simulate_worker.py"), LOOPBACK
                    elif os.geteuid() != 0 or not shutil.which("tc"):
                        print("slower links need root and iproute2: left out")
                        continue
                    else:
                        rate = 8e-6 * sent / (share * compute)
                        with hosts(rate) as prefixes:
                            ranks = run_ranks(job, folder, prefixes, "10.77.0.1", "simulate_worker.py")
                        link = Link(f"{rate:.0f} Mbit/s", rate * 1e6 / 8 * FRAMES, 2e-4, BURST)
                    recording = load_recording(folder / "recorded")
                    if share == 0 and skew == 0:
                        stretches = [s for s in ranks[0]["stretches"] if not s.get("recorded")]
                        sent = statistics.median(s["sent"] / s["steps"] for s in stretches)
                        compute = statistics.median(s["compute"] / s["steps"] for s in stretches)
                    if self.keep:
                        keep = self.keep / f"{scene.name}-{share:g}-{skew:g}"
                        keep.mkdir(parents=True, exist_ok=True)
                        shutil.copy(folder / "recorded" / "recording.npz", keep)
                        about = {"scene": scene.name, "link": vars(link), "skew_ms": skew}
                        (keep / "ranks.json").write_text(json.dumps({**about, "ranks": ranks}))
                    rows += self._predict(scene.name, link, skew, ranks, recording)
        return rows

    def _predict(
        self, scene: str, link: Link, skew: float, ranks: Sequence[dict[str, Any]], recording: Recording
    ) -> list[dict[str, Any]]:
        rows = predictions(scene, link, skew, ranks, recording)
        for row in rows:
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        return rows

    def table(self, rows: Sequence[dict[str, Any]]) -> str:
        """Measured and predicted times as Markdown."""
        names = " ".join(dict.fromkeys(r["scene"] for r in rows))
        skews = " ".join(f"{skew:g}" for skew in self.skew_ms)
        lines = [
            f"`python scripts/bench_simulate.py validate {names} --steps {self.steps} --repeats {self.repeats} "
            f"--skew-ms {skews}`",
            "",
            "| scene | link | skew | mode | measured ms/step (spread) | predicted, same tasks | predicted, drawn "
            "| waits measured | predicted | late measured | predicted |",
            "| --- " * 11 + "|",
        ]
        for r in rows:
            lines.append(
                f"| {r['scene']} | {r['link']} | {r['skew_ms']:g} ms | {r['mode']} "
                f"| {r['measured']:.1f} ({r['spread']:.1f}) | {r['same']:.1f} ({r['same'] / r['measured'] - 1:+.1%}) "
                f"| {r['drawn']:.1f} ({r['drawn'] / r['measured'] - 1:+.1%}) "
                f"| {r['wait_measured']:.0%} | {r['wait_predicted']:.0%} "
                f"| {r['late_measured']:.0%} | {r['late_predicted']:.0%} |"
            )
        return "\n".join(lines)


@dataclass
class Scenes:
    """Simulate recordings on several devices."""

    recordings: Annotated[list[Path], tyro.conf.Positional]
    """Recordings, or folders that hold them; the table calls them by their folders' names."""
    ranks: int = 8
    """Devices."""
    links: list[str] = field(default_factory=lambda: ["pcie4", "100gbe"])
    """Links, see odin-simulate."""
    speed: float = 10.0
    """How many times as fast as recorded the devices render."""
    overhead_speed: float = 100.0
    """How many times as fast they do everything else."""
    skew: float = 0.1
    """Spread of compute times beside that of the views."""
    epochs: float = 1.0
    """Length of each simulation, in epochs, """
    least_steps: int = 100
    """but at least so many steps: those from one structural step to the next, since a simulation ends with a drain."""
    reduce: list[str] = field(default_factory=lambda: ["never"])
    """Sums at row owners, see odin-simulate."""
    json: Path | None = None
    """Keep all figures here; what is there already is not simulated again."""
    plot: Path | None = None
    """Draw gain against mean weight of the graph to this image."""
    docs: Path | None = REPOSITORY / "docs" / "simulation.md"
    """Put the tables between the marks of this file."""

    def run(self) -> None:
        rows: list[dict[str, Any]] = []
        if self.json is not None and self.json.exists():
            rows = json.loads(self.json.read_text())
        for path in self.recordings:
            name = path.name if path.is_dir() else path.parent.name
            recording = load_recording(path)
            scene = scene_of(recording).faster(self.speed, self.overhead_speed)
            for text in self.links:
                for reduce in self.reduce:
                    key = {"scene": name, "link": parse_link(text).name, "reduce": reduce, "ranks": self.ranks}
                    key |= {"speed": self.speed, "overhead_speed": self.overhead_speed, "skew": self.skew}
                    if any(all(row[k] == v for k, v in key.items()) for row in rows):
                        continue
                    rows += self._simulate(scene, recording, text, reduce, key)
                    if self.json is not None:
                        self.json.write_text(json.dumps(rows, indent=1))
                    print(json.dumps(rows[-1]), flush=True)
        print(self.table(rows))
        if self.docs:
            put_between_marks(self.docs, self.table(rows), "scenes")
        if self.plot:
            plot(rows, self.plot)

    def _simulate(
        self, scene: Scene, recording: Recording, link: str, reduce: Any, key: dict[str, Any]
    ) -> list[dict[str, Any]]:
        setup = Setup(
            ranks=self.ranks, link=parse_link(link), skew=self.skew, epochs=self.epochs, least_steps=self.least_steps,
            reduce=reduce,
        )  # fmt: skip
        rows = table_rows(key["scene"], scene, setup, compare(scene, setup))
        turning = compare(scene, replace(setup, turn_lanes=True), ["throughput"], ["rlg"])
        rows += [row | {"order": TURNING} for row in table_rows(key["scene"], scene, setup, turning)]
        sets = recording.sets.values()
        facts = {
            "primitives": recording.primitives,
            "active_share": float(np.mean([len(s.active) for s in sets])) / recording.primitives,
            "compute_ms": 1e3 * float(scene.seconds.mean()),
            "how": recording.text.get("how", ""),
        }
        return [row | key | facts for row in rows]

    def table(self, rows: Sequence[dict[str, Any]]) -> str:
        """One line per scene and link, then means over scenes, as Markdown."""
        lines = [
            f"`python scripts/bench_simulate.py scenes ... --ranks {self.ranks} --speed {self.speed:g} "
            f"--overhead-speed {self.overhead_speed:g} --skew {self.skew:g}`",
            "",
            "| scene | views | primitives | mean weight | link | barrier waits (rlg) | quality, random | quality, rlg "
            "| throughput, random | throughput, rlg | throughput, lanes turn | ceiling |",
            "| --- " * 12 + "|",
        ]
        reduce = self.reduce[0]
        mine = [r for r in rows if r["reduce"] == reduce and r["ranks"] == self.ranks]
        for name, link in dict.fromkeys((r["scene"], r["link"]) for r in mine):
            of = {(r["mode"], r["order"]): r for r in mine if (r["scene"], r["link"]) == (name, link)}
            base = of["barrier", "rlg"]
            cells = [_cell(of[kind]) for kind in KINDS[2:]]
            lines.append(
                f"| {name} | {base['views']} | {base['primitives']:,} | {base['mean_weight']:.3f} | {link} "
                f"| {base['wait_share']:.0%} | {' | '.join(cells)} | {base['ceiling']:.2f} |"
            )
        for link in dict.fromkeys(r["link"] for r in mine):
            at = [r for r in mine if r["link"] == link]
            means = [_mean([r for r in at if (r["mode"], r["order"]) == kind]) for kind in KINDS]
            base = means[1]
            cells = [_cell(row) for row in means[2:]]
            lines.append(
                f"| **mean of {len({r['scene'] for r in at})}** | | | {base['mean_weight']:.3f} | {link} "
                f"| {base['wait_share']:.0%} | {' | '.join(cells)} | {base['ceiling']:.2f} |"
            )
        return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['ratio_to_barrier']:.2f}, {row['hidden_share']:.0%}"


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = ("ratio_to_barrier", "hidden_share", "wait_share", "ceiling", "mean_weight")
    return {name: statistics.mean(row[name] for row in rows) for name in names}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Gain and hidden share against the mean weight of the graph, one point per scene, in RLG order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = list(dict.fromkeys(row["link"] for row in rows))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for link, marker in zip(links, "os^D"):
        for mode, colour in (("quality", "tab:blue"), ("throughput", "tab:orange")):
            at = [r for r in rows if (r["mode"], r["order"], r["link"]) == (mode, "rlg", link)]
            weight = [r["mean_weight"] for r in at]
            gains = [r["ratio_to_barrier"] for r in at]
            axes[0].scatter(weight, gains, color=colour, marker=marker, label=f"{mode}, {link}")
            axes[1].scatter(weight, [r["hidden_share"] for r in at], color=colour, marker=marker)
            if mode == "throughput" and link == links[0]:
                for row, gain in zip(at, gains):
                    axes[0].annotate(row["scene"], (row["mean_weight"], gain), fontsize=6, alpha=0.7)
    axes[0].set_ylabel("speed relative to barrier")
    axes[1].set_ylabel("share of the barrier's wait that is hidden")
    for one in axes:
        one.set_xlabel("mean RLG weight between two views")
        one.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    ranks = rows[0]["ranks"]
    figure.suptitle(f"Simulated, {ranks} devices, RLG order")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs one of the commands."""
    tyro.extras.subcommand_cli_from_dict({"validate": Validate, "scenes": Scenes}, description=__doc__).run()


if __name__ == "__main__":
    main()
