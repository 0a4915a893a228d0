"""Draws two traces of the same work, one above the other, on one time axis: where ranks compute, move rows and wait.

    python scripts/plot_traces.py BARRIER.json ODIN.json --out docs/odin.png [--first 40 --steps 12]

The traces are those of `--pipeline.odin.trace`. Both are drawn from the start of step `first` and for `steps` steps, so
the one below ends earlier by what it did not wait.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import tyro
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COMPUTE, RUNTIME, WAIT, WIRE = "#2f9e63", "#9aa5ae", "#e8590c", "#4c78c4"
HEIGHT, WIRE_HEIGHT = 0.62, 0.16
RUNTIME_SPANS = {"publish", "contribute", "structural"}


@dataclass
class Options:
    """What to draw."""

    above: Annotated[Path, tyro.conf.Positional]
    """Trace of a run with a barrier."""
    below: Annotated[Path, tyro.conf.Positional]
    """Trace of the same steps in another mode."""
    out: Path = Path("docs/odin.png")
    """Picture to write."""
    first: int | None = None
    """First step that is drawn; default: where the trace's last third begins."""
    steps: int = 12
    """How many steps are drawn."""
    titles: list[str] = field(default_factory=lambda: ["Global barrier", "Odin"])
    """Names of the two runs."""


@dataclass(frozen=True)
class Run:
    """A stretch of a trace. Seconds since its start."""

    spans: list[dict[str, Any]]
    ranks: int
    end: float
    waited: float
    """Mean over the ranks."""


def load(path: Path, first: int, steps: int) -> Run:
    """The spans of some steps, from the first task's start to the last contribution.

    Raises:
        ValueError: The trace lacks some of these steps.
    """
    everything = json.loads(path.read_text())["traceEvents"]
    events = [e for e in everything if e["ph"] == "X"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in everything if e["name"] == "thread_name"}
    tasks = [e for e in events if e["name"] == "task" and first <= e["args"]["step"] < first + steps]
    present = {e["args"]["step"] for e in tasks}
    if len(present) < steps:
        raise ValueError(f"{path} has {len(present)} of the steps {first} to {first + steps - 1}; choose --first")
    start = min(e["ts"] for e in tasks)
    ranks = max(e["pid"] for e in tasks) + 1
    ends = [max(e["ts"] + e["dur"] for e in tasks if e["pid"] == rank) for rank in range(ranks)]
    spans, waited = [], 0.0
    for e in events:
        begin, end = max(e["ts"], start), min(e["ts"] + e["dur"], ends[e["pid"]])
        if end > begin:
            spans.append(
                {**e, "row": rows[e["pid"], e["tid"]], "begin": 1e-6 * (begin - start), "length": 1e-6 * (end - begin)}
            )
            waited += 1e-6 * (end - begin) if e["cat"] == "wait" else 0.0
    return Run(spans, ranks, 1e-6 * (max(ends) - start), waited / ranks)


def steps_of(path: Path) -> list[int]:
    """The steps of a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({e["args"]["step"] for e in events if e["ph"] == "X" and e["name"] == "task"})


def third(path: Path) -> int:
    """The step at which the last third of a trace begins."""
    steps = steps_of(path)
    return steps[2 * len(steps) // 3]


def draw(axes: Axes, run: Run, title: str, remark: str, first: int) -> None:
    """One run: a row per rank, above a thin one for what it sends."""
    for rank in range(run.ranks):
        y = run.ranks - 1 - rank
        mine = [s for s in run.spans if s["pid"] == rank]
        _bars(axes, [s for s in mine if s["cat"] in RUNTIME_SPANS], y, HEIGHT, RUNTIME)
        _bars(axes, [s for s in mine if s["cat"] == "wait"], y, HEIGHT, WAIT)
        tasks = [s for s in mine if s["name"] == "task"]
        _bars(axes, tasks, y, HEIGHT, COMPUTE, edge="white")
        for task in tasks:
            at = task["begin"] + task["length"] / 2
            if task["length"] > 0.012 * run.end:
                label = str(task["args"]["step"] - first + 1)
                axes.text(at, y, label, ha="center", va="center", color="white", fontsize=7)
        sends = [s for s in mine if s["row"].startswith("to ")]
        _bars(axes, sends, y - HEIGHT / 2 - WIRE_HEIGHT / 2 - 0.03, WIRE_HEIGHT, WIRE)
    axes.set_yticks(range(run.ranks), [f"rank {rank}" for rank in reversed(range(run.ranks))])
    axes.set_ylim(-0.72, run.ranks - 1 + 0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_title(remark, loc="right", fontsize=9, color="#555")
    axes.axvline(run.end, color="#333", linewidth=1.2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bars(
    axes: Axes, spans: list[dict[str, Any]], y: float, height: float, color: str, edge: str | None = None
) -> None:
    axes.broken_barh(
        [(s["begin"], s["length"]) for s in spans],
        (y - height / 2, height),
        facecolors=color,
        edgecolors=edge or color,
        linewidth=0.5 if edge else 0.0,
    )


def main() -> None:
    """Reads both traces and writes the picture."""
    options = tyro.cli(Options, description=__doc__)
    firsts = [options.first if options.first is not None else third(path) for path in (options.above, options.below)]
    runs = [load(path, n, options.steps) for path, n in zip((options.above, options.below), firsts)]
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(10, 1.1 + 1.15 * sum(r.ranks for r in runs) / 1.4))
    ratio = runs[0].end / runs[1].end
    same = firsts[0] == firsts[1]  # else the work differs, and so the time for that reason alone
    views = sum(1 for s in runs[0].spans if s["name"] == "task")
    for k, (run, title, axis) in enumerate(zip(runs, options.titles, axes)):
        remark = f"{views} views in {run.end:.2f} s, waiting {100 * run.waited / run.end:.0f} % of the time"
        draw(axis, run, title, remark + (f"  ({ratio:.2f}x as fast)" if k and same else ""), firsts[k])
    if same:
        axes[1].axvspan(runs[1].end, runs[0].end, color="#2f9e63", alpha=0.12, linewidth=0)
    axes[1].set_xlim(0, 1.01 * max(run.end for run in runs))
    axes[1].set_xlabel("seconds")
    names = {"rendering a view": COMPUTE, "waiting": WAIT, "updating primitives": RUNTIME, "rows on the wire": WIRE}
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in names.items()],
        loc="lower center", ncols=4, frameon=False, fontsize=9, bbox_to_anchor=(0.5, -0.01),
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=160, facecolor="white")
    print(f"{options.out}: {ratio:.3f}x, waits {[round(r.waited / r.end, 3) for r in runs]}")


if __name__ == "__main__":
    main()
