"""Staging: where contributions wait, per step and lane, until they may be applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from odin_nerfstudio.runtime import hazards, rows
from odin_nerfstudio.runtime.messages import Contribution
from odin_nerfstudio.runtime.store import RowTable


class Phase(IntEnum):
    """What has arrived of a lane."""

    WAITING = 0
    """Nothing; the lane is pending on its candidates."""
    IDS = 1
    """All ids and some rows; the lane is pending on the other ids."""
    COMPLETE = 2
    """Everything."""


@dataclass(eq=False)
class LaneStaging:
    """What one lane of one step has sent so far."""

    phase: Phase = Phase.WAITING
    parts: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    """Per table: (ids [n] int32, gradient rows [n, C] float32) of each message."""
    rest: list[Tensor] = field(default_factory=list)
    """Per table: ids whose rows are still to come. [m] int32."""
    candidates: list[Tensor] | None = None
    """Per table: mask of the rows that the task can read; the lane counts as pending on them. [N] uint8."""
    statistics: tuple[Tensor, Tensor, Tensor] | None = None
    """Ids, 2D gradient norms and radii of the visible primitives."""


class StepStaging:
    """Contributions of one step.

    `pending` counts, per table and row, the lanes that may still contribute to the row; it is made by `track` when rows
    are to be published before the step is complete, and kept up to date from then on.
    """

    def __init__(
        self, step: int, views: Sequence[int], tables: Sequence[RowTable], silent: set[int] | None = None
    ) -> None:
        """views: view of each lane, negative for an empty lane. silent: ranks without a task, which report progress."""
        self.step = step
        self.silent = silent or set()
        self.views = list(views)
        self.lanes = [LaneStaging(parts=[[] for _ in tables]) for _ in views]
        self.pending: list[Tensor] | None = None
        self.started = False
        """Some rows of the step have been published already."""
        self.changed = True
        """Something arrived since rows were last looked through."""
        self._tables = tables
        for lane, view in zip(self.lanes, self.views):
            if view < 0:
                lane.phase = Phase.COMPLETE

    @property
    def complete(self) -> bool:
        """Every lane has sent everything, and ranks without a task have passed the step."""
        return not self.silent and all(lane.phase == Phase.COMPLETE for lane in self.lanes)

    def settle(self, rank: int) -> None:
        """A rank without a task has passed the step."""
        self.silent.discard(rank)

    def missing(self) -> list[int]:
        """Lanes that have not sent everything."""
        return [k for k, lane in enumerate(self.lanes) if lane.phase != Phase.COMPLETE]

    def track(self) -> None:
        """Start counting pending lanes. Every lane that has sent nothing must have its candidates.

        Raises:
            RuntimeError: Rows of the step have been published, or a lane's candidates are missing.
        """
        if self.pending is not None:
            return
        hazards.check_candidates_first(self.step, self.started)
        self.pending = [torch.zeros(t.count, dtype=torch.uint8, device=t.device) for t in self._tables]
        for number, lane in enumerate(self.lanes):
            if lane.phase == Phase.WAITING:
                if lane.candidates is None:
                    raise RuntimeError(f"step {self.step} lane {number}: pending without candidates")
                for pending, mask in zip(self.pending, lane.candidates):
                    pending += mask
            elif lane.phase == Phase.IDS:
                for pending, rest in zip(self.pending, lane.rest):
                    rows.add_counts(pending, rest, 1)

    def accept(self, message: Contribution) -> None:
        """Stage a message of a lane, and stop counting the lane as pending on rows that are settled by it.

        Raises:
            RuntimeError: The lane has sent that already, or its ids contradict a hazard rule.
        """
        number = message.lane
        lane = self.lanes[number]
        if message.has_first:
            if lane.phase != Phase.WAITING:
                raise RuntimeError(f"step {self.step} lane {number}: ids arrived twice")
            self._accept_ids(lane, number, message)
        if message.has_rest:
            if lane.phase != Phase.IDS:
                raise RuntimeError(f"step {self.step} lane {number}: rows arrived in phase {lane.phase.name}")
            for k, section in enumerate(message.tables):
                if lane.rest[k].shape[0]:
                    lane.parts[k].append((lane.rest[k], section.rest_rows))
                    if self.pending is not None:
                        rows.add_counts(self.pending[k], lane.rest[k], -1)
            lane.rest = []
            lane.statistics = message.statistics
            lane.phase = Phase.COMPLETE
        self.changed = True

    def _accept_ids(self, lane: LaneStaging, number: int, message: Contribution) -> None:
        for k, (table, section) in enumerate(zip(self._tables, message.tables)):
            hazards.check_arrival(table, section.ids, self.step, number)
            if lane.candidates is not None:
                hazards.check_within_candidates(table, lane.candidates[k], section.ids, self.step, number)
            front = section.ids[: section.first]
            if section.first:
                lane.parts[k].append((front, section.first_rows))
            lane.rest.append(section.ids[section.first :])
            if self.pending is not None:
                if lane.candidates is None:
                    raise RuntimeError(f"step {self.step} lane {number}: counted as pending without candidates")
                self.pending[k] -= lane.candidates[k]
                rows.add_counts(self.pending[k], lane.rest[k], 1)
        lane.candidates = None
        lane.phase = Phase.IDS

    def parts(self, table: int) -> list[tuple[Tensor, Tensor]]:
        """What is to be summed for a table, in order: ids [n] int32 and gradient rows [n, C]."""
        return [part for lane in self.lanes for part in lane.parts[table]]

    def touched(self, table: int) -> list[Tensor]:
        """Ids of each contribution to a table. [n] int32 each."""
        return [ids for ids, _ in self.parts(table)]

    def staged_rows(self) -> int:
        """Gradient rows held, over all lanes and tables."""
        return sum(ids.shape[0] for k in range(len(self._tables)) for ids, _ in self.parts(k))
