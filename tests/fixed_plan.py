"""A plan that is written down, for tests of the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np


class Fixed:
    """A plan given as a table of views [steps, lanes]; lane n runs on rank n * ranks // lanes."""

    def __init__(self, table: Any, ranks: int) -> None:
        self.table = np.array(table)
        self.steps, self.views_per_step = self.table.shape
        self._ranks = ranks

    def view(self, step: int, lane: int) -> int:
        return int(self.table[step, lane])

    def rank(self, step: int, lane: int) -> int:
        return lane * self._ranks // self.views_per_step
