"""The gain that `odin-plan` expects, by simulating its plan: from a recording, or from SfM tracks before any training.

Without a recording the points that a view observes stand in for the primitives that it reads and writes, each with the
same share of the view's gradient; a view's compute time is half fixed and half proportional to its points. The link is
chosen so that barriers wait the given share of the time, since that is what a user knows or can measure.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from odin_nerfstudio.planning.gain import Gain
from odin_nerfstudio.planning.rlg import Rlg
from odin_nerfstudio.planning.schedule import Plan
from odin_nerfstudio.planning.tracks import Tracks
from odin_nerfstudio.runtime.recording import Overheads, ViewSets, in_blocks, spatial_blocks
from odin_nerfstudio.runtime.throughput import DelayLimits
from odin_nerfstudio.simulation.cluster import MODES, Outcome, Setup, simulate
from odin_nerfstudio.simulation.network import Link
from odin_nerfstudio.simulation.scene import Scene

MOST_ROWS = 50_000
"""More points than this are taken in blocks of neighbours."""
STEPS = (24, 60)
"""Least and most steps that are simulated; two epochs where that lies between."""
TASKS = 512
"""Most tasks that are simulated: the time for one grows with the square of the ranks."""
SKEW = 0.1
"""Spread of compute times (standard deviation of the logarithm) beside that of the views."""
_COLUMNS = 59
_HALVINGS = 12


def scene_of_tracks(tracks: Tracks, rlg: Rlg) -> Scene:
    """Observed points as stand-ins for primitives. A view without points reads and writes everything."""
    incidence, points = tracks.incidence, max(1, tracks.points)
    every = np.arange(points, dtype=np.int32)
    sets = {}
    for view in range(tracks.views):
        ids = incidence.indices[incidence.indptr[view] : incidence.indptr[view + 1]].astype(np.int32)
        ids = ids if len(ids) else every
        mass = np.full(len(ids), 1 / len(ids), np.float32)
        sets[view] = ViewSets(ids, ids, np.ones(len(ids), np.int32), mass, len(ids))
    row_sizes = np.ones(points, np.int32)
    block = -(-points // MOST_ROWS)
    if block > 1:
        of = spatial_blocks(tracks.xyz, block)
        sets = {view: in_blocks(one, of) for view, one in sets.items()}
        row_sizes = np.bincount(of).astype(np.int32)
    sizes = rlg.sizes.astype(np.float64)
    seconds = 0.5 + 0.5 * sizes / max(1e-9, sizes.mean()) if sizes.any() else np.ones(tracks.views)
    seen = f"blocks of {block} neighbouring points" if block > 1 else "observed points"
    assumptions = (
        f"{seen} stand for primitives, all of a view's with the same share of its gradient: real sets, of a recording, "
        "share more rows and less mass",
        "a view takes half of the mean compute time, and as much again in proportion to its points",
    )
    return Scene(sets, row_sizes, seconds, np.ones(1), _COLUMNS, False, Overheads(), 0, rlg, assumptions)


def expected_gain(plan: Plan, scene: Scene, wait: float | None, link: Link | None = None, skew: float = SKEW) -> Gain:
    """Simulate a plan in all modes.

    Args:
        plan: The plan.
        scene: Sets and times of its views: `scene_of_tracks` or, from a recording, `scene.scene_of`.
        wait: Share of time that barriers wait, in [0, 1), for which a link is sought; None: use `link`.
        link: Between the devices.
        skew: Spread of compute times beside that of the views.

    Raises:
        ValueError: ``wait`` is out of range, or neither wait nor link is given.
    """
    if wait is not None and not 0.0 <= wait < 1.0:
        raise ValueError(f"wait must be a share in [0, 1), got {wait}")
    if plan.ranks == 1:
        return Gain()
    least, most = STEPS
    steps = min(most, max(least, math.ceil(2 * plan.views / plan.views_per_step)))
    steps = max(6, min(steps, TASKS // plan.views_per_step))
    steps = steps if plan.steps is None else min(steps, plan.steps)
    setup = Setup(
        ranks=plan.ranks, views_per_step=plan.views_per_step, link=link or Link("none", math.inf, 0.0), seed=plan.seed,
        skew=skew, limits=DelayLimits(plan.max_delay), structural_every=0, reduce="never", least_steps=steps,
        epochs=1e-9,
    )  # fmt: skip
    short = replace(plan, steps=steps)
    if wait is not None:
        setup, base = _link_for(scene, short, setup, wait)
        network = f"links such that barriers wait {base.wait_share:.0%} of the time" + (
            "" if base.wait_share < wait + 0.02 else ", which differences between views alone cause"
        )
    elif link is not None:
        base, network = simulate(scene, short, setup, "barrier"), f"links: {link.describe()}"
    else:
        raise ValueError("expected_gain needs wait or link")
    quality, throughput = (simulate(scene, short, setup, mode) for mode in MODES[1:])
    return Gain(
        quality=base.seconds / quality.seconds,
        throughput=base.seconds / throughput.seconds,
        ceiling=1 / (1 - base.wait_share),
        hidden_quality=_hidden(quality, base),
        hidden_throughput=_hidden(throughput, base),
        assumptions=(*scene.assumptions, network, f"compute times spread by {skew:.0%} beside that"),
    )


def _hidden(outcome: Outcome, base: Outcome) -> float:
    return 1 - outcome.wait_per_task / base.wait_per_task if base.wait_per_task > 0 else 0.0


def _link_for(scene: Scene, plan: Plan, setup: Setup, wait: float) -> tuple[Setup, Outcome]:
    """The link on which barriers wait that share of the time, or none if they wait longer without; by bisection."""
    best = simulate(scene, plan, setup, "barrier")
    if best.wait_share >= wait:
        return setup, best
    # bytes of a step and its time give the size of bandwidth to begin with
    middle = math.log(best.sent / best.seconds / setup.ranks)
    low, high = middle - 7, middle + 7
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        setup = replace(setup, link=Link("sought", math.exp(middle), 0.0))
        best = simulate(scene, plan, setup, "barrier")
        if abs(best.wait_share - wait) < 0.002:
            break
        low, high = (middle, high) if best.wait_share > wait else (low, middle)
    return setup, best
