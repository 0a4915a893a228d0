"""Whether tasks wait for the whole of the steps before them, instead of having these published in parts.

Publishing in parts lets tasks start early, but costs more: candidate sets of the tasks that are still to contribute,
messages in two pieces, more passes over the primitives. Where ranks hardly wait, that is more than it brings. Which of
the two is cheaper depends on scene, link and machine and changes while training, so it is tried: now and then all ranks
run `BLOCK` steps in parts and the next `BLOCK` whole, and each compares the times of these steps. In between each does
what was faster. Since a step takes about equally long on all ranks, they mostly agree; they need not, since the bits
are the same either way.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

BLOCK = 16
"""Steps that are compared with as many."""
_SETTLE = 2
"""First steps of a block, which still profit from the block before or pay for it, and do not count."""
_FIRST, _GAP = 128, 64
"""Blocks: pairs start at 0, 4, 12, 28, 60 and 124, `_FIRST` / 2**k - 4, then `_GAP` apart."""
_WEIGHT = 0.3
"""Of a new comparison in the running mean."""


class Patience:
    """What one rank has found out in one mode. Seconds; steps are counted from the first that is begun."""

    def __init__(self, whole: bool | None = None) -> None:
        """
        Args:
            whole: Always wait for whole steps, or never. None: as it turns out.
        """
        self._whole = whole
        self.price: float | None = None
        """What a step takes longer in parts than whole, a running mean; None: not known yet."""
        self._count = -1
        self._step = -1
        self._starts: list[float] = []
        """Of the steps of the current block that count, and of the step after them."""
        self._in_parts = 0.0
        self._compared = 0

    def begin(self, step: int, time: float) -> None:
        """A task of this rank is about to wait for its gate. Counts once a step; time: on any clock."""
        if step == self._step:
            return
        self._step = step
        self._count += 1
        block, at = divmod(self._count, BLOCK)
        self._starts.append(time)
        if at == 0:
            self._close(block - 1)
        if at <= _SETTLE:
            self._starts = [time]

    def waits(self, ahead: int = 0) -> bool:
        """Whether tasks wait for whole steps, in the current step or some steps ahead."""
        if self._whole is not None:
            return self._whole
        place = _place(max(0, self._count + ahead) // BLOCK)
        if place is not None:
            return place == 1
        return self.price is not None and self.price > 0

    def _close(self, block: int) -> None:
        """A block is over."""
        place = _place(block) if block >= 0 else None
        if place is None:
            return
        took = sorted(later - one for one, later in zip(self._starts, self._starts[1:]))
        mean = sum(took[:-1]) / (len(took) - 1)  # one step may have met a pause
        if place == 0:
            self._in_parts = mean
            return
        self._compared += 1
        found = self._in_parts - mean
        weight = max(_WEIGHT, 1 / max(1, self._compared - 1))  # the first one had cold caches
        before = self.price
        self.price = found if before is None else before + weight * (found - before)
        if (self.price > 0) != (before is not None and before > 0):
            logger.info(
                "publishing in parts takes %+.1f ms a step: %s",
                1e3 * self.price,
                "from now on tasks wait for whole steps" if self.price > 0 else "tasks no longer wait for whole steps",
            )


def _place(block: int) -> int | None:
    """0: a block in parts that is compared; 1: the whole one after it; None: another block."""
    for place in (0, 1):
        start = block - place + 4
        if 4 <= start <= _FIRST:
            if start & (start - 1) == 0:
                return place
        elif start > _FIRST and (start - _FIRST) % _GAP == 0:
            return place
    return None
