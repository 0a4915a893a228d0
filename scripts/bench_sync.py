"""Measures what waiting costs: barrier against other modes, interleaved in one run, on loopback and on slower links.

    python scripts/bench_sync.py FOLDER [FOLDER ...] [--modes barrier quality throughput] [--json FILE]

Each scene is first trained by one process past the first densifications. From that checkpoint two ranks go on, in
stretches that alternate between the modes, without structural steps; every stretch starts and ends with all ranks
together. ``comm share`` is the time that a step's messages take on the link over a step's compute time. Links slower
than loopback are two network namespaces with a token bucket (needs root and iproute2; left out, and said, elsewhere).
``to one rank`` compares with one process that renders the same views; ``late`` is the share of tasks that started on
some rows that lacked updates (throughput mode). ``estimated`` is what a run says of itself: its ratio to barrier by the
replay of its own times (`runtime.barrier_estimate`), to compare with the measured one beside it.

The ceiling of any gain over barrier is 1 / (1 - barrier's wait share).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from bench_quality import put_between_marks

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent
MARK = "bench_sync"
RANKS = 2


@dataclass
class Options:
    """What to measure and where to write."""

    folders: Annotated[list[Path], tyro.conf.Positional]
    """Captures with a COLMAP model."""
    modes: list[str] = field(default_factory=lambda: ["barrier", "quality"])
    """Modes to alternate between; barrier first."""
    train_steps: int = 700
    """Steps of training before measuring."""
    downscales: int = 1
    """Images are halved this many times, in training and measuring."""
    steps: int = 60
    """Steps in a stretch."""
    repeats: int = 5
    """Stretches of each mode."""
    shares: list[float] = field(default_factory=lambda: [0.15, 0.5])
    """Links on which communication takes this share of the compute time, besides loopback."""
    orders: list[str] = field(default_factory=lambda: ["rlg", "random"])
    """Orders of the views; the second and later ones are measured on the first slower link only."""
    skew_ms: float = 0.0
    """Also measure on loopback with a sleep in every task, exponentially distributed with this mean."""
    linger: bool = True
    """Let ranks wait for whole steps where that is cheaper, as in training (runtime/patience.py)."""
    checkpoints: Path | None = None
    """Keep the trained checkpoints in this folder, and use those that are there."""
    traces: Path | None = None
    """Write a trace of the last stretch of each mode on each link into this folder (see plot_traces.py)."""
    json: Path | None = None
    """Write all figures here."""
    docs: Path | None = REPOSITORY / "docs" / "results.md"
    """Put the table between the marks of this file."""


def train_checkpoint(scene: Path, steps: int, downscales: int, folder: Path) -> Path:
    """Trains in one process at one resolution and returns the checkpoint."""
    model = next(p for p in ("sparse/0", "colmap/sparse/0") if (scene / p).is_dir())
    command = [
        *(Path(sys.executable).with_name("ns-train"), "odin-splatfacto", "--output-dir", folder, "--timestamp", "t"),
        *("--max-num-iterations", str(steps), "--vis", "tensorboard", "--viewer.quit-on-train-completion", "True"),
        *(
            "--steps-per-eval-image",
            "0",
            "--steps-per-eval-all-images",
            "0",
            "--pipeline.model.num-downscales",
            str(downscales),
        ),
        *("--pipeline.model.resolution-schedule", "1000000", "colmap", "--data", scene, "--colmap-path", model),
        *("--downscale-factor", "1"),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{scene.name}: training ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
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


def run_ranks(
    job: dict[str, Any],
    folder: Path,
    prefixes: list[list[str]],
    address: str = "127.0.0.1",
    worker: str = "sync_worker.py",
) -> list[Any]:
    """Runs one rank for each prefix and returns what they measured."""
    ranks = len(prefixes)
    file = folder / "job.json"
    file.write_text(json.dumps({**job, "result": str(folder / "result"), "outputs": str(folder / "out")}))
    processes = []
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    for rank, prefix in enumerate(prefixes):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": port}
            environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        if prefix:
            environment["GLOO_SOCKET_IFNAME"] = f"odinb{prefix[-1][-1]}"  # that of the host
        log = (folder / f"log.{rank}").open("w")
        command = [*prefix, sys.executable, str(SCRIPTS / worker), str(file)]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait() for process in processes]
    if any(codes):
        tails = "\n".join((folder / f"log.{rank}").read_text()[-1500:] for rank in range(ranks))
        raise RuntimeError(f"a rank ended with {codes}:\n{tails}")
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(ranks)]


def rows_of(
    ranks: list[list[dict[str, Any]]], job: dict[str, Any], link: str, share: float, alone: float
) -> list[dict[str, Any]]:
    """One row per mode: medians over its stretches; waits are means over ranks. alone: views per second of one rank."""
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
                "ranks": len(ranks),
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
                "ratio_to_one_rank": statistics.median(rates[mode]) / alone,
                "delayed_share": statistics.median(
                    sum(one.get("delayed_tasks", 0.0) for one in at) / sum(one["tasks"] for one in at)
                    for at in zip(*stretches)
                ),
                "estimated_ratio": statistics.median(s.get("estimated_gain", 1.0) for s in stretches[0]),
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
        kept = options.checkpoints or folder
        trained = kept / f"{scene.name}-{options.train_steps}-{options.downscales}"
        if not (checkpoint := next(trained.rglob("step-*.ckpt"), None)):
            checkpoint = train_checkpoint(scene.resolve(), options.train_steps, options.downscales, trained)
        job: dict[str, Any] = {
            **{"scene": str(scene.resolve()), "checkpoint": str(checkpoint), "downscales": options.downscales},
            **{"lanes": RANKS, "modes": ["barrier"], "steps": options.steps, "repeats": options.repeats},
            **{"order": options.orders[0], "skew_ms": 0.0, "traces": "", "linger": options.linger},
        }

        def add(link: str, share: float, prefixes: list[list[str]], address: str = "127.0.0.1") -> list[Any]:
            name = f"{scene.name}-{link}-{job['order']}".replace("/", "").replace(" ", "-").replace(",", "")
            traces = str(options.traces.resolve() / name) if options.traces else ""
            both = {**job, "modes": options.modes, "traces": traces}
            ranks = run_ranks(both, folder, prefixes, address)
            new = rows_of(ranks, both, link, share, alone)
            rows.extend(new)
            for row in new:
                print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
            return ranks[0]

        (one,) = run_ranks(job, folder, [[]])
        alone = statistics.median(s["steps"] * RANKS / s["seconds"] for s in one)
        print(f"{scene.name}: one rank renders {alone:.2f} views/s", flush=True)
        local = add("loopback", 0.0, [[], []])
        sent = statistics.median(s["sent"] / s["steps"] for s in local)
        compute = statistics.median(s["compute"] / s["steps"] for s in local)
        print(f"{scene.name}: {compute * 1e3:.0f} ms compute, {sent / 1e6:.2f} MB sent per step and rank", flush=True)
        if options.skew_ms:
            job["skew_ms"] = options.skew_ms
            (one,) = run_ranks(job, folder, [[]])
            plain, alone = alone, statistics.median(s["steps"] * RANKS / s["seconds"] for s in one)
            add(f"loopback, skew {options.skew_ms:.0f} ms", 0.0, [[], []])
            job["skew_ms"], alone = 0.0, plain
        if os.geteuid() != 0 or not shutil.which("tc"):
            print("slower links need root and iproute2: left out")
            return rows
        for i, share in enumerate(options.shares):
            rate = 8e-6 * sent / (share * compute)
            for order in options.orders if i == 0 else options.orders[:1]:
                job["order"] = order
                with hosts(rate) as prefixes:
                    add(f"{rate:.0f} Mbit/s", share, prefixes, "10.77.0.1")
    return rows


def table(rows: list[dict[str, Any]], command: str) -> str:
    """The results as Markdown."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "scene": lambda row: row["scene"],
        "order": lambda row: row["order"],
        "link": lambda row: row["link"],
        "comm. share": lambda row: f"{row['comm_share']:.2f}",
        "mode": lambda row: row["mode"],
        "views/s": lambda row: f"{row['views_per_second']:.2f}",
        "to one rank": lambda row: f"{row['ratio_to_one_rank']:.2f}",
        "to barrier (spread)": lambda row: f"{row['ratio_to_barrier']:.3f} ({row['ratio_spread']:.3f})",
        "estimated": lambda row: f"{row['estimated_ratio']:.3f}",
        "ceiling": lambda row: f"{row['ceiling']:.2f}",
        "waits": lambda row: f"{100 * row['wait_share']:.0f} %",
        "hidden": lambda row: f"{100 * row['hidden_share']:.0f} %",
        "late": lambda row: f"{100 * row['delayed_share']:.0f} %",
    }
    lines = [f"`{command}`", "", "| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    lines += ["| " + " | ".join(show(row) for show in columns.values()) + " |" for row in rows]
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
