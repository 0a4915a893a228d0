"""The picture of a plan. Needs matplotlib (``pip install "odin-nerfstudio[plots]"``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from odin_nerfstudio.planning.report import Report
from odin_nerfstudio.planning.schedule import Plan
from odin_nerfstudio.planning.slots import rank_of_lanes

MATRIX_STEPS = 40
TIMELINE_STEPS = 160
RLG_COLOUR, RANDOM_COLOUR = "#1b6ca8", "#c0504d"
NAMES = {"rlg": "RLG", "local": "local"}


def plot_report(report: Report, path: Path, title: str) -> None:
    """Draw conflict matrices in random and RLG order, cameras by rank, and conflict over time.

    Args:
        report: The report.
        path: Image to write, e.g. a .png.
        title: Name of the dataset.

    Raises:
        ValueError: matplotlib is missing, or the plan has too few steps.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ValueError('plots need matplotlib: pip install "odin-nerfstudio[plots]"') from error

    plan = report.plan
    figure = Figure(figsize=(10, 8.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    numbers = report.numbers()
    figure.suptitle(
        f"{title}: {numbers['views']} views, {plan.ranks} ranks, {plan.views_per_step} views per step", fontsize=13
    )
    grid = figure.subplots(2, 2)
    steps = min(MATRIX_STEPS, 4 + 4 * plan.views // plan.views_per_step)
    matrices = [step_matrix(p, steps) for p in (report.random, plan)]
    top = float(np.quantile(np.concatenate([m.ravel() for m in matrices]), 0.995)) or 1.0
    labels = ("random order", "random order (as planned)" if plan.order == "random" else f"{NAMES[plan.order]} order")
    image = None
    for axes, matrix, label in zip(grid[0], matrices, labels):
        image = axes.imshow(matrix, cmap="magma_r", vmin=0.0, vmax=top, origin="upper", interpolation="nearest")
        mean = float(np.diagonal(matrix, offset=1).mean())
        # Outline the pairs of neighbouring steps: the ones that make a rank wait.
        for s in range(len(matrix) - 1):
            axes.add_patch(Rectangle((s + 0.5, s - 0.5), 1, 1, fill=False, lw=0.9, edgecolor=RLG_COLOUR))
        axes.set_title(f"{label}: {mean:.1%} between neighbouring steps", fontsize=11)
        axes.set_xlabel("step that reads")
        axes.set_ylabel("step that writes")
    assert image is not None
    bar = figure.colorbar(image, ax=list(grid[0]), shrink=0.9, pad=0.01)
    bar.set_label("share of what a task reads\nthat another rank's task wrote")
    _cameras(grid[1, 0], report)
    _timeline(grid[1, 1], report)
    figure.savefig(path)


def step_matrix(plan: Plan, steps: int) -> np.ndarray:
    """Mean weight from the tasks of one step to those of another on other ranks. (steps, steps)"""
    ranks = rank_of_lanes(plan.views_per_step, plan.ranks)
    other = ranks[:, None] != ranks[None, :]
    if plan.steps is not None:
        steps = min(steps, plan.steps)
    views = np.stack([plan.views_of_step(s) for s in range(steps)])
    out = np.zeros((steps, steps))
    for s in range(steps):
        for t in range(steps):
            weight = plan.rlg.between(views[s][:, None], views[t][None, :])
            out[s, t] = weight[other].mean() if other.any() else 0.0
    return out


def _cameras(axes, report: Report) -> None:
    from matplotlib import colormaps

    plan, centers = report.plan, report.tracks.centers
    known = np.isfinite(centers).all(axis=1)
    axes.set_title("cameras by rank", fontsize=11)
    axes.set_xticks([])
    axes.set_yticks([])
    if known.sum() < 2:
        axes.text(0.5, 0.5, "camera positions not known", ha="center", transform=axes.transAxes)
        return
    # The plane in which the cameras spread most.
    offset = centers[known] - centers[known].mean(axis=0)
    plane = np.linalg.svd(offset, full_matrices=False)[2][:2]
    xy = offset @ plane.T
    rank = plan.affinity[known]
    size = float(np.clip(6000 / len(xy), 4, 60))
    if (rank < 0).all():
        axes.scatter(xy[:, 0], xy[:, 1], s=size, color="#888888")
        axes.set_title("cameras (any rank renders any view)", fontsize=11)
    else:
        few = plan.plan_ranks <= 10
        colours = colormaps["tab10"] if few else colormaps["turbo"]
        fixed = rank >= 0
        colour = [colours(r if few else r / (plan.plan_ranks - 1)) for r in rank[fixed]]
        axes.scatter(*xy[fixed].T, s=size, c=colour, edgecolors="white", linewidths=0.4)
        axes.scatter(*xy[~fixed].T, s=size, c="white", edgecolors="black")
        if few:
            for r in range(plan.plan_ranks):
                axes.scatter([], [], color=colours(r), s=30, label=f"rank {r}")
            if (rank < 0).any():
                axes.scatter([], [], color="white", edgecolors="black", s=30, label="any rank")
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_aspect("equal", adjustable="datalim")


def _timeline(axes, report: Report) -> None:
    random = report.random_predictions[0].by_step[1 : TIMELINE_STEPS + 1]
    planned = report.prediction.by_step[1 : TIMELINE_STEPS + 1]
    axes.plot(np.arange(1, len(random) + 1), 100 * random, color=RANDOM_COLOUR, lw=1.2, label="random order")
    if report.plan.order != "random":
        label = f"{NAMES[report.plan.order]} order"
        axes.plot(np.arange(1, len(planned) + 1), 100 * planned, color=RLG_COLOUR, lw=1.4, label=label)
    axes.set_title("predicted conflict with the step before", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("share of what a task reads, %")
    axes.set_ylim(bottom=0.0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
