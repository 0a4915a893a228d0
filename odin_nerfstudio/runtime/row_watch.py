"""What happens to single primitives, for those who watch: conflicts, lag, and the rank that wrote them last.

Nothing is allocated or counted unless somebody asks. The arrays belong to the table's per-row arrays and follow
structural steps with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio.runtime.store import RowTable

CONFLICTS, LAG, WRITER = "watch.conflicts", "watch.lag", "watch.writer"
KINDS = (CONFLICTS, LAG, WRITER)
_MEMORY = 0.9
"""What a read leaves of the conflict rate of the reads before."""
_LAG_MEMORY = 0.8
"""What a task leaves of the lag of the tasks before."""


class RowWatch:
    """Per-row counters of the first table. Everything but `wanted` belongs to the training thread, or to whoever holds
    it up."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self.wanted = False
        """Count from the next task on; any thread may set it."""
        self.active = False
        """Counting."""

    def begin(self) -> None:
        """A task is about to start: begin or end counting."""
        if self.wanted == self.active:
            return
        table, arrays = self._table, self._table.arrays
        if self.wanted:
            arrays.add(CONFLICTS, torch.zeros(table.count, device=table.device), None)
            arrays.add(LAG, torch.zeros(table.count, device=table.device), 0)
            arrays.add(WRITER, torch.full((table.count,), -1, dtype=torch.int16, device=table.device), None)
        else:
            for name in KINDS:
                arrays.drop(name)
        self.active = self.wanted

    def values(self, name: str) -> Tensor | None:
        """CONFLICTS: share of the latest reads of a row that found it pending, [N] float32, 0 to 1. LAG: by how many
        steps it was behind when tasks started, averaged, [N] float32. WRITER: rank of the last contribution to it
        (of the owner, where owners sum), [N] int16, -1: none. None while nothing is counted."""
        return self._table.arrays[name] if self.active else None

    def behind(self, ids: Tensor, step: int) -> Tensor:
        """Which rows of a task lack updates now. ids: [n] int32. [n] bool."""
        return self._table.versions[ids.long()] < step

    def read(self, ids: Tensor, step: int, refused: Tensor | None) -> None:
        """A task starts. refused: what `behind` gave when its gate was found closed, if it was. [n] bool."""
        found = self.behind(ids, step)
        if refused is not None:
            found |= refused
        index, conflicts = ids.long(), self._table.arrays[CONFLICTS]
        conflicts[index] = _MEMORY * conflicts[index] + (1 - _MEMORY) * found.float()
        lag = (step - self._table.versions).clamp_min_(0).float()
        self._table.arrays[LAG].lerp_(lag, 1 - _LAG_MEMORY)

    def wrote(self, ids: Tensor, rank: int) -> None:
        """A contribution is staged. ids: [n] int32."""
        self._table.arrays[WRITER][ids.long()] = rank
