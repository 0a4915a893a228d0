"""Simulating a job: ranks, links and a plan, in one mode, on the virtual clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from odin_nerfstudio.planning.schedule import Order, Plan, make_plan
from odin_nerfstudio.runtime.evidence import Shares
from odin_nerfstudio.runtime.frontier import TaskPlan
from odin_nerfstudio.runtime.gate import BarrierPolicy, GatePolicy, QualityPolicy
from odin_nerfstudio.runtime.patience import Patience
from odin_nerfstudio.runtime.recording import ViewSets
from odin_nerfstudio.runtime.reduction import Traffic
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.runtime.throughput import DelayLimits, ThroughputPolicy
from odin_nerfstudio.simulation.clock import Clock
from odin_nerfstudio.simulation.fabric import Fabric, make_network
from odin_nerfstudio.simulation.network import LINKS, Link
from odin_nerfstudio.simulation.rank import Job, SimulatedRank
from odin_nerfstudio.simulation.scene import Scene

Mode = Literal["barrier", "quality", "throughput"]
MODES: tuple[Mode, ...] = ("barrier", "quality", "throughput")


@dataclass(frozen=True)
class Setup:
    """The simulated job, but for its mode and order.

    Attributes:
        ranks: Devices.
        views_per_step: Lanes; None: one for each device.
        link: Between any two devices; a fabric has several kinds.
        epochs: Length of the simulation, in epochs; at least `least_steps` steps.
        least_steps: See there.
        seed: Of the plan and of everything drawn.
        skew: Standard deviation of the logarithm of a factor that each task's compute time is multiplied with.
        lookahead: See `runtime.engine.EngineOptions`.
        limits: Of throughput mode.
        structural_every: Steps between structural steps; None: as recorded.
        reduce: Rows are summed by their owners; "auto" decides as the runtime does: by bytes, from 3 ranks on, not in
            throughput mode.
        linger: Ranks wait for whole steps where that is cheaper (`runtime.patience`).
        turn_lanes: Every lane goes on to the next rank once an epoch.
    """

    ranks: int = 8
    views_per_step: int | None = None
    link: Link | Fabric = LINKS["pcie4"]
    epochs: float = 3.0
    least_steps: int = 30
    seed: int = 0
    skew: float = 0.0
    lookahead: int = 2
    limits: DelayLimits = field(default_factory=DelayLimits)
    structural_every: int | None = None
    reduce: Literal["auto", "always", "never"] = "auto"
    linger: bool = True
    turn_lanes: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.lanes < self.ranks:
            raise ValueError(f"{self.ranks} ranks need at least that many views per step, not {self.lanes}")
        if self.epochs <= 0 or self.least_steps < 1 or self.skew < 0 or self.lookahead < 0:
            raise ValueError(
                f"epochs, least_steps, skew, lookahead: {self.epochs}, {self.least_steps}, {self.skew}, "
                f"{self.lookahead} make no sense"
            )

    @property
    def lanes(self) -> int:
        """Views per step."""
        return self.ranks if self.views_per_step is None else self.views_per_step

    def assumptions(self) -> tuple[str, ...]:
        """What the job rests on, one phrase each."""
        skew = f"a further lognormal skew of {self.skew:g} per task" if self.skew else "no skew beside the recorded"
        return (
            f"links: {self.link.describe()}, messages to different devices share them, and sending costs no computing",
            f"compute times have {skew}",
            f"throughput mode knows every view's evidence and admits reads up to {self.limits.max_delay} steps late, "
            f"overlap {self.limits.max_overlap:g}, impact {self.limits.max_impact:g} per row",
        )

    def steps(self, views: int) -> int:
        """Steps to simulate."""
        return max(self.least_steps, math.ceil(self.epochs * views / self.lanes))


@dataclass(frozen=True)
class Outcome:
    """A simulated run.

    Attributes:
        mode: Of synchronization.
        order: Of the views.
        seconds: From the start to the last publication.
        tasks: Rendered views.
        steps: Steps.
        wait: Critical-path wait of each rank. [s]
        waits: By hazard, over all ranks. [s]
        compute: Rendering and backward passes of each rank. [s]
        sent: Bytes over all ranks.
        delayed: Tasks that throughput mode admitted with late rows.
        reduced: Rows were summed by their owners.
    """

    mode: str
    order: str
    seconds: float
    tasks: int
    steps: int
    wait: tuple[float, ...]
    waits: Mapping[str, float]
    compute: tuple[float, ...]
    sent: float
    delayed: int
    reduced: bool

    @property
    def views_per_second(self) -> float:
        """Throughput of the job."""
        return self.tasks / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Mean over ranks of the share of time that a rank waits."""
        return float(np.mean(self.wait)) / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_per_task(self) -> float:
        """Mean wait before a task. [s]"""
        return sum(self.wait) / max(1, self.tasks)

    @property
    def delayed_share(self) -> float:
        """Share of tasks that were admitted with late rows."""
        return self.delayed / max(1, self.tasks)


class RecordedEvidence:
    """Gradient-mass evidence from the recorded sets: of every view, as after the first epoch."""

    def __init__(self, sets: Mapping[int, ViewSets]) -> None:
        self._shares = {v: Shares.of(torch.from_numpy(s.active), torch.from_numpy(s.mass)) for v, s in sets.items()}

    def of(self, view: int) -> Shares | None:
        return self._shares.get(view)


def plan_of(scene: Scene, setup: Setup, order: Order) -> Plan:
    """The plan that a training run with these settings follows."""
    return make_plan(
        scene.rlg, ranks=setup.ranks, views_per_step=setup.lanes, order=order, seed=setup.seed,
        steps=setup.steps(scene.views), max_delay=setup.limits.max_delay,
        turn_every=max(1, scene.views // setup.lanes) if setup.turn_lanes else 0,
    )  # fmt: skip


def simulate(
    scene: Scene,
    plan: TaskPlan,
    setup: Setup,
    mode: Mode,
    order: str = "given",
    seconds: Callable[[Task], float] | None = None,
    patience: Sequence[Patience] | None = None,
) -> Outcome:
    """Run a plan in a mode. Deterministic in its arguments.

    Args:
        scene: Sets and times of the views.
        plan: Who renders what when; as long as the simulation, or without end.
        setup: The job.
        mode: Of synchronization.
        order: Name of the plan's order, for the outcome.
        seconds: Compute time of a task; None: that of its view, times what the setup and the recording make vary.
        patience: What each rank has found out about waiting for whole steps, in this mode; it goes on there. None:
            nothing yet.

    Raises:
        ValueError: The mode is unknown, or the plan does not fit the job.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    if plan.views_per_step != setup.lanes:
        raise ValueError(f"the plan has {plan.views_per_step} views per step, the job {setup.lanes}")
    steps = setup.steps(scene.views) if plan.steps is None else plan.steps
    every = scene.structural_every if setup.structural_every is None else setup.structural_every
    policies = [make_simulated_policy(scene, setup, mode) for _ in range(setup.ranks)]
    # Sums of owners carry no evidence, so that the runtime leaves them off where reads may be late, unless told to.
    reduced = (setup.reduce == "always" or not policies[0].max_delay) and _reduces(scene, plan, setup, steps)
    job = Job(
        setup.ranks, scene, plan, steps, seconds or compute_seconds(scene, setup), setup.lookahead,
        lambda step: every > 0 and (step + 1) % every == 0, reduced,
        setup.linger,
    )  # fmt: skip
    clock = Clock()
    ranks: list[SimulatedRank] = []
    network = make_network(
        clock, setup.ranks, setup.link, lambda source, to, message: ranks[to].exchange.deliver(source, message)
    )
    for number in range(setup.ranks):
        ranks.append(SimulatedRank(number, job, policies[number], clock, network))
        if patience is not None:
            ranks[number].frontier.patience = patience[number]
        clock.start(number, ranks[number].process())
    clock.run()
    waits: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for (hazard, _), waited in rank.telemetry.waits.items():
            waits[hazard] += waited
    return Outcome(
        mode=mode,
        order=order,
        seconds=max(rank.ended for rank in ranks),
        tasks=sum(rank.tasks for rank in ranks),
        steps=steps,
        wait=tuple(rank.telemetry.totals["wait"] for rank in ranks),
        waits=dict(sorted(waits.items())),
        compute=tuple(rank.computed for rank in ranks),
        sent=sum(rank.exchange.sent for rank in ranks),
        delayed=sum(rank.delayed for rank in ranks),
        reduced=job.reduced,
    )


def make_simulated_policy(scene: Scene, setup: Setup, mode: Mode) -> GatePolicy:
    """A mode's policy, which knows the evidence of every view."""
    if mode == "throughput":
        return ThroughputPolicy(RecordedEvidence(scene.sets), setup.limits)
    return BarrierPolicy() if mode == "barrier" else QualityPolicy()


def compute_seconds(scene: Scene, setup: Setup) -> Callable[[Task], float]:
    """Compute time of a task, the same in every mode and order that gives the task that view."""

    def seconds(task: Task) -> float:
        drawn = np.random.default_rng((setup.seed, task.step, task.lane))
        residual = scene.residuals[int(drawn.integers(len(scene.residuals)))]
        factor = math.exp(setup.skew * float(drawn.standard_normal())) if setup.skew > 0 else 1.0
        return float(scene.seconds[task.view] * residual * factor)

    return seconds


def _reduces(scene: Scene, plan: TaskPlan, setup: Setup, steps: int) -> bool:
    """Whether the runtime would sum rows at their owners: it decides by the bytes of direct messages."""
    if setup.ranks < 2 or setup.reduce == "never":
        return False
    if setup.reduce == "always" or setup.ranks < 3:
        return setup.reduce == "always"
    traffic = Traffic(setup.ranks)
    traffic.width = scene.columns
    for step in range(0, min(steps, 64), traffic.every):
        views = [plan.view(step, lane) for lane in range(plan.views_per_step)]
        seen = np.zeros(scene.rows, bool)
        for view in views:
            if view >= 0:
                traffic.ids += int(scene.sets[view].counts.sum())
                seen[scene.sets[view].active] = True
        traffic.union += int(scene.row_sizes[seen].sum())
    return traffic.decide(False)


def compare(
    scene: Scene, setup: Setup, modes: Sequence[Mode] = MODES, orders: Sequence[Order] = ("rlg", "random")
) -> list[Outcome]:
    """Every mode in every order; barrier, to which the others are compared, is always among them and first.

    Where ranks may wait for whole steps (`Setup.linger`), a mode is what it comes to in a long run: steps are published
    in parts, or all whole if that is faster.
    """
    wanted: list[Mode] = ["barrier", *(m for m in modes if m != "barrier")]
    outcomes = []
    for order in orders:
        plan = plan_of(scene, setup, order)
        barrier = simulate(scene, plan, setup, "barrier", order)
        outcomes.append(barrier)
        for mode in wanted[1:]:
            found = simulate(scene, plan, replace(setup, linger=False), mode, order)
            if setup.linger and found.seconds > barrier.seconds:
                whole = [Patience(whole=True) for _ in range(setup.ranks)]
                found = min(found, simulate(scene, plan, setup, mode, order, patience=whole), key=lambda o: o.seconds)
            outcomes.append(found)
    return outcomes
