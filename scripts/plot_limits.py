"""Draws what throughput mode's bounds bring, and what they cost: gain over a barrier against the change of quality.

    python scripts/plot_limits.py --modes MODES.json --limits LIMITS.json --output docs/limits.png

MODES.json comes from bench_modes.py (real trainings), LIMITS.json from bench_limits.py (simulated gains of the same
bounds). A point is a set of bounds: means over scenes; bars are from the lowest scene to the highest.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BOUNDS = {
    "throughput:0.1:2": ("max_overlap 0.1", "0.1"),
    "throughput:0.3:2": ("max_overlap 0.3", "0.3"),
    "throughput": ("default", "0.5 (default)"),
    "throughput:1.0:2": ("max_overlap 1", "1"),
    "reckless": ("any harm", "no bound"),
}
"""Mode of bench_modes, variant of bench_limits, and what to call both: `max_overlap`."""
METRICS = {"psnr": "held-out PSNR [dB]", "ssim": "held-out SSIM"}


@dataclass
class Options:
    """What to read and where to draw."""

    modes: list[Path]
    """Files of bench_modes."""
    limits: list[Path]
    """Files of bench_limits."""
    output: Path
    """PNG to write."""


def differences(rows: list[dict], mode: str, metric: str) -> dict[str, float]:
    """By scene: mean of a metric minus a barrier's at the same seed and ranks."""
    base = {(r["scene"], r["ranks"], r["seed"]): r[metric] for r in rows if r["mode"] == "barrier"}
    found: dict[str, list[float]] = {}
    for r in rows:
        key = (r["scene"], r["ranks"], r["seed"])
        if r["mode"] == mode and key in base:
            found.setdefault(r["scene"], []).append(r[metric] - base[key])
    return {scene: statistics.mean(values) for scene, values in found.items()}


def main() -> None:
    """Draws the points of all bounds that both files have."""
    options = tyro.cli(Options, description=__doc__)
    rows = [row for file in options.modes for row in json.loads(file.read_text())]
    scenes = [row for file in options.limits for row in json.loads(file.read_text())]
    figure, panels = plt.subplots(1, len(METRICS), figsize=(9, 4), sharey=True, layout="constrained")
    for axes, (metric, label) in zip(panels, METRICS.items()):
        for mode, (variant, name) in BOUNDS.items():
            changes = list(differences(rows, mode, metric).values())
            gains = [scene["variants"][variant][0] for scene in scenes if variant in scene["variants"]]
            if not changes or not gains:
                continue
            x, y = statistics.mean(changes), statistics.mean(gains)
            spread_x = [[x - min(changes)], [max(changes) - x]]
            spread_y = [[y - min(gains)], [max(gains) - y]]
            axes.errorbar(x, y, xerr=spread_x, yerr=spread_y, fmt="o", capsize=3, label=name)
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.set_xlabel(f"change of {label} against a barrier")
    panels[0].set_ylabel("gain over a barrier, 8 simulated devices")
    panels[-1].legend(title="max_overlap")
    figure.savefig(options.output, dpi=130)


if __name__ == "__main__":
    main()
