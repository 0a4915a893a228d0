"""What a barrier would have cost in a run that had none: its own work and message times, replayed under a barrier.

Under a barrier a rank starts step s when every contribution to step s - 1 has reached it, so with the work and transfer
times that a run measured, the times of the synchronized run follow from a recursion (max-plus algebra; Baccelli et al.,
*Synchronization and Linearity*, 1992)::

    start_r(s)  = max(end_r(s - 1) + before_r(s), complete_r(s - 1) + reaction_r)
    end_r(s)    = start_r(s) + publication_r + after_r(s)
    arrive_rq(s) = max(end_r(s), arrive_rq(s - 1)) + transfer_rq(s)        a link delivers one message after the other
    complete_q(s) = max over r of arrive_rq(s)

A transfer is what a message took from when its link was free for it; the reaction is the median of what passed between
an arrival and the end of the wait for it, and only counts where the rank would wait. Where rows are summed by their
owners, what counts is by how much the last sum arrived after the last contribution had left. The replay cannot know
what waiting changes by itself, such as processors that run faster while others are idle.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from odin_nerfstudio.runtime.telemetry import Telemetry, Timeline

_STEP, _LANE, _BEFORE, _AFTER, _PUBLICATION, _WAIT, _PAUSED, _REACTION, _END = range(len(Timeline.TASK_COLUMNS))


@dataclass(frozen=True)
class BarrierEstimate:
    """A run and the run with a barrier that its times imply. Seconds; waits are means over the ranks."""

    ranks: int
    steps: int
    tasks: int
    measured: float
    """From the first task's start to the last arrival, without pauses."""
    barrier: float
    wait: float
    barrier_wait: float

    @property
    def gain(self) -> float:
        """How many times as fast as with a barrier the run was."""
        return self.barrier / self.measured

    @property
    def hidden(self) -> float:
        """Share of the barrier's wait that the run did not have; negative if it waited longer."""
        return 1 - self.wait / self.barrier_wait if self.barrier_wait > 0 else 0.0

    def sentence(self, mode: str) -> str:
        """What the mode brought in this run, for the user."""
        if self.ranks == 1:
            return "One rank waits for nobody: there was nothing to hide."
        share = self.barrier_wait / self.barrier
        if mode == "barrier":
            return barrier_sentence(self.wait / self.measured)
        if share < 0.01:
            return (
                f"A barrier would have cost about {100 * share:.1f} % of this run: there was next to nothing to hide "
                f"(estimated from the run's own work and message times)."
            )
        speed = (
            f"{self.gain:.2f} times as fast as with a barrier"
            if self.gain >= 1
            else f"{1 / self.gain:.2f} times as slow as with a barrier"
        )
        hidden = max(0.0, min(1.0, self.hidden))
        return (
            f"In {mode} mode this run was {speed}, which would have taken about {self.barrier:.0f} s instead of "
            f"{self.measured:.0f} s; {100 * hidden:.0f} % of its waiting was hidden (estimated from the run's own work "
            f"and message times)."
        )


def barrier_sentence(waits: float) -> str:
    """What the barrier cost a run, for the user. waits: share of its time."""
    return (
        f"Waiting at the barrier took {100 * waits:.0f} % of this run; without any wait it could be at most "
        f"{1 / max(1 - waits, 1e-9):.2f} times as fast (--pipeline.odin.mode quality or throughput)."
    )


def pack_timeline(telemetry: Telemetry, latest: int | None = None) -> bytes:
    """A rank's tasks and arrivals as bytes. latest: only of so many steps. Any thread may call it."""
    timeline = telemetry.timeline
    if latest is None:
        tasks, arrivals = timeline.tasks[:], timeline.arrivals[:]
    else:
        tasks = _since(timeline.tasks, len(Timeline.TASK_COLUMNS), telemetry.doing.step - latest)
        arrivals = _since(timeline.arrivals, len(Timeline.ARRIVAL_COLUMNS), telemetry.doing.step - latest)
    head = {"rank": telemetry.rank, "epoch": telemetry.epoch, "tasks": len(tasks)}
    return json.dumps(head).encode() + b"\n" + tasks.tobytes() + arrivals.tobytes()


def _since(values: array[float], width: int, step: int) -> array[float]:
    """The rows from a step on; the first column is the step, nearly in order."""
    at = len(values)
    while at >= width and values[at - width] >= step:
        at -= width
    return values[at:]


@dataclass(eq=False)
class _Rank:
    tasks: np.ndarray
    """[n, 9]: `Timeline.TASK_COLUMNS`, the end as wall clock."""
    arrivals: dict[tuple[int, int], float]
    """(step, lane): arrival (wall clock)."""
    sums: dict[int, float] = field(default_factory=dict)
    """Step: arrival of the last sum of an owner."""


def _unpack(part: bytes) -> _Rank:
    line, data = part.split(b"\n", 1)
    head = json.loads(line)
    numbers = np.frombuffer(data, np.float64).copy()
    tasks = numbers[: head["tasks"]].reshape(-1, len(Timeline.TASK_COLUMNS))
    arrivals = numbers[head["tasks"] :].reshape(-1, len(Timeline.ARRIVAL_COLUMNS))
    tasks[:, _END] += head["epoch"]
    rank = _Rank(tasks, {})
    for step, lane, time in arrivals:
        if lane >= 0:
            rank.arrivals[int(step), int(lane)] = time + head["epoch"]
        else:
            rank.sums[int(step)] = max(rank.sums.get(int(step), 0.0), time + head["epoch"])
    return rank


def estimate(parts: Sequence[bytes]) -> BarrierEstimate | None:
    """Replay a run under a barrier.

    Args:
        parts: What `pack_timeline` gave on each rank, by rank.

    Returns:
        The estimate over all steps that every rank still knows; None if there are fewer than two.
    """
    ranks = [_unpack(part) for part in parts]
    if any(len(r.tasks) == 0 for r in ranks):
        return None
    first = int(max(r.tasks[0, _STEP] for r in ranks))
    last = int(min(r.tasks[-1, _STEP] for r in ranks))
    if last <= first:
        return None
    for rank in ranks:
        steps = rank.tasks[:, _STEP]
        rank.tasks = rank.tasks[(steps >= first) & (steps <= last)]
    _align_clocks(ranks)
    return _Replay(ranks).run(first, last)


def _align_clocks(ranks: Sequence[_Rank]) -> None:
    """Shift the clocks of ranks whose messages seem to arrive before they were sent, as NTP does: halfway."""
    for q in range(1, len(ranks)):
        there = _least_delay(ranks[0], ranks[q])
        back = _least_delay(ranks[q], ranks[0])
        if there is None or back is None or min(there, back) >= 0:
            continue
        shift = (back - there) / 2
        ranks[q].tasks[:, _END] += shift
        ranks[q].arrivals = {key: time + shift for key, time in ranks[q].arrivals.items()}
        ranks[q].sums = {step: time + shift for step, time in ranks[q].sums.items()}


def _least_delay(sender: _Rank, receiver: _Rank) -> float | None:
    delays = [
        arrival - end
        for step, lane, end in sender.tasks[:, [_STEP, _LANE, _END]]
        if (arrival := receiver.arrivals.get((int(step), int(lane)))) is not None
    ]
    return min(delays, default=None)


def _typical(reactions: np.ndarray) -> float:
    """Median of those that there were."""
    found = reactions[reactions > 0]
    return float(np.median(found)) if len(found) else 0.0


class _Replay:
    """The recursion of the module's text."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self.ranks = ranks
        self.by_step: list[dict[int, list[np.ndarray]]] = []
        for rank in ranks:
            grouped: dict[int, list[np.ndarray]] = defaultdict(list)
            for row in rank.tasks:
                grouped[int(row[_STEP])].append(row)
            self.by_step.append(grouped)
        self.transfer = {(r, q): self._transfers(r, q) for r in range(len(ranks)) for q in range(len(ranks)) if r != q}

    def _transfers(self, r: int, q: int) -> dict[tuple[int, int], float]:
        """Time of each message of rank r on its link to rank q."""
        free, out = 0.0, {}
        for step, lane, end in self.ranks[r].tasks[:, [_STEP, _LANE, _END]]:
            key = (int(step), int(lane))
            arrival = self.ranks[q].arrivals.get(key)
            if arrival is not None:
                out[key] = max(0.0, arrival - max(end, free))
                free = arrival
        return out

    def _lag_of_sums(self, q: int, step: int) -> float | None:
        """By how much the last sum of a step reached rank q after the last contribution had left; None: no sums."""
        arrival = self.ranks[q].sums.get(step)
        if arrival is None:
            return None
        left = max((tasks[-1][_END] for by in self.by_step if (tasks := by.get(step))), default=arrival)
        return max(0.0, arrival - left)

    def run(self, first: int, last: int) -> BarrierEstimate:
        ranks, count = self.ranks, len(self.ranks)
        starts = [float(r.tasks[0, _END] - r.tasks[0, _BEFORE:_REACTION].sum()) for r in ranks]
        reaction = [_typical(r.tasks[:, _REACTION]) for r in ranks]
        at, complete = list(starts), [0.0] * count
        arrived: dict[tuple[int, int], float] = defaultdict(float)
        wait = 0.0
        for step in range(first, last + 1):
            following = [0.0] * count
            for r in range(count):
                for k, (_, lane, before, after, publication, *_) in enumerate(self.by_step[r].get(step, ())):
                    at[r] += before
                    if k == 0:
                        if complete[r] > at[r]:
                            wait += complete[r] + reaction[r] - at[r]
                            at[r] = complete[r] + reaction[r]
                        at[r] += publication
                    at[r] += after
                    for q in range(count):
                        transfer = self.transfer[r, q].get((step, int(lane))) if q != r else None
                        if transfer is not None:
                            arrived[r, q] = max(at[r], arrived[r, q]) + transfer
                            following[q] = max(following[q], arrived[r, q])
                following[r] = max(following[r], at[r])
            left = max(at)
            for q in range(count):
                lag = self._lag_of_sums(q, step)
                complete[q] = max(complete[q], following[q] if lag is None else left + lag)
        begin, end = min(starts), max(*at, *complete)
        arrivals = [time for r in ranks for (step, _), time in r.arrivals.items() if first <= step <= last]
        arrivals += [time for r in ranks for step, time in r.sums.items() if first <= step <= last]
        finish = max([*(float(r.tasks[-1, _END]) for r in ranks), *arrivals])
        return BarrierEstimate(
            ranks=count,
            steps=last - first + 1,
            tasks=sum(len(r.tasks) for r in ranks),
            measured=finish - begin - max(float(r.tasks[1:, _PAUSED].sum()) for r in ranks),
            barrier=end - begin,
            wait=sum(float(r.tasks[1:, _WAIT].sum()) for r in ranks) / count,
            barrier_wait=wait / count,
        )
