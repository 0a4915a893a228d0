"""Measures placement sharded: memory per rank, bytes per step against replicated, barrier against quality on a link.

    python scripts/bench_sharded.py SCENE [--json FILE]

SCENE is a capture with a COLMAP model, such as ``odin-sample city`` writes. It is trained by one process first. Then

- memory: its primitives, repeated up to ``--primitives``, are loaded by 1, 2 and 4 ranks, which train a few steps;
- bytes: measured with 2 to 4 ranks in both placements; for more ranks computed from what each view really sees of the
  trained model, from the shards and the plan for that many ranks, and from the measured share of active splats;
- barrier and quality alternate between 2 ranks on loopback and on a link on which a barrier's exchange takes a given
  share of the compute time (two network namespaces; needs root and iproute2; left out, and said, elsewhere).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from bench_quality import put_between_marks
from bench_sync import REPOSITORY, hosts, run_ranks, train_checkpoint

WORKER, MARK = "sharded_worker.py", "bench_sharded"


@dataclass
class Options:
    """What to measure and where to write."""

    scene: Annotated[Path, tyro.conf.Positional]
    """Capture with a COLMAP model."""
    train_steps: int = 700
    """Steps of training before measuring."""
    downscales: int = 1
    """Images are halved this many times."""
    primitives: int = 400_000
    """Primitives for the measurement of memory."""
    ranks: list[int] = field(default_factory=lambda: [2, 3, 4])
    """Numbers of ranks for which bytes are measured."""
    more_ranks: list[int] = field(default_factory=lambda: [2, 3, 4, 8, 16, 32, 64])
    """Numbers of ranks for which bytes are computed."""
    steps: int = 30
    """Steps in a stretch."""
    repeats: int = 4
    """Stretches of each mode."""
    share: float = 0.3
    """Share of the compute time that a barrier's exchange takes on the slower link."""
    order: str | None = None
    """Order of the views; None: that of each placement."""
    parts: list[str] = field(default_factory=lambda: ["memory", "bytes", "modes"])
    """What to measure."""
    checkpoint: Path | None = None
    """Use this checkpoint of the scene instead of training one."""
    json: Path | None = None
    """Write all figures here."""
    docs: Path | None = REPOSITORY / "docs" / "scaling.md"
    """Put the tables between the marks of this file."""


def enlarged(checkpoint: Path, count: int, folder: Path) -> Path:
    """A checkpoint with its primitives repeated, slightly moved, up to a number, and without moments."""
    state = torch.load(checkpoint, map_location="cpu")
    pipeline, total = state["pipeline"], state["pipeline"]["_model.gauss_params.means"].shape[0]
    rows = torch.arange(count) % total
    for key in [k for k in pipeline if "gauss_params." in k]:
        pipeline[key] = pipeline[key][rows].clone()
    g = torch.Generator().manual_seed(0)
    pipeline["_model.gauss_params.means"] += 0.01 * torch.randn(count, 3, generator=g)
    pipeline["_model.gauss_params.scales"] -= 0.5
    for group, held in state["optimizers"].items():
        if f"_model.gauss_params.{group}" in pipeline:
            for one in held["state"].values():
                for key in ("exp_avg", "exp_avg_sq"):
                    one[key] = torch.zeros_like(pipeline[f"_model.gauss_params.{group}"])
    strategy = state["odin"]["model"]["strategy"]
    for key, value in strategy.items():
        if isinstance(value, torch.Tensor) and value.dim():
            strategy[key] = torch.zeros(count, *value.shape[1:])
    path = folder / "enlarged.ckpt"
    torch.save(state, path)
    return path


def job_of(options: Options, checkpoint: Path, placement: str, lanes: int, **more: Any) -> dict[str, Any]:
    """What a worker is to do."""
    common = {"scene": str(options.scene), "checkpoint": str(checkpoint), "order": options.order, "skew_ms": 0.0}
    common |= {"downscales": options.downscales, "placement": placement, "lanes": lanes, "modes": ["quality"]}
    return common | {"steps": options.steps, "repeats": 1} | more


def run(job: dict[str, Any], prefixes: list[list[str]], address: str = "127.0.0.1") -> list[dict[str, Any]]:
    """Runs one rank for each prefix."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(job, Path(folder), prefixes, address, WORKER)


def measure_memory(options: Options, checkpoint: Path, folder: Path) -> list[dict[str, Any]]:
    """Memory per rank of the same model on 1, 2 and 4 ranks, and on one rank that holds everything."""
    large, out = enlarged(checkpoint, options.primitives, folder), []
    for placement, ranks in (("replicated", 2), ("sharded", 1), ("sharded", 2), ("sharded", 4)):
        found = run(job_of(options, large, placement, ranks, steps=3), [[]] * ranks)
        row = {"placement": placement, "ranks": ranks, "rows": max(f["rows"] for f in found)}
        row |= {"state_mb": max(f["state"] for f in found) / 1e6}
        row |= {"own_mb": max(f["own"] - f["before"] for f in found)}
        print(row, flush=True)
        out.append(row)
    return out


def measure_bytes(options: Options, checkpoint: Path) -> list[dict[str, Any]]:
    """Bytes that all ranks together send per step, with one view per rank and step."""
    measured: dict[tuple[str, int], float] = {}
    visible = active = 0.0
    for ranks in options.ranks:
        for placement in ("sharded", "replicated"):
            found = run(job_of(options, checkpoint, placement, ranks), [[]] * ranks)
            stretches = [s for f in found for s in f["stretches"]]
            measured[(placement, ranks)] = sum(s["sent"] for s in stretches) / options.steps
            if placement == "replicated" and not active:
                active = sum(s["active_rows"] for s in stretches) / (options.steps * ranks)
    rows = run(job_of(options, checkpoint, "sharded", 1, count=options.more_ranks), [[]])[0]["seen"]
    columns, out = 59, []
    for row in rows:
        ranks, visible = int(row["ranks"]), row["visible"]
        share = min(1.0, active / visible)
        contribution = active * (4 + 4 * columns) + 12 * visible
        sums_at_owners = ranks * (contribution * (ranks - 1) / ranks + active * 4 * (1 + columns) * (ranks - 1) / ranks)
        splats = ranks * row["far"] * visible * (4 * 12 + share * 44 + 1 / 8)
        out.append(
            {
                "ranks": ranks, "visible": visible, "far": row["far"], "owners": row["owners"],
                "sharded": splats, "replicated": ranks * (ranks - 1) * contribution, "sums": sums_at_owners,
                "dense": 2 * (ranks - 1) * row["primitives"] * 4 * columns,
                "sharded measured": measured.get(("sharded", ranks)),
                "replicated measured": measured.get(("replicated", ranks)),
            }
        )  # fmt: skip
        print(out[-1], flush=True)
    return out


def measure_modes(options: Options, checkpoint: Path) -> list[dict[str, Any]]:
    """Barrier against quality between two ranks, both placements."""
    out: list[dict[str, Any]] = []

    def add(link: str, placement: str, prefixes: list[list[str]], address: str = "127.0.0.1") -> list[dict[str, Any]]:
        modes = ["barrier", "quality"]
        job = job_of(options, checkpoint, placement, 2, modes=modes, repeats=options.repeats)
        found = run(job, prefixes, address)
        seconds, waits = {}, {}
        for mode in modes:
            per_rank = [[s for s in f["stretches"] if s["mode"] == mode] for f in found]
            seconds[mode] = statistics.median(s["seconds"] for s in per_rank[0]) / options.steps
            shares = [s["wait"] / s["seconds"] for rank in per_rank for s in rank]
            waits[mode] = statistics.mean(shares)
        ratios = [
            a["seconds"] / b["seconds"]
            for a, b in zip(*([s for s in found[0]["stretches"] if s["mode"] == m] for m in modes))
        ]
        row = {"link": link, "placement": placement, "barrier_ms": 1e3 * seconds["barrier"]}
        row |= {"quality_ms": 1e3 * seconds["quality"], "gain": statistics.median(ratios)}
        row |= {"barrier_waits": waits["barrier"], "quality_waits": waits["quality"]}
        print(row, flush=True)
        out.append(row)
        return found

    found = add("loopback", "sharded", [[], []])
    add("loopback", "replicated", [[], []])
    barrier = [s for f in found for s in f["stretches"] if s["mode"] == "barrier"]
    sent = statistics.mean(s["sent"] for s in barrier) / options.steps
    compute = statistics.mean(s["compute"] + s["acquire"] + s["contribute"] for s in barrier) / options.steps
    rate = 8 * sent / (options.share * compute) / 1e6
    try:
        with hosts(rate) as prefixes:
            for placement in ("sharded", "replicated"):
                add(f"{rate:.0f} Mbit/s", placement, prefixes, "10.77.0.1")
    except (OSError, RuntimeError) as error:
        print(f"slower links need root and iproute2, left out: {error}")
    return out


def tables(figures: dict[str, Any]) -> str:
    """All figures as Markdown."""
    out = []
    if "memory" in figures:
        out += [
            "| placement | ranks | rows per rank | state per rank [MB] | own memory per rank in training [MB] |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {r['placement']} | {r['ranks']} | {r['rows']:,} | {r['state_mb']:.0f} | {r['own_mb']:.0f} |"
                for r in figures["memory"]
            ),
            "",
        ]
    if "bytes" in figures:
        out += [
            "| ranks | splats per view | owned elsewhere | owners a view | sharded [MB] | measured | replicated [MB] |"
            " measured | sums at owners [MB] | dense ring [MB] |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for r in figures["bytes"]:
            cell = {k: "" if r[k] is None else f"{r[k] / 1e6:.1f}" for k in r}
            out.append(
                f"| {r['ranks']} | {r['visible']:,.0f} | {100 * r['far']:.0f} % | {r['owners']:.1f} |"
                f" {cell['sharded']} | {cell['sharded measured']} | {cell['replicated']} |"
                f" {cell['replicated measured']} | {cell['sums']} | {cell['dense']} |"
            )
        out.append("")
    if "modes" in figures:
        out += [
            "| link | placement | barrier [ms a step] | quality [ms a step] | gain | barrier waits | quality waits |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        out += [
            f"| {r['link']} | {r['placement']} | {r['barrier_ms']:.0f} | {r['quality_ms']:.0f} | {r['gain']:.2f} |"
            f" {100 * r['barrier_waits']:.0f} % | {100 * r['quality_waits']:.0f} % |"
            for r in figures["modes"]
        ]
    return "\n".join(out)


def main() -> None:
    """Measures what the options ask for."""
    options = tyro.cli(Options, description=__doc__)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = options.checkpoint or train_checkpoint(
            options.scene, options.train_steps, options.downscales, folder
        )
        if "memory" in options.parts:
            figures["memory"] = measure_memory(options, checkpoint, folder)
        if "bytes" in options.parts:
            figures["bytes"] = measure_bytes(options, checkpoint)
        if "modes" in options.parts:
            figures["modes"] = measure_modes(options, checkpoint)
    print(tables(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))
    if options.docs is not None:
        put_between_marks(options.docs, tables(figures), MARK)


if __name__ == "__main__":
    main()
