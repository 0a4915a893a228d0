"""Outcomes as rows, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from odin_nerfstudio.simulation.cluster import Outcome, Setup
from odin_nerfstudio.simulation.scene import Scene


def table_rows(name: str, scene: Scene, setup: Setup, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row of plain values per outcome.

    Args:
        name: Of the scene.
        scene: What was simulated.
        setup: The job.
        outcomes: As `cluster.compare` gives them: a barrier before the other modes of its order.
    """
    rows, base = [], None
    weight = scene.rlg.statistics()["mean"]
    for outcome in outcomes:
        if outcome.mode == "barrier":
            base = outcome
        assert base is not None
        waited = base.wait_per_task
        rows.append(
            {
                "scene": name,
                "views": scene.views,
                "mean_weight": weight,
                "ranks": setup.ranks,
                "link": setup.link.name,
                "order": outcome.order,
                "mode": outcome.mode,
                "views_per_second": outcome.views_per_second,
                "ratio_to_barrier": outcome.views_per_second / base.views_per_second,
                "ceiling": 1 / (1 - base.wait_share),
                "wait_share": outcome.wait_share,
                "hidden_share": 1 - outcome.wait_per_task / waited if waited > 0 else 0.0,
                "delayed_share": outcome.delayed_share,
                "waits": dict(outcome.waits),
                "bytes_per_step": outcome.sent / outcome.steps,
                "reduced": outcome.reduced,
                "steps": outcome.steps,
            }
        )
    return rows


def print_table(title: str, rows: Sequence[dict[str, Any]], assumptions: Sequence[str]) -> None:
    """Print rows and what they rest on."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("link", "order", "mode", "views/s", "ratio", "ceiling", "waits", "hidden", "late"):
        table.add_column(column, justify="left" if column in ("link", "order", "mode") else "right")
    for row in rows:
        barrier = row["mode"] == "barrier"
        table.add_row(
            row["link"],
            row["order"],
            row["mode"],
            f"{row['views_per_second']:.4g}",
            f"{row['ratio_to_barrier']:.2f}",
            f"{row['ceiling']:.2f}",
            f"{row['wait_share']:.1%}",
            "" if barrier else f"{row['hidden_share']:.0%}",
            f"{row['delayed_share']:.0%}" if row["mode"] == "throughput" else "",
            end_section=row["mode"] == "throughput",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print("ratio: to barrier in the same order. ceiling: if nothing had to wait. Simulated, assuming that")
    for phrase in assumptions:
        console.print(f"- {phrase}", soft_wrap=True)


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Bars of the gain over a barrier for each link, order and mode, below the ceiling.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'odin-nerfstudio[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["mode"] != "barrier"]
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.1 * max(2, len(shown)), 4), layout="constrained")
    labels = [f"{row['mode']}\n{row['order']}, {row['link']}" for row in shown]
    colours = {"quality": "tab:blue", "throughput": "tab:orange"}
    bars = axes.bar(
        range(len(shown)), [r["ratio_to_barrier"] for r in shown], color=[colours[r["mode"]] for r in shown]
    )
    axes.bar_label(bars, [f"{row['ratio_to_barrier']:.2f}x\n{row['hidden_share']:.0%} hidden" for row in shown])
    for k, row in enumerate(shown):
        axes.plot([k - 0.4, k + 0.4], [row["ceiling"]] * 2, color="black", label="ceiling" if k == 0 else None)
    axes.set_xticks(range(len(shown)), labels, fontsize=8)
    axes.set_ylim(0.95, 0.05 + max([1.0, *(row["ceiling"] for row in shown)]))
    axes.set_ylabel("speed relative to barrier")
    axes.set_title(title)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
