"""Candidate sets of large tables: blocks of rows that are far from a view are left out without looking at their rows.

A block of consecutive rows is tested like a single row in its middle that may be anywhere within the block's box and
has the block's largest scale. That is the test of `candidates`, with the half extent of the box as further motion; if
it fails for the block, it fails for each of its rows. Boxes are made once for several steps: a row may have got updates
since, but none that the bound for the lag of the oldest row at that time does not cover. A structural step gives the
table new versions (`store.RowArrays`), and with them new boxes.

It pays where neighbours in the table are neighbours in space, as rows of seed points from structure from motion are for
the most part: densification puts children in the order of their parents. Elsewhere the boxes are large, which is
noticed, and rows are tested one by one.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import candidate_kernels as kernels
from odin_nerfstudio.runtime.candidates import MotionBound, ViewTest, candidate_mask

logger = logging.getLogger(__name__)

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

BLOCK = 256
"""Rows of a block."""
LEAST_ROWS = 1 << 17
"""Smaller tables are tested row by row, which takes less than a millisecond."""
REFRESH = 8
"""Steps after which boxes are made anew: longer, and lags of rows make them large."""
_MOST_NEAR = 0.6
"""If views find a larger share of the blocks near, boxes do not pay."""
_REST = 100
"""Steps without boxes in that case."""
_LOOKS = 4
"""Views to judge by."""


@numba.njit(**_OPTIONS)
def boxes(means, log_scales, versions, block, middle, half, largest, oldest):  # type: ignore[no-untyped-def]
    """Middle [B, 3], largest half extent [B] and largest log scale [B, 3] of each block, and its oldest version [B].

    A block with a value that is not a number gets infinite extent. means, log_scales: [N, 3]. versions: [N].

    Returns: the newest version.
    """
    n = means.shape[0]
    newest = versions[0]
    for b in range(middle.shape[0]):
        start, stop = b * block, min((b + 1) * block, n)
        old, scale, sums = versions[start], log_scales[start, 0], np.float32(0)
        x0 = x1 = means[start, 0]
        y0 = y1 = means[start, 1]
        z0 = z1 = means[start, 2]
        for i in range(start, stop):
            x, y, z = means[i, 0], means[i, 1], means[i, 2]
            x0, y0, z0 = min(x0, x), min(y0, y), min(z0, z)
            x1, y1, z1 = max(x1, x), max(y1, y), max(z1, z)
            s, t, u = log_scales[i, 0], log_scales[i, 1], log_scales[i, 2]
            scale = max(scale, max(s, max(t, u)))
            sums += np.float32(0) * (x + y + z + s + t + u)  # extremes lose a NaN, the sum does not
            old = min(old, versions[i])
            newest = max(newest, versions[i])
        cx, cy, cz = np.float32(0.5) * (x0 + x1), np.float32(0.5) * (y0 + y1), np.float32(0.5) * (z0 + z1)
        middle[b, 0], middle[b, 1], middle[b, 2] = cx, cy, cz
        reach = max(max(x1 - cx, cx - x0), max(max(y1 - cy, cy - y0), max(z1 - cz, cz - z0)))
        half[b] = reach * np.float32(1.000001) if sums == 0 else np.float32(np.inf)
        largest[b, :] = scale
        oldest[b] = old
    return newest


@numba.njit(**_OPTIONS)
def mark_near(means, log_scales, versions, step, least_lag, reach_means, reach_scales, view, near, block, out):  # type: ignore[no-untyped-def]
    """`candidate_kernels.mark` of the rows in blocks whose byte in `near` is not zero; 0 for all others."""
    n, blocks = means.shape[0], near.shape[0]
    nothing = np.empty(0, np.float32)
    count = 0
    b = 0
    while b < blocks:
        stop = b
        while stop < blocks and (near[stop] != 0) == (near[b] != 0):
            stop += 1
        first, last = b * block, min(stop * block, n)
        if near[b] != 0:
            found = kernels.mark(
                means[first:last], log_scales[first:last], versions[first:last], step, least_lag, reach_means,
                reach_scales, nothing, nothing, view, out[first:last],
            )  # fmt: skip
            if found < 0:
                return found
            count += found
        else:
            out[first:last] = 0
        b = stop
    return count


class BlockBoxes:
    """The boxes of a table's blocks. For one thread at a time."""

    def __init__(self) -> None:
        self.near_share = 1.0
        """Share of the blocks that the last view found near."""
        self._known: tuple[Any, ...] = ()
        self._step = self._newest = -1
        self._rests_until = -1
        self._said = False
        self._looks: list[float] = []
        self._near = np.empty(0, np.uint8)
        self._boxes: tuple[np.ndarray, ...] = ()

    def mark(
        self,
        means: Tensor,
        log_scales: Tensor,
        view: ViewTest,
        motion: MotionBound,
        versions: Tensor,
        step: int,
        least_lag: int,
        out: Tensor,
    ) -> int:
        """`candidate_mask` without extra motion and variance, on the CPU; returns the number of candidates.

        Raises:
            ValueError: See `candidate_mask`.
        """

        def one_by_one() -> int:
            plain = (means.detach(), log_scales.detach(), view, motion)
            return candidate_mask(*plain, versions=versions, step=step, least_lag=least_lag, out=out)[1]

        if means.shape[0] < LEAST_ROWS or not self._fresh(means, log_scales, versions, step):
            return one_by_one()
        middle, half, largest, oldest = self._boxes
        nothing, reach = np.empty(0, np.float32), (motion.means, motion.log_scales)
        lag = (step, least_lag)
        found = kernels.mark(middle, largest, oldest, *lag, *reach, half, nothing, view.packed, self._near)
        if found < 0:  # a block lags by more than is covered, which rows may have made up since
            return one_by_one()
        self.near_share = float(found) / len(self._near)
        self._looks.append(self.near_share)
        tables = (means.detach().numpy(), log_scales.detach().numpy(), versions.numpy())
        count = int(mark_near(*tables, *lag, *reach, view.packed, self._near, BLOCK, out.numpy()))
        return one_by_one() if count < 0 else count  # it says what is wrong

    def _fresh(self, means: Tensor, log_scales: Tensor, versions: Tensor, step: int) -> bool:
        """Whether there are boxes that hold for a step, made now where they are missing or old."""
        tensors = (means, log_scales, versions)
        facts = tuple(value for t in tensors for value in (t.data_ptr(), t.shape[0]))
        same = bool(self._known) and all(r() is t for r, t in zip(self._known[0], tensors)) and self._known[1] == facts
        if not same:
            self._rests_until, self._looks = -1, []
        elif self._newest <= step <= self._step + REFRESH:
            return True
        if step < self._rests_until:
            return False
        if len(self._looks) >= _LOOKS and sum(self._looks) / len(self._looks) > _MOST_NEAR:
            self._rests_until, self._looks = step + _REST, []
            if not self._said:
                logger.info("views see most blocks of primitives: each primitive is tested by itself")
            self._said = True
            return False
        self._looks.clear()
        blocks = -(-means.shape[0] // BLOCK)
        if len(self._near) != blocks:
            self._near = np.empty(blocks, np.uint8)
            shapes = ((blocks, 3), (blocks,), (blocks, 3))
            self._boxes = (*(np.empty(s, np.float32) for s in shapes), np.empty(blocks, np.int32))
        arrays = (means.detach().numpy(), log_scales.detach().numpy(), versions.numpy())
        self._newest = int(boxes(*arrays, BLOCK, *self._boxes))
        self._known, self._step = (tuple(weakref.ref(t) for t in tensors), facts), step
        return self._newest <= step


def takes(means: Tensor, log_scales: Tensor, versions: Tensor | None, *others: Tensor | None) -> bool:
    """Whether `BlockBoxes.mark` can take a test: on the CPU, with versions, and nothing else per row."""
    plain = means.device.type == "cpu" and versions is not None and all(o is None for o in others)
    return plain and means.dtype == torch.float32 == log_scales.dtype
