"""Staging on the owner of primitives: what views have seen of its rows, and what they sent back.

A lane goes through the phases of `staging.StepStaging`, with another meaning: WAITING, not projected, pending on its
candidates; IDS, projected, pending on exactly the rows that are visible; COMPLETE, their gradients are staged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio.runtime import hazards, rows
from odin_nerfstudio.runtime.messages import Triple
from odin_nerfstudio.runtime.staging import Phase, StepStaging


class OwnerStaging(StepStaging):
    """Contributions of one step to the rows of one owner. One table."""

    def shipped(self, number: int, ids: Tensor) -> None:
        """A lane has been projected. ids: rows that it sees. [n] int32.

        Raises:
            RuntimeError: It had been projected before, or sees rows that were no candidates.
        """
        lane = self.lanes[number]
        if lane.phase != Phase.WAITING or lane.candidates is None:
            raise RuntimeError(f"step {self.step} lane {number}: projected in phase {lane.phase.name}")
        hazards.check_within_candidates(self._tables[0], lane.candidates[0], ids, self.step, number)
        if self.pending is not None:
            self.pending[0] -= lane.candidates[0]
            rows.add_counts(self.pending[0], ids, 1)
        lane.rest = [ids]
        lane.candidates = None
        lane.phase = Phase.IDS
        self.changed = True

    def returned(self, number: int, ids: Tensor, values: Tensor, statistics: Triple | None) -> None:
        """Stage what came back for a lane. ids [m] int32 among those shipped, values [m, C].

        Raises:
            RuntimeError: Nothing was shipped, or it came back before.
        """
        lane = self.lanes[number]
        if lane.phase != Phase.IDS:
            raise RuntimeError(f"step {self.step} lane {number}: gradients came back in phase {lane.phase.name}")
        if self.pending is not None:
            rows.add_counts(self.pending[0], lane.rest[0], -1)
        if ids.shape[0]:
            lane.parts[0].append((ids, values))
        lane.rest = []
        lane.statistics = statistics
        lane.phase = Phase.COMPLETE
        self.changed = True

    def empty_statistics(self) -> Triple:
        """Statistics of a lane that sees none of these rows."""
        device = self._tables[0].device
        none = torch.empty(0, device=device)
        return torch.empty(0, dtype=torch.int32, device=device), none, none
