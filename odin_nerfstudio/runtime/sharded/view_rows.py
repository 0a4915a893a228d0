"""Parameters of views, camera poses and bilateral grids, beside sharded primitives: every rank keeps all of them.

Owners project a view as its pose is at the view's step. What the pose did to their rows they send to the view's rank as
exact sums, so that it does not show how many owners there are (on the CPU; elsewhere as float64, which are added in the
order of the ranks). That rank makes the gradient of the view's rows, and tells it to all ranks, which publish it like
replicas of these tables. A row is pending for tasks of its own view only, so nobody waits unless a view comes twice
within the look-ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from odin_nerfstudio.runtime import messages
from odin_nerfstudio.runtime.contributions import collect
from odin_nerfstudio.runtime.frontier import TaskPlan
from odin_nerfstudio.runtime.gate import Awaited
from odin_nerfstudio.runtime.messages import FRAME_WORDS, Contribution
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.shadow import Shadow, ShadowPool, TableShadow, Task
from odin_nerfstudio.runtime.staging import StepStaging
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.transport import Kind, Received, Transport, empty_message

PoseBackward = Callable[[Task, Tensor, Mapping[str, TableShadow]], None]
"""Leaves in the shadow of a task what the sum of its owners' [K] means for its view's pose (`viewmat_gradient`)."""


@dataclass(eq=False)
class _Rendered:
    """A task that waits for what owners say of its pose."""

    shadow: Shadow
    awaited: set[int]
    sums: dict[int, Tensor] = field(default_factory=dict)
    """By owner."""


class ViewRows:
    """All views' rows on one rank, from the oldest step that is not published entirely, `low`, to the look-ahead."""

    def __init__(
        self,
        plan: TaskPlan,
        tables: Sequence[RowTable],
        transport: Transport,
        backward: PoseBackward | None,
        limit: Callable[[], int],
        start_step: int,
        debug: bool = False,
    ) -> None:
        """
        Args:
            tables: A row per view in each.
            backward: None: poses are not trained.
            limit: Last step that may be published for the time being.
        """
        self.tables, self.low = tables, start_step
        self._plan, self._transport, self._backward, self._limit = plan, transport, backward, limit
        self._peers = [r for r in range(transport.world_size) if r != transport.rank]
        self._publisher = Publisher(tables, debug)
        self._pools = [ShadowPool(table) for table in tables]
        self._steps: dict[int, StepStaging] = {}
        self._rendered: dict[tuple[int, int], _Rendered] = {}

    # -- reading

    def ready(self, view: int, step: int) -> bool:
        """Whether a view's rows are as a task of a step reads them; publishes them as far as they may be."""
        if not self._at(view, step):
            for number in range(self.low, min(step, self._limit() + 1)):
                self._publisher.some(self._staging(number), number - self.low)
        return self._at(view, step)

    def _at(self, view: int, step: int) -> bool:
        return all(int(table.versions[view]) >= step for table in self.tables)

    def take(self, task: Task) -> Shadow:
        """A task's own copy of its view's rows, which must be ready."""
        ids = torch.tensor([task.view], dtype=torch.int32, device=self.tables[0].device)
        return Shadow(task, {t.name: pool.take(ids, task.view) for t, pool in zip(self.tables, self._pools)})

    # -- gradients

    def rendered(self, shadow: Shadow, owners: set[int]) -> None:
        """The backward pass of a task is done. owners: ranks that get gradients of its splats."""
        key = (shadow.task.step, shadow.task.lane)
        self._rendered[key] = _Rendered(shadow, set() if self._backward is None else owners)
        self._finish(key)

    def send_sums(self, step: int, lane: int, sums: Tensor | None) -> None:
        """Tell the rank of a task what its pose did to this rank's rows. sums: [K] int64 or float64; None: nothing."""
        if self._backward is None:
            return
        rank = self._plan.rank(step, lane)
        given = torch.empty(0, dtype=torch.int64) if sums is None else sums
        if rank == self._transport.rank:
            self._add(rank, step, lane, given)
        else:
            head = torch.tensor([step, lane, int(given.is_floating_point())], dtype=torch.int32)
            words = empty_message(torch.cat([head, given.view(torch.int32)]))
            self._transport.send([rank], Kind.CAMERA_SUMS, words)

    def take_sums(self, received: Received) -> None:
        """Take in a message of `send_sums`."""
        words = received.words[FRAME_WORDS:]
        step, lane, floating = words[:3].tolist()
        given = words[3:].clone()  # at an address that int64 may have
        self._add(received.peer, step, lane, given.view(torch.float64 if floating else torch.int64))

    def _add(self, owner: int, step: int, lane: int, sums: Tensor) -> None:
        task = self._rendered.get((step, lane))
        if task is None or owner not in task.awaited:
            raise RuntimeError(f"rank {owner} sent sums of step {step} lane {lane}, for which it was not asked")
        task.awaited.discard(owner)
        if len(sums):
            task.sums[owner] = sums
        self._finish((step, lane))

    def _finish(self, key: tuple[int, int]) -> None:
        """Contribute a task's gradients once all owners have answered."""
        task = self._rendered[key]
        if task.awaited:
            return
        del self._rendered[key]
        if task.sums and self._backward is not None:
            total = reduce(torch.add, (task.sums[rank] for rank in sorted(task.sums)))
            self._backward(task.shadow.task, total, task.shadow.tables)
        message = collect(task.shadow.task, task.shadow, self.tables, None, None)
        if self._peers:
            words = messages.encode(message, first=True, rest=True)
            self._transport.send(self._peers, Kind.CONTRIBUTION, words)
        self._stage(message)
        for table, pool in zip(self.tables, self._pools):
            pool.give_back(task.shadow[table.name])

    def take_contribution(self, received: Received) -> None:
        """Take in what another rank contributes to its view's rows."""
        message = messages.to_device(messages.decode(received.words), self.tables[0].device)
        if self._plan.rank(message.step, message.lane) != received.peer:
            raise RuntimeError(
                f"rank {received.peer} sent step {message.step} lane {message.lane}, which the plan gives to another"
                " rank; the plans differ"
            )
        self._stage(message)

    def _stage(self, message: Contribution) -> None:
        self._staging(message.step).accept(message)

    # -- publication

    def advance(self) -> None:
        """Publish the steps that all views have contributed to."""
        limit = self._limit()
        while self.low <= limit and (staged := self._staging(self.low)).complete:
            if not staged.started:
                self._publisher.whole(staged)
            else:
                self._publisher.some(staged, 0)
                self._publisher.finish(staged)
            del self._steps[self.low]
            self.low += 1

    def missing(self, current: int) -> tuple[Awaited, ...]:
        """Lanes that steps before a step wait for."""
        known = (self._steps.get(s) for s in range(self.low, current))
        return tuple(Awaited(s.step, n) for s in known if s is not None for n in s.missing())

    def _staging(self, step: int) -> StepStaging:
        staged = self._steps.get(step)
        if staged is None:
            views = [self._plan.view(step, n) for n in range(self._plan.views_per_step)]
            staged = self._steps[step] = StepStaging(step, views, self.tables)
            for lane, view in zip(staged.lanes, views):
                if view >= 0:
                    lane.candidates = []
                    for table in self.tables:
                        mask = torch.empty(table.count, dtype=torch.uint8, device=table.device)
                        table.reads.mark(step, view, table.versions, 0, mask)
                        lane.candidates.append(mask)
            staged.track()
        return staged
