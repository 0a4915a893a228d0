"""Messages cut into frames, for receives that are posted before the size of what will arrive is known.

A receive that gloo has posted may be larger than what arrives, but not smaller. So messages travel in frames of at most
`FRAME` words. The first frame of a message starts with the frame header; the others are bare. Tensors and requests
are kept until waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FRAME = 1 << 18
"""Words in a frame (1 MiB)."""
_DEPTH = 4
"""Receives posted ahead per peer."""


def send_frames(words: Tensor, peer: int, group: Any) -> None:
    """Send a message. [W] int32 on the CPU."""
    for at in range(0, words.shape[0], FRAME):
        dist.send(words[at : at + FRAME], peer, group=group)


class FrameReader:
    """Puts a peer's messages together; used by one thread."""

    def __init__(self, peer: int, group: Any, open_message: Callable[[Tensor], Tensor]) -> None:
        """open_message: called with every message's first frame as soon as it is there; makes room for the message."""
        self._peer, self._group, self._open = peer, group, open_message
        self._frames = [torch.zeros(FRAME, dtype=torch.int32) for _ in range(_DEPTH)]
        self._requests = [dist.irecv(f, peer, group=group) for f in self._frames]
        self._turn = 0

    def read(self, on_frame: Callable[[], None]) -> Tensor:
        """The next message. on_frame: called whenever a frame has arrived. [W] int32."""
        message: Tensor | None = None
        got = 0
        while message is None or got < message.shape[0]:
            request: Any = self._requests[self._turn]
            request.wait()
            on_frame()
            words = self._frames[self._turn]
            if message is None:
                message = self._open(words)
            size = min(FRAME, message.shape[0] - got)
            message[got : got + size] = words[:size]
            got += size
            self._requests[self._turn] = dist.irecv(words, self._peer, group=self._group)
            self._turn = (self._turn + 1) % _DEPTH
        return message
