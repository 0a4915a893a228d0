"""The owner of a shard in virtual time: `runtime.sharded.owner` with stand-ins for projection and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime.frontier import TaskPlan
from odin_nerfstudio.runtime.gate import Decision, Gate, GatePolicy
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.shadow import TableShadow
from odin_nerfstudio.runtime.sharded.owner import Owner
from odin_nerfstudio.runtime.sharded.packets import SplatPacket
from odin_nerfstudio.runtime.sharded.staging import OwnerStaging
from odin_nerfstudio.runtime.stage_costs import StageCosts
from odin_nerfstudio.runtime.staging import Phase
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.telemetry import Telemetry
from odin_nerfstudio.simulation.scene import Meter, Scene

_ROW_BYTES = 2 * 59 * 4
"""Memory of a candidate row between projection and back-projection: its copy and its gradient."""
_STAGED_BYTES = 59 * 4
_NOTHING = torch.empty((0, 0))


@dataclass(eq=False)
class _Seen:
    """Stands for a projection: which rows of a shadow are visible."""

    rows: Tensor


class Remembering:
    """A policy that is not asked again while nothing has come in of what its last refusal waits for.

    A refusal holds as long as none of the tasks that it names goes on, so answers are the same; but with many lanes
    per step, most questions would be about gates that nothing has changed for.
    """

    def __init__(self, policy: GatePolicy) -> None:
        self._policy = policy
        self.name, self.partial = policy.name, policy.partial
        self.least_lag, self.max_delay = policy.least_lag, policy.max_delay
        self._refused: dict[tuple[int, int], tuple[Decision, list[Phase | None]]] = {}

    def decide(self, gate: Gate) -> Decision:
        key = (gate.step, gate.view)
        known = self._refused.get(key)
        if known is not None and known[1] == _phases(gate, known[0]):
            return known[0]
        decision = self._policy.decide(gate)
        if not decision.open and decision.awaited:
            self._refused[key] = (decision, _phases(gate, decision))
        else:
            self._refused.pop(key, None)
        return decision


def _phases(gate: Gate, decision: Decision) -> list[Phase | None]:
    steps = {staged.step: staged for staged in gate.outstanding()}
    return [steps[a.step].lanes[a.lane].phase if a.step in steps else None for a in decision.awaited]


class SimulatedOwner(Owner):
    """One rank's shard. Projecting and back-projecting spend time; packets hold rows without values."""

    def __init__(
        self,
        plan: TaskPlan,
        shard: Scene,
        table: RowTable,
        stages: StageCosts,
        policy: GatePolicy,
        publisher: Publisher,
        telemetry: Telemetry,
        meter: Meter,
        lookahead: int,
        limit: Callable[[], int],
        ship: Callable[[int, SplatPacket], int],
    ) -> None:
        """shard: As `Cut.shard` gives it. ship: Called while work is metered: the packet leaves when that is done."""
        every = torch.arange(table.count, dtype=torch.int32)
        super().__init__(
            plan, table, every, table.count, Remembering(policy), publisher, telemetry, cast(Any, None), lookahead,
            limit, ship, 0,
        )  # fmt: skip
        self._shard, self._stages, self._meter = shard, stages, meter
        self._copied = 0.0
        self.peak = 0.0
        """Most memory for copies, graphs and staged gradients at a time. [bytes]"""
        self.worked = 0.0
        """Time of projections and back-projections. [s]"""
        self.late: set[tuple[int, int]] = set()
        """Step and lane of projections with rows that are read late."""

    def _rows_of(self, staged: OwnerStaging, number: int) -> float:
        sets = self._shard.sets[staged.views[number]]
        return float(self._shard.row_sizes[sets.candidates].sum())

    def _spend(self, seconds: float) -> None:
        self._meter.spend(seconds)
        self.worked += seconds

    def _project(self, staged: OwnerStaging, number: int) -> SplatPacket | None:
        ids = self._candidate_ids(staged, number)
        if not ids.shape[0]:
            return None
        count = self._rows_of(staged, number)
        self._spend(self._stages.project.seconds(count))
        active = self._shard.sets[staged.views[number]].active
        if not len(active):
            return None
        places = torch.from_numpy(np.searchsorted(ids.numpy(), active))
        kept: Any = (TableShadow(ids, {}, 0), _Seen(places))
        self._kept[(staged.step, number)] = kept
        self._copied += count
        self._note_memory()
        return SplatPacket(staged.step, number, ids[places], _NOTHING)

    def gradients(self, step: int, number: int) -> None:
        """Take a lane's gradients back to the rows that it saw, and stage them."""
        shadow, seen = self._kept.pop((step, number))
        staged = self._steps[step]
        count = self._rows_of(staged, number)
        self._spend(self._stages.back.seconds(count))
        ids = shadow.ids[seen.rows]
        staged.returned(number, ids, torch.empty((ids.shape[0], 0)), None)
        self.staged_rows += int(ids.shape[0])
        self._copied -= count
        self._note_memory()
        self.changed = True

    def _try(self, staged: OwnerStaging, number: int) -> None:
        late = self.telemetry.record(staged.step).delayed
        before = len(late)
        super()._try(staged, number)
        if len(late) > before:
            self.late.add((staged.step, number))

    def _note_memory(self) -> None:
        used = _ROW_BYTES * self._copied + _STAGED_BYTES * self.waiting_rows() * float(self._shard.row_sizes.mean())
        self.peak = max(self.peak, used)
