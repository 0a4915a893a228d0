"""What a plan promises for a dataset, as numbers, a table and one sentence of advice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from odin_nerfstudio.planning.gain import Gain
from odin_nerfstudio.planning.placement import PlacementAdvice, Wish, advise
from odin_nerfstudio.planning.prediction import Prediction, predict
from odin_nerfstudio.planning.rlg import Rlg, relative_locality_graph
from odin_nerfstudio.planning.schedule import Order, Plan, make_plan
from odin_nerfstudio.planning.tracks import Tracks

RANDOM_SEEDS = 10


@dataclass(frozen=True)
class Report:
    """A dataset's plan and what to expect of it.

    Attributes:
        tracks: The observations.
        rlg: Their graph.
        plan: The plan that was asked for.
        random: A plan in random order.
        prediction: Predicted conflicts of the plan that was asked for.
        rlg_prediction: Predicted conflicts in RLG order.
        random_predictions: Predicted conflicts in random orders of several seeds.
        gain: Expected gain of the plan that was asked for.
        seconds: Time to build graph, plan and report, without reading the dataset.
        placement: Which placement to take; None: nothing was said of devices.
    """

    tracks: Tracks
    rlg: Rlg
    plan: Plan
    random: Plan
    prediction: Prediction
    rlg_prediction: Prediction
    random_predictions: list[Prediction]
    gain: Gain
    seconds: float
    placement: PlacementAdvice | None = None

    def by_order(self, name: str) -> dict[str, Any]:
        """A prediction's numbers in RLG order, in the order that was asked for, and the mean over random orders."""
        known = {"rlg": self.rlg_prediction, self.plan.order: self.prediction}
        out = {order: getattr(p, name) for order, p in known.items() if order != "random"}
        out["random"] = np.mean([getattr(p, name) for p in self.random_predictions], axis=0)
        return {order: np.asarray(value).tolist() for order, value in out.items()}

    def numbers(self) -> dict[str, Any]:
        """The report as plain types. ``conflict`` is the mean, over tasks and tasks of other ranks one step earlier, of
        the share of what the task reads that the other wrote."""
        pairs = self.rlg.statistics()
        lags = self.by_order("conflict")
        return {
            "views": self.tracks.views,
            "points": self.tracks.points,
            "observations": int(self.tracks.incidence.nnz),
            "unknown_views": int(self.rlg.unknown.sum()),
            "source": self.tracks.source,
            "ranks": self.plan.ranks,
            "views_per_step": self.plan.views_per_step,
            "order": self.plan.order,
            "seed": self.plan.seed,
            "max_delay": self.plan.max_delay,
            "pairs": pairs,
            "conflict": {order: values[0] for order, values in lags.items()},
            "conflict_by_distance": lags,
            "overlap_within_step": self.by_order("spread"),
            "overlap_window": self.by_order("overlap"),
            "imbalance": self.by_order("imbalance"),
            "gain": {
                "quality": self.gain.quality,
                "throughput": self.gain.throughput,
                "ceiling": self.gain.ceiling,
                "hidden_quality": self.gain.hidden_quality,
                "hidden_throughput": self.gain.hidden_throughput,
                "assumptions": list(self.gain.assumptions),
                "simulated": True,
            },
            "advice": self.advice(),
            "seconds": self.seconds,
            "placement": None if self.placement is None else self.placement.numbers(),
        }

    def advice(self) -> str:
        """Whether several devices will pay here, and in which mode."""
        ranks, gain = self.plan.ranks, self.gain
        if ranks == 1:
            return "One rank waits for nobody: every mode runs at the same speed."
        if self.tracks.views < 2 * self.plan.views_per_step:
            return (
                f"{self.tracks.views} views are too few for {self.plan.views_per_step} per step: every step sees most "
                "of the scene, so expect little over barrier; use fewer ranks."
            )
        worth = gain.ceiling - 1.0
        if gain.quality - 1.0 >= 0.5 * worth:
            return (
                f"{ranks} devices pay here: quality mode, exact as synchronized training, realizes most of what there "
                "is to gain."
            )
        if gain.throughput - 1.0 >= 0.5 * worth:
            return (
                f"{ranks} devices pay here in throughput mode; in quality mode most tasks still wait, since they share "
                "some points with the last views of other devices."
            )
        return (
            f"Views share much of what they see: on {ranks} devices expect little over barrier; throughput mode may "
            "gain more than this, since it admits reads by gradient mass: record a short training and ask with --trace."
        )

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values of the table."""
        n = self.numbers()
        gain, pairs = n["gain"], n["pairs"]

        def both(name: str, style: str) -> str:
            return ", ".join(f"{order} {format(value, style)}" for order, value in n[name].items())

        return [
            ("training views", f"{n['views']:,}" + (f" ({n['unknown_views']} unknown)" if n["unknown_views"] else "")),
            ("points", f"{n['points']:,} ({n['observations']:,} observations)"),
            ("co-visibility from", n["source"]),
            ("ranks, views per step", f"{n['ranks']}, {n['views_per_step']} ({n['order']} order, seed {n['seed']})"),
            ("shared by two views", f"{pairs['mean']:.1%} of points on average, nothing by {pairs['zero_share']:.1%}"),
            ("predicted conflict", both("conflict", ".2%")),
            ("overlap within a step", both("overlap_within_step", ".2%")),
            ("overlap window, steps", both("overlap_window", ".2f")),
            ("cost imbalance", both("imbalance", ".3f")),
            ("expected gain over barrier", f"quality {gain['quality']:.2f}x, throughput {gain['throughput']:.2f}x, "
                                           f"at most {gain['ceiling']:.2f}x (simulated)"),
            *([] if self.placement is None else self.placement.rows()),
            ("planned in", f"{n['seconds']:.2f} s"),
        ]  # fmt: skip


def make_report(
    tracks: Tracks,
    *,
    ranks: int,
    views_per_step: int,
    order: Order = "rlg",
    seed: int = 0,
    max_delay: int = 2,
    diversity: float = 0.02,
    gain_of: Callable[[Tracks, Plan], Gain] = lambda _tracks, _plan: Gain(),
    wish: Wish | None = None,
) -> Report:
    """Plan a dataset in RLG and in random order, and in the one that was asked for, and compare.

    Args:
        tracks: The observations.
        ranks: Ranks to plan for.
        views_per_step: Lanes per step.
        order: Which of the plans is the report's ``plan``.
        seed: Seed of the plan; random orders use the seeds from it on.
        max_delay: See :func:`make_plan`.
        diversity: See :func:`make_plan`.
        gain_of: Gain to expect of the plan that was asked for, see `simulation.expected`.
        wish: Devices and model, for advice on the placement.
    """
    start = time.perf_counter()
    rlg = relative_locality_graph(tracks)

    def plan(kind: Order, number: int) -> Plan:
        return make_plan(
            rlg, ranks=ranks, views_per_step=views_per_step, order=kind, seed=number, max_delay=max_delay,
            diversity=diversity,
        )  # fmt: skip

    planned = {"rlg": plan("rlg", seed)}
    if order == "local" or (order == "rlg" and wish is not None):  # it is what sharded primitives are trained in
        planned["local"] = plan("local", seed)
    randoms = [plan("random", seed + k) for k in range(RANDOM_SEEDS)]
    predictions = {kind: predict(p) for kind, p in planned.items() if kind in ("rlg", order)}
    random_predictions = [predict(p) for p in randoms]
    chosen = planned.get(order, randoms[0])
    placement = None if wish is None else advise(tracks, chosen, wish, planned.get("local"))
    seconds = time.perf_counter() - start
    return Report(
        tracks=tracks, rlg=rlg, plan=chosen, random=randoms[0],
        prediction=predictions.get(order, random_predictions[0]), rlg_prediction=predictions["rlg"],
        random_predictions=random_predictions, gain=gain_of(tracks, chosen), seconds=seconds,
        placement=placement,
    )  # fmt: skip
