"""Does a mode cost quality? Held-out PSNR and SSIM of whole trainings by mode, number of ranks and seed.

    python scripts/bench_modes.py FOLDER [FOLDER ...] [--ranks 2 4] [--seeds 42 43 44] [--json FILE]

Every training is real processes on this machine. ``quality`` is left out: it ends with the bits of ``barrier``
(tests). ``throughput:0.1:1`` is throughput mode with other bounds, on the overlap and on the delay. ``reckless`` is
throughput mode with every bound but the delay lifted: it shows whether the measure can tell. Ranks never wait for whole
steps where that would be faster (`runtime/patience.py`), so that as many reads are late as the mode admits.
Differences are taken at equal seed and ranks; barrier's spread over seeds stands beside them. With several ranks on
fewer cores, ranks are slowed by each other at random, so more reads are late than on a quiet machine.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from bench_quality import put_between_marks
from bench_sync import run_ranks

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "bench_modes"
RECKLESS = {"mode": "throughput", "max_overlap": 1e9, "max_impact": 1e9, "max_delay": 8, "lookahead": 8}
"""Every read is admitted as long as it is no more than eight steps late."""


@dataclass
class Options:
    """What to train and where to write."""

    folders: Annotated[list[Path], tyro.conf.Positional]
    """Captures with a COLMAP model."""
    modes: list[str] = field(default_factory=lambda: ["barrier", "throughput", "reckless"])
    """Modes; barrier first. throughput:OVERLAP:DELAY for bounds other than the method's."""
    ranks: list[int] = field(default_factory=lambda: [2])
    """Numbers of ranks, each with as many views per step."""
    seeds: list[int] = field(default_factory=lambda: [42, 43, 44])
    """Seeds."""
    views: int = 2800
    """Views rendered in training."""
    downscales: int = 1
    """Images are halved this many times in training; held-out images have their full size."""
    order: str = "rlg"
    """Order of the views."""
    skew_ms: float = 0.0
    """Have every task sleep, exponentially distributed with this mean: more reads are late."""
    json: Path | None = None
    """Write all figures here, after every training; trainings that are in it are not repeated."""
    docs: Path | None = REPOSITORY / "docs" / "results.md"
    """Put the table between the marks of this file."""


def settings_of(mode: str) -> dict[str, Any]:
    """Options of the pipeline for a mode of this script."""
    if mode == "reckless":
        return RECKLESS
    name, *bounds = mode.split(":")
    settings: dict[str, Any] = {"mode": name}
    if bounds:
        settings |= {"max_overlap": float(bounds[0]), "max_delay": int(bounds[1])}
    return settings


def train(scene: Path, ranks: int, seed: int, modes: list[str], options: Options) -> list[dict[str, Any]]:
    """A training in each of the modes, one after the other in the same processes: their rows of figures."""
    job = {
        **{"scene": str(scene.resolve()), "downscales": options.downscales, "order": options.order, "seed": seed},
        **{"views": options.views, "skew_ms": options.skew_ms},
        "runs": [{"odin": settings_of(mode) | {"linger": False}} for mode in modes],
    }
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(job, Path(folder), [[]] * ranks, worker="train_worker.py")
    rows = []
    for mode, *found in zip(modes, *by_rank):
        first = found[0]
        late = sum(one.get("delayed_tasks", 0.0) for one in found) / sum(one["tasks"] for one in found)
        row: dict[str, Any] = {"scene": scene.name, "ranks": ranks, "seed": seed, "mode": mode, "views": options.views}
        row |= {name: first[name] for name in ("psnr", "ssim", "lpips", "gaussians") if name in first}
        rows.append(row | {"delayed_share": late, "views_per_second": options.views / first["seconds"]})
    return rows


def table(rows: list[dict[str, Any]], command: str) -> str:
    """Means over seeds, and differences from barrier at equal seeds, as Markdown."""
    lines = [
        f"`{command}`",
        "",
        "| scene | ranks | mode | PSNR, mean (spread over seeds) | SSIM | against barrier: PSNR, mean (each seed) "
        "| SSIM | tasks with late reads |",
        "| --- " * 8 + "|",
    ]
    for scene, ranks, mode in dict.fromkeys((r["scene"], r["ranks"], r["mode"]) for r in rows):
        mine = {r["seed"]: r for r in rows if (r["scene"], r["ranks"], r["mode"]) == (scene, ranks, mode)}
        base = {r["seed"]: r for r in rows if (r["scene"], r["ranks"], r["mode"]) == (scene, ranks, "barrier")}
        psnr = [r["psnr"] for r in mine.values()]
        gaps = [r["psnr"] - base[seed]["psnr"] for seed, r in mine.items() if seed in base]
        similar = [r["ssim"] - base[seed]["ssim"] for seed, r in mine.items() if seed in base]
        against = ""
        if mode != "barrier" and gaps:
            against = f"{statistics.mean(gaps):+.2f} ({', '.join(f'{gap:+.2f}' for gap in gaps)})"
        lines.append(
            f"| {scene} | {ranks} | {mode} | {statistics.mean(psnr):.2f} ({max(psnr) - min(psnr):.2f}) "
            f"| {statistics.mean(r['ssim'] for r in mine.values()):.3f} | {against} "
            f"| {f'{statistics.mean(similar):+.4f}' if against else ''} "
            f"| {100 * statistics.mean(r['delayed_share'] for r in mine.values()):.1f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Trains everything that is not in the JSON file yet, and writes the table."""
    options = tyro.cli(Options, description=__doc__)
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())
    have = {(r["scene"], r["ranks"], r["seed"], r["mode"]) for r in rows}
    for seed in options.seeds:
        for scene in options.folders:
            for ranks in options.ranks:
                missing = [mode for mode in options.modes if (scene.name, ranks, seed, mode) not in have]
                if not missing:
                    continue
                for row in train(scene, ranks, seed, missing, options):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1))
    names = " ".join(scene.name for scene in options.folders)
    seeds, ranks = (" ".join(map(str, values)) for values in (options.seeds, options.ranks))
    extra = f" --skew-ms {options.skew_ms:g}" if options.skew_ms else ""
    command = f"python scripts/bench_modes.py {names} --ranks {ranks} --seeds {seeds} --views {options.views}"
    text = table(
        sorted(rows, key=lambda r: (r["scene"], r["ranks"])), f"{command} --downscales {options.downscales}{extra}"
    )
    print(text)
    if options.docs:
        put_between_marks(options.docs, text, MARK)


if __name__ == "__main__":
    main()
