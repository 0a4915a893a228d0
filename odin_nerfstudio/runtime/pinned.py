"""Messages between a device and host memory: reused pinned buffers, copies beside the computation.

Not yet run on a GPU; with the CPU in the device's place, where copies are plain ones, tests go through the same code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_SMALLEST = 1 << 12
"""Words of the smallest buffer."""
_KEPT = 1 << 27
"""Words of free buffers that are kept (512 MiB); what comes back beyond that is freed."""


class HostBuffers:
    """int32 buffers in host memory whose sizes are powers of two, reused. Safe to use from several threads."""

    def __init__(self, pinned: bool, kept: int = _KEPT) -> None:
        """pinned: page-locked, as asynchronous copies need it. kept: most words of free buffers to hold on to."""
        self._pinned, self._kept = pinned, kept
        self._free: dict[int, list[Tensor]] = {}
        self._held = 0
        self._lock = threading.Lock()

    def take(self, words: int) -> Tensor:
        """A buffer's first `words` words; hand it back with `give`. [words] int32."""
        size = max(_SMALLEST, 1 << max(0, words - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else None
            self._held -= size if buffer is not None else 0
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
        return buffer[:words]

    def give(self, words: Tensor) -> None:
        """Let a buffer be reused. No copy from or to it may be under way."""
        assert words.storage_offset() == 0
        size = words.untyped_storage().nbytes() // 4
        with self._lock:
            if self._held + size <= self._kept:
                self._free.setdefault(size, []).append(torch.as_strided(words, (size,), (1,)))
                self._held += size


@dataclass(eq=False)
class Parcel:
    """A message on its way to some peers."""

    words: Tensor
    """[W] int32 on the CPU."""
    await_words: Callable[[], None] | None = None
    """Returns once the words are there."""
    let_go: Callable[[], None] | None = None
    """Called when nobody needs the words any more."""
    receivers: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self) -> Tensor:
        """The words, once they are there."""
        if self.await_words is not None:
            self.await_words()
        return self.words

    def sent(self) -> None:
        """One receiver less."""
        with self._lock:
            self.receivers -= 1
            last = self.receivers == 0
        if last and self.let_go is not None:
            self.let_go()


class HostCopies:
    """Takes bodies of messages from a device to pinned host memory and back.

    Copies run on a stream of their own: they wait for the kernels that made the body, and for nothing that is queued
    behind. Whoever sends waits for the copy's event, not the thread that trains.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.device = device
        self.buffers = HostBuffers(pinned=cuda)
        self._stream: Any = torch.cuda.Stream(device) if cuda else None

    def to_host(self, head: Tensor, body: Tensor, receivers: int) -> Parcel:
        """A message's head (CPU) and body (device) as one message in host memory; returns before the copy is done."""
        words = self.buffers.take(head.shape[0] + body.shape[0])
        words[: head.shape[0]] = head
        copied = self._copy(body, words[head.shape[0] :])

        def let_go() -> None:
            self.buffers.give(words)

        return Parcel(words, None if copied is None else copied.synchronize, let_go, receivers)

    def to_device(self, words: Tensor, head_words: int) -> tuple[Tensor, Tensor]:
        """Head (CPU) and body (device) of a message in one of `buffers`, which goes back there. Waits for the copy.

        Runs in a receiving thread, beside what the training thread has queued on the device.
        """
        head = words[:head_words].clone()
        with self._beside():
            body = torch.empty(words.shape[0] - head_words, dtype=torch.int32, device=self.device)
            body.copy_(words[head_words:], non_blocking=True)
            done = None if self._stream is None else torch.cuda.Event(blocking=True)
            if done is not None:
                done.record(self._stream)
        if done is not None:
            done.synchronize()
            body.record_stream(torch.cuda.default_stream(self.device))  # where the runtime will read it
        self.buffers.give(words)
        return head, body

    def _copy(self, body: Tensor, target: Tensor) -> Any:
        """Copy a body to host memory; returns the copy's event, or None where it is done."""
        if self._stream is None:
            target.copy_(body)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        copied = torch.cuda.Event(blocking=True)
        with self._beside():
            target.copy_(body, non_blocking=True)
            copied.record(self._stream)
        body.record_stream(self._stream)
        return copied

    def _beside(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
