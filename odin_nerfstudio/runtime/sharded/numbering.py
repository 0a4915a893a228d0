"""Numbers of rows in the whole model, and how they follow a structural step, from bit masks alone.

gsplat's strategies put, in this order, the rows that stay, copies of duplicated rows, the first and the second halves
of split rows, each in the order of their parents, and then leave out what is pruned. So with a mask over the old rows
for each of these segments, its bits set where a new row is, the place of a new row is the number of bits before it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SEGMENTS = 4
KEPT, DUPLICATED, FIRST_HALF, SECOND_HALF = range(SEGMENTS)

PARENTS, SEGMENT = "odin_parents", "odin_segments"
"""Tensors in a strategy's state during surgery: the old row of each row, and its segment."""
PLACES = "odin_places"
"""What a strategy puts into its state where rows have another order: the place of each row in the whole model, [n]
int32 and ascending, and how many rows that has now."""

_BITS = 64
_COUNTS = np.array([bin(k).count("1") for k in range(1 << 16)], np.uint8)


class Masks:
    """Bit masks over the rows of the whole model, in host memory; ids may be on any device."""

    def __init__(self, count: int, rows: int) -> None:
        """count masks over so many rows, all zero."""
        self.count, self.rows = count, rows
        self.words = torch.zeros(count * self.width, dtype=torch.int64)
        """The masks one after the other. [count * width] int64."""

    @property
    def width(self) -> int:
        """Words of one mask."""
        return -(-self.rows // _BITS)

    def set(self, mask: int, ids: Tensor) -> None:
        """Set bits of one mask. ids [n]."""
        marks = np.zeros(self.width * _BITS, np.uint8)
        marks[ids.cpu().numpy()] = 1
        part = self.words[mask * self.width : (mask + 1) * self.width]
        part |= torch.from_numpy(np.packbits(marks, bitorder="little").view(np.int64))

    def _words(self, mask: int) -> np.ndarray:
        return self.words[mask * self.width : (mask + 1) * self.width].numpy().view(np.uint64)

    def total(self, mask: int) -> int:
        """Bits that are set in one mask."""
        return int(_COUNTS[self._words(mask).view(np.uint16)].sum(dtype=np.int64))

    def ranks(self, mask: int, ids: Tensor) -> Tensor:
        """For each row the number of bits of one mask before it. ids [n] -> [n] int64, on their device."""
        words = self._words(mask)
        before = np.zeros(words.shape[0] + 1, np.int64)
        np.cumsum(_COUNTS[words.view(np.uint16)].reshape(-1, 4).sum(1, dtype=np.int64), out=before[1:])
        places = ids.cpu().numpy().astype(np.int64)
        block, bit = places >> 6, (places & 63).astype(np.uint64)
        below = words[block] & ((np.uint64(1) << bit) - np.uint64(1))
        inside = _COUNTS[np.ascontiguousarray(below).view(np.uint16)].reshape(-1, 4).sum(1, dtype=np.int64)
        return torch.from_numpy(before[block] + inside).to(ids.device)


def new_ids(masks: Masks, segments: Tensor, parents: Tensor) -> tuple[Tensor, int]:
    """Places of new rows in the whole model, and how many rows that has now.

    Args:
        masks: One per segment, of all ranks.
        segments: Segment of each new row of this rank. [n].
        parents: Old place of its parent. [n].

    Returns:
        [n] int32, and the total.
    """
    out = torch.empty(parents.shape[0], dtype=torch.int64, device=parents.device)
    start = 0
    for segment in range(SEGMENTS):
        here = (segments == segment).nonzero().flatten()
        out[here] = start + masks.ranks(segment, parents[here])
        start += masks.total(segment)
    return out.to(torch.int32), start
