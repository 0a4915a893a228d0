"""Evidence: which primitives matter to a view, from the gradient of its last visit.

``g_v(p)`` is the share of view v's gradient (L1 norm over opacity and base colour) that fell on primitive p when v was
last rendered. Every rank hears every contribution, so it keeps the evidence of all views itself, and nothing is sent.
It is not part of a checkpoint: after a resume it builds up again within an epoch, and first visits wait meanwhile.

Memory: 6 bytes per kept share. The smallest shares of a view, which together make up at most `tail` of it, are dropped;
a harm computed from what is left is too low by at most `tail` for the reader and for each writer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from odin_nerfstudio.runtime import mass
from odin_nerfstudio.runtime.store import RowTable

logger = logging.getLogger(__name__)

COLUMNS = ("opacities", "features_dc")
"""Parameters whose gradients count. A table without them is judged by all of its columns."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Gradient mass of one view."""

    ids: Tensor
    """Rows, unique, in any order. [n] int32."""
    values: Tensor
    """Their shares of the view's gradient, positive. [n] bfloat16."""

    @staticmethod
    def of(ids: Tensor, values: Tensor) -> Shares:
        """Shares from any integer ids and any floats. Both [n]."""
        return Shares(ids.to(torch.int32), values.to(torch.bfloat16))

    @property
    def mass(self) -> mass.Mass:
        """Ids and values."""
        return self.ids, self.values


class Evidence(Protocol):
    """What a policy asks about views."""

    def of(self, view: int) -> Shares | None:
        """Shares of a view at its last visit; None: it has not been visited."""
        ...


class EvidenceStore:
    """The shares of all views that this rank has heard of."""

    def __init__(self, tail: float = 0.01, largest: float = 2.0**-13, limit: int = 1 << 30) -> None:
        """tail: part of a view's mass that may be dropped. largest: shares of this size are never dropped. limit: most
        memory [bytes]; views beyond it are not kept, and wait as at a first visit."""
        if not 0 <= tail < 1 or not 0 < largest <= 1 or limit < 0:
            raise ValueError(f"tail, largest, limit: {tail}, {largest}, {limit} make no sense")
        self.tail, self.largest, self.limit = tail, largest, limit
        self.bytes = 0
        """Memory in use."""
        self._views: dict[int, Shares] = {}
        self._full = False

    def of(self, view: int) -> Shares | None:
        """Shares of a view at its last visit; None: unknown."""
        return self._views.get(view)

    def put(self, view: int, shares: Shares) -> None:
        """Set what is known of a view."""
        self.forget(view)
        size = 6 * int(shares.ids.shape[0])
        if self.bytes + size > self.limit:
            if not self._full:
                logger.warning(
                    "evidence for delayed reads fills its %d MiB: further views wait as at a first visit",
                    self.limit >> 20,
                )
            self._full = True
            return
        self._views[view] = shares
        self.bytes += size

    def forget(self, view: int) -> None:
        """Know nothing of a view any more."""
        known = self._views.pop(view, None)
        if known is not None:
            self.bytes -= 6 * int(known.ids.shape[0])

    def learn(self, table: RowTable, step: int, view: int, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take in a complete contribution of a view. parts: ids [n] int32 and gradient rows [n, C] of each message."""
        columns = table.layout(step).columns()
        spans = [(offset, width) for name, offset, width in columns if name in COLUMNS]
        spans = spans or [(offset, width) for _, offset, width in columns]
        self.put(view, Shares(*mass.of_rows(parts, spans, self.tail, self.largest)))

    def resize(self, parents: Tensor, before: int) -> None:
        """Follow a structural step. parents: old row of each new row [N_new] int64; before: number of old rows."""
        children = mass.Children(parents, before)
        if children.same:
            return
        views, self._views, self.bytes = self._views, {}, 0
        for view, shares in views.items():
            self.put(view, Shares(*children.follow(shares.mass)))
