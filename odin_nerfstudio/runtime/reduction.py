"""Reduction at row owners: each row's contributions meet at one rank, which sends their sum once.

Sending every contribution to every peer costs (ranks - 1) times the active rows of all tasks. Where views see much the
same rows, it is cheaper to send each row to its owner (rank = id mod ranks), which sums in lane order and sends each
reduced row to all: the sum has the same bits, since additions happen in the same order. Ids and densification
statistics still go to everyone: ids say what is pending, and statistics are applied lane by lane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import hazards, row_kernels, rows
from odin_nerfstudio.runtime.messages import Contribution, Section
from odin_nerfstudio.runtime.staging import Phase, StepStaging
from odin_nerfstudio.runtime.store import RowTable

Part = tuple[Tensor, Tensor]


def owned(ids: Tensor, owner: int, world_size: int) -> Tensor:
    """Which of the ids a rank owns. [n] bool."""
    return ids % world_size == owner


def share_for(message: Contribution, owner: int, world_size: int) -> Contribution:
    """A whole contribution as it goes to an owner of rows: all ids, its rows only, all statistics."""
    sections = []
    for s in message.tables:
        values = s.first_rows[owned(s.ids, owner, world_size)]
        sections.append(Section(s.ids, values.shape[0], values, s.rest_rows, s.total))
    return Contribution(message.step, message.lane, sections, message.statistics, share=True)


def sum_in_order(parts: Sequence[Part]) -> Part:
    """Sums of rows by id, added in the order of the parts: ids ascending [n] int32, rows [n, C] float32."""
    if parts and not rows.on_cpu(parts[0][0]):
        return sum_in_order_torch(parts)
    ids = [p.numpy() for p, _ in parts]
    union = np.unique(np.concatenate(ids)) if ids else np.empty(0, np.int32)
    width = parts[0][1].shape[1] if parts else 0
    total = np.zeros((union.shape[0], width), np.float32)
    for each, (_, values) in zip(ids, parts):
        if each.shape[0]:
            at = np.searchsorted(union, each).astype(np.int32)
            row_kernels.scatter_add(total, at, np.ascontiguousarray(values.numpy()), 0, width)
    return torch.from_numpy(union.astype(np.int32)), torch.from_numpy(total)


def sum_in_order_torch(parts: Sequence[Part]) -> Part:
    """`sum_in_order` in torch's operations, for any device; at least one part. No atomics: ids of a part are unique."""
    union = torch.unique(torch.cat([ids for ids, _ in parts]))
    first = parts[0][1]
    total = torch.zeros((union.shape[0], first.shape[1]), dtype=first.dtype, device=first.device)
    for ids, values in parts:
        at = torch.searchsorted(union, ids)
        total[at] = total[at] + values
    return union, total


class OwnerReducer:
    """Gathers this rank's rows of each step, from whatever thread brings them, and hands out their sums."""

    def __init__(
        self, rank: int, world_size: int, tasks_of: Callable[[int], int], emit: Callable[[Contribution], None]
    ) -> None:
        """tasks_of: number of tasks of a step. emit: called once per step with its sums, lane = -1 - rank."""
        self.rank, self.world_size = rank, world_size
        self._tasks_of, self._emit = tasks_of, emit
        self._lock = threading.Lock()
        self._shares: dict[int, dict[int, Contribution]] = {}
        self._emitted: set[int] = set()

    def add(self, share: Contribution) -> None:
        """Take in a share with this rank's rows. One that is known already is ignored."""
        with self._lock:
            if share.step in self._emitted:
                return
            known = self._shares.setdefault(share.step, {})
            known.setdefault(share.lane, share)
            if len(known) < self._tasks_of(share.step):
                return
            del self._shares[share.step]
            self._emitted.add(share.step)
        self._emit(self._sum(share.step, [known[lane] for lane in sorted(known)]))

    def forget(self, step: int) -> None:
        """A step is published: nothing of it can come any more."""
        with self._lock:
            self._emitted.discard(step)

    def _sum(self, step: int, shares: Sequence[Contribution]) -> Contribution:
        sections = []
        for k, section in enumerate(shares[0].tables):
            parts = []
            for share in shares:
                s = share.tables[k]
                mine = s.ids[owned(s.ids, self.rank, self.world_size)]
                if mine.shape[0] != s.first_rows.shape[0]:
                    raise RuntimeError(
                        f"step {step} lane {share.lane}: {s.first_rows.shape[0]} rows for {mine.shape[0]} owned ids"
                    )
                parts.append((mine, s.first_rows))
            ids, values = sum_in_order(parts)
            sections.append(Section(ids, ids.shape[0], values, values[:0], section.total))
        return Contribution(step, -1 - self.rank, sections, None)


class ReducedStaging(StepStaging):
    """Contributions of a step whose rows are summed by their owners.

    A row that some lane touches is pending until its owner's sums arrive; one that no known lane touches is pending on
    the lanes that have sent nothing and may read it. Sums of an owner settle all of its rows: it has heard every lane.
    """

    def __init__(
        self, step: int, views: Sequence[int], tables: Sequence[RowTable], silent: set[int] | None, world_size: int
    ) -> None:
        super().__init__(step, views, tables, silent)
        self._world_size = world_size
        self._owners_left = set(range(world_size)) if any(view >= 0 for view in views) else set()
        self._sums: list[list[Part]] = [[] for _ in tables]
        self._settled = [torch.zeros(t.count, dtype=torch.uint8, device=t.device) for t in tables]

    @property
    def complete(self) -> bool:
        return super().complete and not self._owners_left

    def missing(self) -> list[int]:
        return super().missing() + [-1 - owner for owner in sorted(self._owners_left)]

    def parts(self, table: int) -> list[Part]:
        return self._sums[table]

    def touched(self, table: int) -> list[Tensor]:
        return [lane.rest[table] for lane in self.lanes if lane.rest]

    def track(self) -> None:
        if self.pending is not None:
            return
        hazards.check_candidates_first(self.step, self.started)
        self.pending = [torch.zeros_like(settled) for settled in self._settled]
        for number, lane in enumerate(self.lanes):
            for k, pending in enumerate(self.pending):
                if lane.phase == Phase.WAITING:
                    if lane.candidates is None:
                        raise RuntimeError(f"step {self.step} lane {number}: pending without candidates")
                    pending += lane.candidates[k]
                elif lane.rest:
                    rows.add_counts(pending, lane.rest[k], 1)
        for pending, settled in zip(self.pending, self._settled):
            pending.masked_fill_(settled != 0, 0)

    def accept(self, message: Contribution) -> None:
        if message.lane < 0:
            self._accept_sums(message)
        else:
            self._accept_lane(message)
        self.changed = True

    def _accept_lane(self, message: Contribution) -> None:
        number = message.lane
        lane = self.lanes[number]
        if lane.phase != Phase.WAITING or not message.share:
            raise RuntimeError(f"step {self.step} lane {number}: a share was expected, in phase {lane.phase.name}")
        for k, (table, section) in enumerate(zip(self._tables, message.tables)):
            ids, settled = section.ids, self._settled[k]
            # rows of owners whose sums are here may be published, this lane's part included
            open_ids = ids[settled[ids.long()] == 0]
            hazards.check_arrival(table, open_ids, self.step, number)
            if lane.candidates is not None:
                hazards.check_within_candidates(table, lane.candidates[k], ids, self.step, number)
            if self.pending is not None:
                if lane.candidates is None:
                    raise RuntimeError(f"step {self.step} lane {number}: counted as pending without candidates")
                self.pending[k] -= lane.candidates[k] * (settled == 0)
                rows.add_counts(self.pending[k], open_ids, 1)
            lane.rest.append(ids)
        lane.candidates = None
        lane.statistics = message.statistics
        lane.phase = Phase.COMPLETE

    def _accept_sums(self, message: Contribution) -> None:
        owner = -1 - message.lane
        if owner not in self._owners_left:
            raise RuntimeError(f"step {self.step}: the sums of rank {owner} arrived twice")
        for k, (table, section) in enumerate(zip(self._tables, message.tables)):
            hazards.check_arrival(table, section.ids, self.step, message.lane)
            if section.ids.shape[0]:
                self._sums[k].append((section.ids, section.first_rows))
            self._settled[k][owner :: self._world_size] = 1
            if self.pending is not None:
                self.pending[k][owner :: self._world_size] = 0
        self._owners_left.discard(owner)


@dataclass
class Traffic:
    """Whether reducing at owners would save bytes, from what steps have sent; the same on every rank.

    Sends per step, with A ids over all tasks, U different ones and rows of b bytes: ``A (4 + b) (R - 1)`` to every
    peer, or ``4 A (R - 1) + A b (R - 1) / R + U (4 + b) (R - 1)`` through owners.
    """

    world_size: int
    every: int = 8
    """Look at every so many steps only."""
    gain: float = 0.8
    """Reduce where it takes less than this share of the bytes: it also takes a second hop, and gives up
    conflict-first."""
    ids: int = 0
    union: int = 0
    width: int = 1

    def count(self, staged: StepStaging, table: RowTable) -> None:
        """Look at a complete step's contributions to the first table."""
        if staged.step % self.every:
            return
        mask = torch.zeros(table.count, dtype=torch.uint8, device=table.device)
        for ids in staged.touched(0):
            mask[ids.long()] = 1
            self.ids += int(ids.shape[0])
        self.union += int(mask.sum())
        self.width = table.layout(staged.step).total

    def decide(self, before: bool) -> bool:
        """Whether to reduce from now on; starts counting anew. before: what holds so far."""
        if self.ids == 0:
            return before
        direct = self.ids * (4 + 4 * self.width)
        through = 4 * self.ids + 4 * self.ids * self.width / self.world_size + self.union * (4 + 4 * self.width)
        self.ids = self.union = 0
        return through < self.gain * direct
