"""Predicting the stretches of two measured ranks from the recorded calibration before them (bench_simulate.py)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from odin_nerfstudio.runtime.patience import Patience
from odin_nerfstudio.runtime.recording import Overheads, Recording, mean_without_pauses, seconds_between
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.simulation.cluster import MODES, Setup, simulate
from odin_nerfstudio.simulation.network import Link
from odin_nerfstudio.simulation.scene import scene_of

RANKS = 2
STEP_FIELDS = ("step", "acquire", "compute", "contribute", "publish", "waited", "deferred_rows", "tasks")
"""What the ranks keep of each step's record, by name of the attribute."""
_AT = {name: k for k, name in enumerate(STEP_FIELDS)}


class Replayed:
    """The views of one stretch of the real run."""

    def __init__(self, views: Sequence[Sequence[int]]) -> None:
        self._views, self.steps, self.views_per_step = views, len(views), len(views[0])

    def view(self, step: int, lane: int) -> int:
        return self._views[step][lane]

    def rank(self, step: int, lane: int) -> int:
        return lane * RANKS // self.views_per_step


def calibrated(recording: Recording, ranks: Sequence[dict[str, Any]]) -> Overheads:
    """Overheads as they were in the calibration stretches, barrier first; no later stretch is looked at.

    What splitting a contribution adds is the difference between steps that split and those of the barrier; what a pass
    that publishes some rows costs is the time that publication took longer than the barrier's, over the passes.
    """
    stretches = [s for one in ranks for s in one["stretches"] if s.get("recorded") and not s.get("warm")]
    of = {mode: [s for s in stretches if s["mode"] == mode] for mode in MODES}
    steps = {m: np.concatenate([np.array(s["records"]).reshape(-1, len(STEP_FIELDS)) for s in of[m]]) for m in MODES}
    base = {name: mean_without_pauses(steps["barrier"][:, _AT[name]]) for name in ("acquire", "contribute", "publish")}
    given = recording.overheads
    mark = given.mark + given.bound
    finer = np.concatenate([steps[m] for m in MODES if m != "barrier"])
    split = finer[finer[:, _AT["deferred_rows"]] > 0]
    defer = given.defer
    if len(split) >= 10:
        defer = max(0.0, mean_without_pauses(split[:, _AT["contribute"]]) - base["contribute"] - mark)
    passes = sum(s["passes"] for m in MODES for s in of[m])
    sweep = given.sweep
    if passes >= 10:
        longer = sum(s["publish"] - s["steps"] * base["publish"] for m in MODES[1:] for s in of[m])
        sweep = max(0.0, longer / passes - given.scan)
    runs = [range(s["first"], s["first"] + s["steps"]) for s in of["barrier"]]
    mine = np.isin(recording.column("step"), [step for run in runs for step in run])
    also = np.isin(recording.step_column("step"), [step for run in runs for step in run])
    tasks, records = recording.tasks[mine], recording.steps[also]
    own = [(tasks[tasks[:, 3] == rank], records[records[:, 1] == rank]) for rank in range(RANKS)]
    return replace(
        given, acquire=max(0.0, base["acquire"] - mark), contribute=base["contribute"], publish=base["publish"],
        defer=defer, sweep=sweep, react=statistics.mean(s["reaction"] for s in of["barrier"]),
        between=float(np.mean([seconds_between(*one) for one in own])),
    )  # fmt: skip


def predictions(
    name: str, link: Link, skew_ms: float, ranks: Sequence[dict[str, Any]], recording: Recording
) -> list[dict[str, Any]]:
    """One row per mode: measured milliseconds per step and the simulator's."""
    stretches, views = ranks[0]["stretches"], ranks[0]["views"]
    scene = scene_of(recording)
    scene.overheads, scene.structural_every = calibrated(recording, ranks), 0
    took = {
        (int(record[_AT["step"]]), rank): record[_AT["compute"]]
        for rank, one in enumerate(ranks) for s in one["stretches"] for record in s["records"]
    }  # fmt: skip
    base = stretches[0]["first"]
    known = {(kind, mode): [Patience() for _ in range(RANKS)] for kind in ("same", "drawn") for mode in MODES}
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for k, one in enumerate(stretches):
        first, steps = one["first"] - base, one["steps"]
        plan = Replayed(views[first : first + steps])
        setup = Setup(ranks=RANKS, link=link, seed=k, least_steps=steps, epochs=1e-9, reduce="never")

        def same(task: Task, start: int = one["first"]) -> float:
            return took[start + task.step, task.lane]

        replayed = simulate(scene, plan, setup, one["mode"], seconds=same, patience=known["same", one["mode"]])
        drawn = simulate(scene, plan, setup, one["mode"], patience=known["drawn", one["mode"]])
        if one.get("recorded"):
            continue  # simulated only for what patience learns there
        alike = [rank["stretches"][k] for rank in ranks]
        seconds = max(s["seconds"] for s in alike)
        found[one["mode"]].append(
            {
                "measured": 1e3 * seconds / steps,
                "same": 1e3 * replayed.seconds / steps,
                "drawn": 1e3 * drawn.seconds / steps,
                "wait_measured": statistics.mean(s.get("wait", 0.0) for s in alike) / seconds,
                "wait_predicted": replayed.wait_share,
                "late_measured": sum(s.get("delayed_tasks", 0.0) for s in alike) / (steps * RANKS),
                "late_predicted": replayed.delayed_share,
            }
        )
    rows = []
    for mode in MODES:
        means = {key: statistics.mean(one[key] for one in found[mode]) for key in found[mode][0]}
        times = [one["measured"] for one in found[mode]]
        about = {"scene": name, "link": link.name, "skew_ms": skew_ms, "mode": mode}
        rows.append({**about, **means, "spread": max(times) - min(times)})
    return rows
