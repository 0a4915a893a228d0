"""The order in which bodies of messages travel between ranks, known to all of them from the plan.

NCCL runs one operation after the other on a communicator, and every rank must issue the same operations in the same
order, or all of them wait for ever. So nothing here depends on who is faster. A *unit* is one body and its operation,
from the rank that made it to all others. The units of a step come in this order:

    turn 0    part 1 of every rank's first task of the step, in lane order
              part 2 of those whose part 1 said that rows are to follow, in lane order
    turn 1    the same for every rank's second task, ...
    sums      where rows are summed at their owners: the sums of rank 0, 1, ..., after all tasks of the step

Part 1 of all lanes goes first, since it holds what the next tasks of others may wait for. Whether a part 2 or sums
exist depends on the data, but stands in the head of a unit of the same step that travels before them, and a unit is
over only when its head is known; so ranks agree on that too.

No rank waits for ever. A unit is issued when its head is known, that is when its rank has made it. A task of step s
waits for bodies of steps before s only, a rank makes its lanes of a step in lane order, and sums wait for the tasks
of their own step only: all of that comes earlier in the order. So the first unit that is not done is one whose rank can
make it, and once it is made all others have nothing before it.

What it costs: a slow lane holds back the bodies of its step that come after it. With two ranks that matters little (the
slow rank needs none of them before it is done itself), with more ranks the wait for skew is not hidden, while the
time that bodies need on the way still is.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from odin_nerfstudio.runtime.messages import FIRST, REST, SHARE

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.frontier import TaskPlan


class Unit(NamedTuple):
    """One body: part 1 or 2 of a task, or sums."""

    step: int
    lane: int
    """Sums of rank r have -1 - r."""
    part: int

    @staticmethod
    def of(step: int, lane: int, parts: int) -> Unit:
        """The unit of an encoded message (`messages.unit_of`)."""
        return Unit(step, lane, 1 if parts & FIRST else 2)


class TravelOrder:
    """Walks through the units of a run."""

    def __init__(self, plan: TaskPlan, world_size: int, start_step: int) -> None:
        self._plan, self._world_size = plan, world_size
        self._step = start_step - 1
        self._turns: deque[list[int]] = deque()
        self._firsts: deque[Unit] = deque()
        self._seconds: deque[Unit] = deque()
        self._sums: deque[Unit] = deque()

    def current(self) -> tuple[Unit, int] | None:
        """The unit that travels next and the rank that it comes from; None at the end of the plan."""
        while not (self._firsts or self._seconds):
            if self._turns:
                self._firsts.extend(Unit(self._step, lane, 1) for lane in self._turns.popleft())
            elif self._sums:
                self._firsts, self._sums = self._sums, deque()
            elif self._plan.steps is not None and self._step + 1 >= self._plan.steps:
                return None
            else:
                self._step += 1
                self._turns.extend(self._turns_of(self._step))
        unit = (self._firsts or self._seconds)[0]
        return unit, -1 - unit.lane if unit.lane < 0 else self._plan.rank(unit.step, unit.lane)

    def advance(self, parts: int) -> None:
        """The current unit is done. parts: what its head said of it (`messages.unit_of`)."""
        unit = (self._firsts or self._seconds).popleft()
        if parts & SHARE:
            self._sums = deque(Unit(unit.step, -1 - rank, 1) for rank in range(self._world_size))
        elif not parts & REST:
            self._seconds.append(unit._replace(part=2))

    def _turns_of(self, step: int) -> list[list[int]]:
        turns: list[list[int]] = []
        taken = [0] * self._world_size
        for lane in range(self._plan.views_per_step):
            if self._plan.view(step, lane) >= 0:
                rank = self._plan.rank(step, lane)
                if taken[rank] == len(turns):
                    turns.append([])
                turns[taken[rank]].append(lane)
                taken[rank] += 1
        return turns
