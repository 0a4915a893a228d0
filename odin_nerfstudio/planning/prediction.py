"""Predicted conflicts of a plan: per task, and for the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from odin_nerfstudio.planning.slots import rank_of_lanes

if TYPE_CHECKING:
    from odin_nerfstudio.planning.schedule import Plan, PlannedStep


def predict_step(plan: Plan, step: int) -> PlannedStep:
    """Views, ranks, conflicts and windows of one step, see :class:`PlannedStep`."""
    from odin_nerfstudio.planning.schedule import WINDOW_CONFLICT, PlannedStep

    views = plan.views_of_step(step)
    ranks = plan.ranks_of_step(step)
    lags = plan.max_delay + 1
    conflict = np.zeros((plan.views_per_step, lags), np.float32)
    total = np.zeros((plan.views_per_step, lags), np.float64)
    for lag in range(1, min(lags, step) + 1):
        earlier = plan.views_of_step(step - lag)
        other = plan.ranks_of_step(step - lag)[:, None] != ranks[None, :]  # (writer, reader)
        count = np.maximum(other.sum(axis=0), 1)
        summed = np.where(other, plan.rlg.between(earlier[:, None], views[None, :]), 0.0).sum(axis=0, dtype=np.float64)
        total[:, lag - 1] = summed
        conflict[:, lag - 1] = summed / count
    reached = np.cumsum(total, axis=1)
    window = (reached <= WINDOW_CONFLICT).cumprod(axis=1).sum(axis=1).astype(np.int32)
    pending = np.minimum(reached[:, -1], 1.0).astype(np.float32)
    return PlannedStep(views, ranks, conflict, pending, window)


@dataclass(frozen=True)
class Prediction:
    """What a stretch of a plan promises.

    Attributes:
        first_step: First step looked at.
        conflict: Mean over tasks and other ranks' tasks of the weight, by distance 1 to max_delay + 1. (D,) float64
        by_step: The same for distance 1, per step; the first has none. (n,) float64
        imbalance: Mean over steps of the largest rank's cost over the mean rank's cost.
        free: Share of tasks that share at most 1 % of what they read with the last step's tasks of other ranks.
        admissible: Share of tasks that share at most 30 % with them.
        overlap: Mean overlap window in steps.
        spread: Mean weight between lanes of one step on different ranks: how much a step looks at one place.
    """

    first_step: int
    conflict: np.ndarray
    by_step: np.ndarray
    imbalance: float
    free: float
    admissible: float
    overlap: float
    spread: float


ADMISSIBLE_OVERLAP = 0.3


def predict(plan: Plan, first_step: int = 0, steps: int | None = None) -> Prediction:
    """Predict conflicts and balance over a stretch of steps, as if lanes kept their ranks.

    Args:
        plan: The plan.
        first_step: Where to start.
        steps: How many steps to look at, default four epochs (and at least eight steps), not beyond the plan's end.

    Raises:
        ValueError: The plan has no step to look at.
    """
    from odin_nerfstudio.planning.schedule import WINDOW_CONFLICT

    if steps is None:
        steps = max(8, -(-4 * plan.views // plan.views_per_step))
    if plan.steps is not None:
        steps = min(steps, plan.steps - first_step)
    lanes, lags = plan.views_per_step, plan.max_delay + 1
    ranks = rank_of_lanes(lanes, plan.ranks)
    other = ranks[:, None] != ranks[None, :]
    pairs = int(other.sum())
    if steps < 1:
        raise ValueError(f"a plan of {plan.steps} steps has none from step {first_step} on to predict")
    table = np.stack([plan.views_of_step(first_step + s) for s in range(steps)])
    sums = np.zeros((lags + 1, steps, lanes))
    for lag in range(lags + 1):
        # One lag at a time, writers in a loop: the pairs of a long stretch with 64 lanes would fill memory.
        for writer in range(lanes):
            readers = np.flatnonzero(other[writer])
            if steps > lag and len(readers):
                weight = plan.rlg.between(table[: steps - lag, writer, None], table[lag:, readers])
                sums[lag, lag:, readers] += weight.T
    mean = [float(sums[d, d:].sum()) / (pairs * (steps - d)) if pairs and steps > d else 0.0 for d in range(lags + 1)]
    by_step = sums[1].sum(axis=1) / max(pairs, 1)
    load = np.stack([plan.load[table][:, ranks == r].sum(axis=1) for r in range(plan.ranks)], axis=1)
    imbalance = float(np.mean(load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9)))
    later = sums[1, 1:]
    reached = np.cumsum(sums[1:, lags:], axis=0)
    window = (reached <= WINDOW_CONFLICT).cumprod(axis=0).sum(axis=0)
    return Prediction(
        first_step=first_step,
        conflict=np.array(mean[1:]),
        by_step=by_step,
        imbalance=imbalance,
        free=float(np.mean(later <= WINDOW_CONFLICT)) if later.size else 1.0,
        admissible=float(np.mean(later <= ADMISSIBLE_OVERLAP)) if later.size else 1.0,
        overlap=float(window.mean()) if window.size else 0.0,
        spread=mean[0],
    )
