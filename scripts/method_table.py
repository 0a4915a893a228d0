"""The table of methods, scenes and modes of scripts/bench_quality.py: whole trainings on real ranks of this machine.

Settings are a short schedule, the same for all methods, at one resolution: warm-up for an eighth of the views, then
four refinements, at twice the usual gradient thresholds (few steps, small images), and no opacity resets; learning
rates fall within the run. odin-splatfacto comes first on each scene: odin-splatfacto-mcmc gets its final number of
primitives as its cap, and refines as often as it takes to reach that.
Gains and hidden shares are estimates of the run itself (`runtime.barrier_estimate`), as it prints them at its end.
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from bench_quality import Options

REFERENCE, MCMC = "odin-splatfacto", "odin-splatfacto-mcmc"
GROWTH = 1.05
"""Of the MCMC population at a refinement."""


def downscale(scene: Path, longest: int) -> int:
    """How often images are halved so that no side is longer than ``longest`` pixels."""
    names = {".jpg", ".jpeg", ".png"}
    image = next(file for file in sorted((scene / "images").rglob("*")) if file.suffix.lower() in names)
    with Image.open(image) as opened:
        side = max(opened.size)
    return max(0, math.ceil(math.log2(side / longest)))


def schedule(method: str, views: int, reference: dict[str, Any] | None) -> dict[str, Any]:
    """Options of the model, in training views.

    Args:
        reference: the row of odin-splatfacto on the same scene, for MCMC.

    Raises:
        ValueError: MCMC without that row.
    """
    settings: dict[str, Any] = {"warmup_length": views // 8, "sh_degree_interval": views // 8}
    settings |= {"refine_every": views // 10, "stop_split_at": int(0.6 * views), "reset_alpha_every": 10**6}
    settings["densify_grad_thresh"] = 0.0004 if method == "odin-2dgs" else 0.0016
    if method == "odin-2dgs":
        settings["normal_start_iter"] = views // 2
    if method == MCMC:
        if reference is None:
            raise ValueError(f"{MCMC} takes its cap from {REFERENCE}: name that method first")
        growths = math.ceil(math.log(max(reference["gaussians"] / reference["points"], GROWTH), GROWTH))
        every = max(2, int((0.6 - 1 / 8) * views / growths))
        settings |= {"max_gs_num": reference["gaussians"], "refine_every": min(settings["refine_every"], every)}
        settings["stop_split_at"] = int(0.85 * views)  # relocation goes on when the cap is reached
    return settings


def train(
    scene: Path, method: str, modes: list[str], options: Options, reference: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """A training in each of the modes, one after the other in the same processes: their rows of figures."""
    from bench_sync import run_ranks

    runs: list[dict[str, Any]] = [{"odin": {"mode": mode}} for mode in modes]
    if options.renders is not None:
        options.renders.mkdir(parents=True, exist_ok=True)
        for run, mode in zip(runs, modes):
            run["render"] = str(options.renders.resolve() / f"{scene.name}-{method}-{mode}.png")
    changes = options.model if method != options.methods[0] else {}
    job: dict[str, Any] = {
        **{"scene": str(scene.resolve()), "scale": 0.5 ** downscale(scene, options.longest), "downscales": 0},
        **{"method": method, "model": schedule(method, options.views, reference) | changes, "runs": runs},
        **{"views": options.views, "order": "rlg", "seed": options.seeds[0], "skew_ms": 0.0, "short": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(job, Path(folder), [[]] * options.ranks, worker="train_worker.py")
    same = {"scene": scene.name, "method": method, "ranks": options.ranks, "views": options.views}
    same |= {"seed": options.seeds[0], "scale": job["scale"]}
    return [{**same, "mode": mode, **figures(list(ranks))} for mode, *ranks in zip(modes, *found)]


def figures(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of a training measured, as one row."""
    from odin_nerfstudio.runtime.barrier_estimate import estimate

    first = ranks[0]
    row = {name: first[name] for name in ("points", "psnr", "ssim", "lpips", "gaussians", "seconds") if name in first}
    row["late"] = sum(one.get("delayed_tasks", 0.0) for one in ranks) / sum(one["tasks"] for one in ranks)
    replay = estimate([base64.b64decode(one["timeline"]) for one in ranks])
    if len(ranks) > 1 and replay is not None:
        row |= {"gain": replay.gain, "hidden": replay.hidden, "barrier_wait": replay.barrier_wait / replay.barrier}
    return row


def measure(options: Options) -> list[dict[str, Any]]:
    """Trains everything that is not in the JSON file yet."""
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())
    for scene in options.folders:
        for method in options.methods:
            of_scene = [row for row in rows if row["scene"] == scene.name]
            have = {row["mode"] for row in of_scene if row["method"] == method}
            missing = [mode for mode in options.modes if mode not in have]
            if not missing:
                continue
            reference = next((row for row in of_scene if row["method"] == REFERENCE), None)
            for row in train(scene, method, missing, options, reference):
                rows.append(row)
                print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    return rows


def table(rows: list[dict[str, Any]], modes: list[str], command: str, note: str) -> str:
    """A row for each scene and method; figures of the modes stand beside each other."""

    def shown(name: str, form: str, scale: float = 1.0) -> Callable[[list[dict[str, Any]]], str]:
        return lambda runs: " / ".join(f"{scale * r[name]:{form}}" if name in r else "-" for r in runs)

    columns: dict[str, Callable[[list[dict[str, Any]]], str]] = {
        "scene": lambda runs: runs[0]["scene"],
        "method": lambda runs: f"`{runs[0]['method']}`",
        "PSNR": shown("psnr", ".2f"),
        "SSIM": shown("ssim", ".3f"),
        **({"LPIPS": shown("lpips", ".3f")} if any("lpips" in row for row in rows) else {}),
        "primitives": shown("gaussians", ",.0f"),
        "gain": shown("gain", ".2f"),
        "hidden, %": shown("hidden", ".0f", 100),
        "late, %": shown("late", ".0f", 100),
        "a barrier's wait, %": shown("barrier_wait", ".0f", 100),
    }
    lines = [f"`{command}`", "", *([note, ""] if note else [])]
    lines += [f"Figures are of {', '.join(modes)}.", ""]
    lines += ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for scene, method in dict.fromkeys((r["scene"], r["method"]) for r in rows):
        of = {r["mode"]: r for r in rows if (r["scene"], r["method"]) == (scene, method)}
        runs = [of[mode] for mode in modes if mode in of]
        lines.append("| " + " | ".join(show(runs) for show in columns.values()) + " |")
    return "\n".join(lines)
