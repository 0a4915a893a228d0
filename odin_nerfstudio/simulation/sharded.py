"""Simulating a job with sharded primitives on the virtual clock; `cluster` is its counterpart for replicated ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from odin_nerfstudio.planning.schedule import Order
from odin_nerfstudio.runtime.frontier import TaskPlan
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.simulation.clock import Clock
from odin_nerfstudio.simulation.cluster import (
    MODES,
    Mode,
    Outcome,
    Setup,
    compute_seconds,
    make_simulated_policy,
    plan_of,
)
from odin_nerfstudio.simulation.fabric import make_network
from odin_nerfstudio.simulation.shard_rank import ShardJob, ShardRank
from odin_nerfstudio.simulation.shards import Cut, ShardedScene

STATE_BYTES = 3 * 59 * 4 + 12
"""Memory of a primitive with three bands of harmonics: parameters, two moments, statistics."""


@dataclass(frozen=True, kw_only=True)
class ShardedOutcome(Outcome):
    """A simulated run with sharded primitives.

    Attributes:
        busy: Time that each rank's device works. [s]
        packets: Messages sent, and taken in, over all ranks.
        primitives: Of the largest shard.
        memory: Most memory of a rank: its shard's state, copies, staged gradients. [bytes]
    """

    busy: tuple[float, ...]
    packets: tuple[int, int]
    primitives: int
    memory: float


def simulate_sharded(
    sharded: ShardedScene,
    plan: TaskPlan,
    setup: Setup,
    mode: Mode,
    order: str = "given",
    seconds: Callable[[Task], float] | None = None,
) -> ShardedOutcome:
    """Run a plan in a mode. Deterministic in its arguments.

    Args:
        sharded: Sets, times and positions.
        plan: Who renders what when; as long as the simulation, or without end.
        setup: The job. Its way to reduce does not matter.
        mode: Of synchronization; barrier exchanges all to all twice a step.
        order: Name of the plan's order, for the outcome.
        seconds: Compute time of a task, both stages; None: as in `cluster.simulate`.

    Raises:
        ValueError: The mode is unknown, or the plan does not fit the job.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    if plan.views_per_step != setup.lanes:
        raise ValueError(f"the plan has {plan.views_per_step} views per step, the job {setup.lanes}")
    scene = sharded.scene
    steps = setup.steps(scene.views) if plan.steps is None else plan.steps
    every = scene.structural_every if setup.structural_every is None else setup.structural_every
    whole, share = seconds or compute_seconds(scene, setup), sharded.stages.pixels
    cut = Cut(sharded, plan, setup.ranks, steps)
    job = ShardJob(
        setup.ranks, cut, sharded.stages, plan, steps, lambda task: share * whole(task), setup.lookahead,
        lambda step: every > 0 and (step + 1) % every == 0,
    )  # fmt: skip
    clock = Clock()
    ranks: list[ShardRank] = []
    network = make_network(
        clock, setup.ranks, setup.link, lambda source, to, message: ranks[to].deliver(source, message)
    )
    for number in range(setup.ranks):
        policy = make_simulated_policy(cut.shard(number), setup, mode)
        ranks.append(ShardRank(number, job, policy, clock, network))
    for rank in ranks:
        clock.start(rank.number, rank.process())
    clock.run()
    waits: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for hazard, waited in rank.waits.items():
            waits[hazard] += waited
    sizes = cut.primitives()
    return ShardedOutcome(
        mode=mode,
        order=order,
        seconds=max(rank.ended for rank in ranks),
        tasks=sum(rank.tasks for rank in ranks),
        steps=steps,
        wait=tuple(sum(rank.waits.values()) for rank in ranks),
        waits=dict(sorted(waits.items())),
        compute=tuple(rank.rendered for rank in ranks),
        sent=sum(rank.sent for rank in ranks),
        delayed=len(set().union(*(rank.owner.late for rank in ranks))),
        reduced=False,
        busy=tuple(rank.busy for rank in ranks),
        packets=(sum(r.packets_out for r in ranks), sum(r.packets_in for r in ranks)),
        primitives=int(sizes.max()),
        memory=max(STATE_BYTES * float(n) + r.owner.peak for n, r in zip(sizes, ranks)),
    )


def compare_sharded(
    sharded: ShardedScene,
    setup: Setup,
    modes: Sequence[Mode] = MODES,
    orders: Sequence[Order] = ("rlg", "random"),
) -> list[ShardedOutcome]:
    """As `cluster.compare`."""
    wanted: list[Mode] = ["barrier", *(m for m in modes if m != "barrier")]
    outcomes = []
    for order in orders:
        plan = plan_of(sharded.scene, setup, order)
        outcomes += [simulate_sharded(sharded, plan, setup, mode, order) for mode in wanted]
    return outcomes
