"""What carries the bodies of `ordered.OrderedTransport`: a process group of its own, NCCL's or, for the CPU, gloo's.

One thread calls a channel, with the same operations in the same order on every rank; each call returns when the body is
there, or is on its way and no longer needed here. Not yet run with NCCL: no machine with two GPUs was at hand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Channel(Protocol):
    """Moves bodies between all ranks. Errors are RuntimeErrors or ValueErrors."""

    name: str
    device: torch.device

    def made(self) -> Any:
        """A mark of what the calling thread has queued on the device so far, such as the making of a body."""
        ...

    def share(self, body: Tensor, made: Any) -> None:
        """Send a body, complete at a mark, to all peers. [B] int32."""
        ...

    def hand_out(self, bodies: Mapping[int, Tensor], made: Any) -> None:
        """Send some peers a body each, complete at a mark."""
        ...

    def receive(self, source: int, words: int, own: bool) -> Tensor:
        """The body of a peer's `share`, or (own) of its `hand_out`. [words] int32."""
        ...

    def abort(self) -> None:
        """Let whatever is under way end with an error. May be called from any thread, more than once."""
        ...


class GlooChannel:
    """Over gloo, from CPU memory: NCCL's order of operations where there is no GPU."""

    name = "gloo"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=30))

    def made(self) -> Any:
        return None

    def share(self, body: Tensor, made: Any) -> None:
        dist.broadcast(body, dist.get_rank(), group=self._group)

    def hand_out(self, bodies: Mapping[int, Tensor], made: Any) -> None:
        for peer, body in bodies.items():
            dist.send(body, peer, group=self._group)

    def receive(self, source: int, words: int, own: bool) -> Tensor:
        body = torch.empty(words, dtype=torch.int32)
        if own:
            dist.recv(body, source, group=self._group)
        else:
            dist.broadcast(body, source, group=self._group)
        return body

    def abort(self) -> None:
        pass  # gloo notices a lost peer by itself; a rank that ends does not wait for this thread


class NcclChannel:
    """Over NCCL, on a CUDA stream of its own.

    A body for all is a broadcast; bodies for each are a group of sends, with one receive on each peer. All of them
    use the group's one communicator, which is made here, while ranks are set up.
    """

    name = "nccl"

    def __init__(self, device: torch.device, timeout: float) -> None:
        """timeout: an operation that every rank has got to, and that is not done after so many seconds, has failed."""
        # an error aborts the communicator and is reported here; by default torch would end the process unexplained
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        self.device = device
        self._group: Any = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout))
        self._backend: Any = self._group._get_backend(device)
        self._stream = torch.cuda.Stream(device)
        self._aborted = False
        word = torch.zeros(1, dtype=torch.int32, device=device)
        self._broadcast(word, 0)

    def made(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def share(self, body: Tensor, made: Any) -> None:
        self._stream.wait_event(made)
        self._broadcast(body, dist.get_rank())

    def hand_out(self, bodies: Mapping[int, Tensor], made: Any) -> None:
        self._stream.wait_event(made)
        self._batch([dist.P2POp(dist.isend, body, peer, self._group) for peer, body in bodies.items()])

    def receive(self, source: int, words: int, own: bool) -> Tensor:
        with torch.cuda.stream(self._stream):
            body = torch.empty(words, dtype=torch.int32, device=self.device)
        if own:
            # as a batch of one: only batches of sends and receives use the group's communicator
            self._batch([dist.P2POp(dist.irecv, body, source, self._group)])
        else:
            self._broadcast(body, source)
        body.record_stream(torch.cuda.default_stream(self.device))  # where the runtime will read it
        return body

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._backend.abort()

    def _broadcast(self, body: Tensor, source: int) -> None:
        with torch.cuda.stream(self._stream):
            work: Any = dist.broadcast(body, source, group=self._group, async_op=True)
            work.wait()  # lets the stream wait, not this thread
        self._finish()

    def _batch(self, operations: list[Any]) -> None:
        with torch.cuda.stream(self._stream):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        self._finish()

    def _finish(self) -> None:
        """Wait until the stream is through, without the interpreter lock."""
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()
        error = self._backend.get_error()
        if self._aborted or int(error.value) != 0:
            raise RuntimeError(f"NCCL gave up: {'aborted' if self._aborted else error.name}")
