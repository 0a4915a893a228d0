"""Rows on their way from one owner to another, in messages of bounded size; from and to devices through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from odin_nerfstudio.runtime import rows
from odin_nerfstudio.runtime.exchange import ROWS
from odin_nerfstudio.runtime.messages import FRAME_WORDS
from odin_nerfstudio.runtime.sharded.exchange import header
from odin_nerfstudio.runtime.transport import Kind, Received, empty_message

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.sharded.engine import ShardedEngine

CHUNK = 16 << 20
"""Most bytes of rows in one message."""


class RowMoves:
    """Sends rows to other ranks and takes in what they send. Make it right after the engine, on every rank."""

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        self.sent_rows = 0
        """Rows that this rank has sent away since the start."""
        self._pieces: dict[int, list[Tensor]] = {}
        self._complete: set[int] = set()
        engine.exchange_of_shards.handle(Kind.MOVED, self._take)

    def exchange(self, target: Tensor, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Give every row to a rank, and get what all ranks give to this one. Collective, at a drain.

        Two exchanges in a row need another collective between them, lest the second meets the first on a slow rank.

        Args:
            target: Rank that each row goes to, which may be this one. [n] integers.
            tensors: Of 4-byte types, the same columns and types on all ranks, on the target's device. [n, ...] each.

        Returns:
            For each tensor the rows that came, in parts: this rank's own first, then by rank; [m, ...] each.
        """
        me, world_size = self._engine.transport.rank, self._engine.transport.world_size
        widths = [rows.flat(t[:1]).shape[1] for t in tensors]
        size = max(1, CHUNK // (4 * sum(widths)))
        for rank in range(world_size):
            if rank == me:
                continue
            leaving = (target == rank).nonzero().flatten()
            self.sent_rows += int(leaving.shape[0])
            pieces = leaving.split(size) if leaving.shape[0] else [leaving]
            for k, piece in enumerate(pieces):
                head = torch.tensor([piece.shape[0], int(k == len(pieces) - 1)], dtype=torch.int32)
                values = [t.detach()[piece].reshape(-1).view(torch.int32) for t in tensors]
                words = empty_message(torch.cat([head, torch.cat(values).cpu()]))
                self._engine.exchange_of_shards.send_words([rank], Kind.MOVED, words)
        own = (target == me).nonzero().flatten()
        parts = [[t.detach()[own]] for t in tensors]
        while missing := set(range(world_size)) - {me} - self._complete:
            self._engine.exchange_of_shards.wait_for(sorted(missing), ROWS)
        self._complete.clear()
        for rank in sorted(self._pieces):
            for words in self._pieces[rank]:
                count, at = int(words[0]), 2
                for part, width in zip(parts, widths):
                    like = part[0]
                    came = words[at : at + count * width].view(like.dtype).view(count, *like.shape[1:])
                    part.append(came.to(like.device))
                    at += count * width
        self._pieces.clear()
        return parts

    def _take(self, received: Received) -> None:
        count, last = header(received.words, 2)
        if count:
            self._pieces.setdefault(received.peer, []).append(received.words[FRAME_WORDS:])
        if last:
            self._complete.add(received.peer)
