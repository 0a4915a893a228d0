"""Measures what waiting costs: barrier against quality, interleaved in one run, on loopback and on slower links.

    python scripts/bench_sync.py FOLDER [FOLDER ...] [--repeats 5] [--shares 0.15 0.5] [--json FILE]

Each scene is first trained by one process past the first densifications. From that checkpoint two ranks go on, in
stretches that alternate between the modes, without structural steps; every stretch starts and ends with all ranks
together. ``comm share`` is the time that a step's messages take on the link over a step's compute time. Links slower
than loopback are two network namespaces with a token bucket (needs root and iproute2; left out, and said, elsewhere).

The ceiling of any gain over barrier is 1 / (1 - barrier's wait share).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from bench_quality import put_between_marks

REPOSITORY = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("sync_worker.py")
MARK = "bench_sync"
RANKS = 2


@dataclass
class Options:
    """What to measure and where to write."""

    folders: Annotated[list[Path], tyro.conf.Positional]
    """Captures with a COLMAP model."""
    train_steps: int = 700
    """Steps of training before measuring, at half resolution."""
    steps: int = 25
    """Steps in a stretch."""
    repeats: int = 5
    """Stretches of each mode."""
    shares: list[float] = field(default_factory=lambda: [0.15, 0.5])
    """Links on which communication takes this share of the compute time, besides loopback."""
    orders: list[str] = field(default_factory=lambda: ["rlg", "random"])
    """Orders of the views; the second and later ones are measured on the first slower link only."""
    json: Path | None = None
    """Write all figures here."""
    docs: Path | None = REPOSITORY / "docs" / "results.md"
    """Put the table between the marks of this file."""


def train_checkpoint(scene: Path, steps: int, folder: Path) -> Path:
    """Trains in one process at half resolution and returns the checkpoint."""
    model = next(p for p in ("sparse/0", "colmap/sparse/0") if (scene / p).is_dir())
    command = [
        *(Path(sys.executable).with_name("ns-train"), "odin-splatfacto", "--output-dir", folder, "--timestamp", "t"),
        *("--max-num-iterations", str(steps), "--vis", "tensorboard", "--viewer.quit-on-train-completion", "True"),
        *("--steps-per-eval-image", "0", "--steps-per-eval-all-images", "0", "--pipeline.model.num-downscales", "1"),
        *("--pipeline.model.resolution-schedule", "1000000", "colmap", "--data", scene, "--colmap-path", model),
        *("--downscale-factor", "1"),
    ]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return next(folder.rglob("step-*.ckpt"))


@contextmanager
def hosts(rate_mbit: float) -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a link of that rate; yields a command prefix for each rank."""
    names = [f"odinbench{i}" for i in range(RANKS)]
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "odinb0", "type", "veth", "peer", "name", "odinb1")
        for i, name in enumerate(names):
            ip("link", "set", f"odinb{i}", "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"odinb{i}")
            for device in ("lo", f"odinb{i}"):
                ip("-n", name, "link", "set", device, "up")
            shape = ("root", "tbf", "rate", f"{rate_mbit:.1f}mbit", "burst", "256kb", "latency", "50ms")
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", f"odinb{i}", *shape], check=True)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run_pair(job: dict[str, Any], folder: Path, prefixes: list[list[str]], address: str) -> list[list[dict[str, Any]]]:
    """Runs both ranks and returns their stretches."""
    file = folder / "job.json"
    file.write_text(json.dumps({**job, "result": str(folder / "result"), "outputs": str(folder / "out")}))
    processes = []
    for rank, prefix in enumerate(prefixes):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)},
            **{"MASTER_ADDR": address, "MASTER_PORT": "29577", "OMP_NUM_THREADS": "1"},
            **({"GLOO_SOCKET_IFNAME": f"odinb{rank}"} if prefix else {}),
        }
        log = (folder / f"log.{rank}").open("w")
        command = [*prefix, sys.executable, str(WORKER), str(file)]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait() for process in processes]
    if any(codes):
        tails = "\n".join((folder / f"log.{rank}").read_text()[-1500:] for rank in range(RANKS))
        raise RuntimeError(f"a rank ended with {codes}:\n{tails}")
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(RANKS)]


def rows_of(ranks: list[list[dict[str, Any]]], job: dict[str, Any], link: str, share: float) -> list[dict[str, Any]]:
    """One row per mode: medians over its stretches; waits are means over ranks."""
    rows = []
    waits: dict[str, float] = {}
    rates: dict[str, list[float]] = {}
    for mode in job["modes"]:
        stretches = [[s for s in rank if s["mode"] == mode] for rank in ranks]
        rates[mode] = [s["steps"] * job["lanes"] / s["seconds"] for s in stretches[0]]
        wait = [sum(one.get("wait", 0.0) for one in at) / len(at) for at in zip(*stretches)]
        waits[mode] = statistics.median(w / s["seconds"] for w, s in zip(wait, stretches[0]))
        per_view = statistics.median(w / (s["steps"] * job["lanes"]) for w, s in zip(wait, stretches[0]))
        # Neighbouring stretches are compared, so that what else the machine does falls out.
        ratios = [mine / base for mine, base in zip(rates[mode], rates["barrier"])]
        rows.append(
            {
                "scene": Path(job["scene"]).name,
                "ranks": RANKS,
                "link": link,
                "comm_share": share,
                "mode": mode,
                "order": job["order"],
                "views_per_second": statistics.median(rates[mode]),
                "ratio_to_barrier": statistics.median(ratios),
                "ratio_spread": max(ratios) - min(ratios),
                "wait_share": waits[mode],
                "hidden_share": 0.0,
                "ceiling": 1 / (1 - waits["barrier"]),
                "repeats": len(rates[mode]),
                "wait_per_view": per_view,
            }
        )
    base = rows[0].pop("wait_per_view")
    for row in rows[1:]:
        row["hidden_share"] = 1 - row.pop("wait_per_view") / base if base > 0 else 0.0
    return rows


def measure(scene: Path, options: Options) -> list[dict[str, Any]]:
    """All links and orders of a scene."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{scene.name}: training {options.train_steps} steps", flush=True)
        checkpoint = train_checkpoint(scene.resolve(), options.train_steps, folder / "train")
        job: dict[str, Any] = {
            **{"scene": str(scene.resolve()), "checkpoint": str(checkpoint), "downscales": 1, "lanes": RANKS},
            **{"ranks": RANKS, "modes": ["barrier", "quality"], "steps": options.steps, "repeats": options.repeats},
        }
        job["order"] = options.orders[0]
        local = run_pair(job, folder, [[], []], "127.0.0.1")
        sent = statistics.median(s["sent"] / s["steps"] for s in local[0])
        compute = statistics.median(s["compute"] / s["steps"] for s in local[0])
        print(f"{scene.name}: {compute * 1e3:.0f} ms compute, {sent / 1e6:.2f} MB sent per step and rank", flush=True)
        rows += rows_of(local, job, "loopback", 0.0)
        if os.geteuid() != 0 or not shutil.which("tc"):
            print("slower links need root and iproute2: left out")
            return rows
        for i, share in enumerate(options.shares):
            rate = 8e-6 * sent / (share * compute)
            for order in options.orders if i == 0 else options.orders[:1]:
                job["order"] = order
                with hosts(rate) as prefixes:
                    rows += rows_of(run_pair(job, folder, prefixes, "10.77.0.1"), job, f"{rate:.0f} Mbit/s", share)
                print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]], command: str) -> str:
    """The results as Markdown."""
    lines = [
        f"`{command}`",
        "",
        "| scene | order | link | comm. share | mode | views/s | ratio (spread) | ceiling | waits | hidden |",
        "| --- " * 10 + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row['scene']} | {row['order']} | {row['link']} | {row['comm_share']:.2f} | {row['mode']} "
            f"| {row['views_per_second']:.2f} | {row['ratio_to_barrier']:.3f} ({row['ratio_spread']:.3f}) "
            f"| {row['ceiling']:.2f} | {100 * row['wait_share']:.0f} % | {100 * row['hidden_share']:.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures every scene and writes the table."""
    options = tyro.cli(Options, description=__doc__)
    rows = [row for scene in options.folders for row in measure(scene, options)]
    names = " ".join(scene.name for scene in options.folders)
    text = table(rows, f"python scripts/bench_sync.py {names} --steps {options.steps} --repeats {options.repeats}")
    print(text)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.docs:
        put_between_marks(options.docs, text, MARK)


if __name__ == "__main__":
    main()
