"""What happens to an owner's rows, for those who watch: `row_watch` at the gates of an owner.

The first picture that shows it has an owner count, and it stops some steps after the last one.
"""

from __future__ import annotations

from torch import Tensor

from odin_nerfstudio.runtime.row_watch import RowWatch
from odin_nerfstudio.runtime.store import RowTable

SPAN = 200
"""Steps for which counting outlasts the last picture that showed it."""


class OwnerWatch:
    """Counters of one shard's rows. Everything belongs to whichever thread has the owner."""

    def __init__(self, table: RowTable) -> None:
        self._rows = RowWatch(table)
        self._last = 0
        self._refused: dict[tuple[int, int], Tensor] = {}

    @property
    def active(self) -> bool:
        """Counting."""
        return self._rows.active

    def values(self, name: str, step: int) -> Tensor | None:
        """`RowWatch.values`, for a picture at a step; has the owner count from the next step on."""
        self._rows.wanted, self._last = True, step + SPAN
        return self._rows.values(name)

    def step(self, step: int) -> None:
        """The owner takes up a step: begin or end counting."""
        if step > self._last:
            self._rows.wanted = False
        self._rows.begin()

    def asks(self, step: int, lane: int) -> bool:
        """Whether it matters that a lane's gate was found closed: counting, and for the first time."""
        return self.active and (step, lane) not in self._refused

    def refused(self, step: int, lane: int, ids: Tensor) -> None:
        """A lane waits for rows; all others are published. ids: rows that it can read. [n] int32."""
        if self.asks(step, lane):
            self._refused[step, lane] = self._rows.behind(ids, step)

    def projected(self, step: int, lane: int, ids: Tensor) -> None:
        """A lane is projected from rows as they are. ids: as above."""
        refused = self._refused.pop((step, lane), None)
        if self.active:
            self._rows.read(ids, step, refused)

    def returned(self, ids: Tensor, rank: int) -> None:
        """Gradients of rows came back from the rank that rendered the view. ids: [n] int32."""
        if self.active:
            self._rows.wrote(ids, rank)

    def restart(self) -> None:
        """Other rows are owned from now on: forget what was counted."""
        wanted = self._rows.wanted
        self._rows.wanted = False
        self._rows.begin()
        self._rows.wanted = wanted
        self._refused.clear()
