"""The owner's work while its rank renders.

A view on another rank may wait for rows of this one; it should not wait until this rank's own view is done. So from
the moment that a view has its splats until its backward pass is done, a thread takes in messages and does what they ask
for. At all other times the training thread does that itself; never both.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from odin_nerfstudio.runtime.faults import RankFailure
from odin_nerfstudio.runtime.telemetry import now
from odin_nerfstudio.runtime.transport import Kind, Received, Transport, empty_message

_PATIENCE = 0.5


class Service:
    """Takes in messages in a thread of its own, between `start` and `stop`."""

    def __init__(self, transport: Transport, take: Callable[[Received], None], device: torch.device) -> None:
        """take: Takes in a message, and does all that may be done then, on a device."""
        self._transport, self._take, self._device = transport, take, device
        self._starts: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._wanted = False
        self._error: BaseException | None = None
        self._threads = torch.get_num_threads()
        self.busy = 0.0
        """Seconds that the thread has worked."""
        if transport.world_size > 1:
            threading.Thread(target=self._run, name="odin-owner", daemon=True).start()

    def start(self) -> None:
        """The training thread will not look at messages for a while."""
        if self._transport.world_size > 1:
            self._wanted = True
            self._idle.clear()
            self._starts.put(None)

    def stop(self) -> None:
        """The training thread takes over; returns when the thread is done with what it is at. Raises its error."""
        if self._idle.is_set() and self._error is None:
            return
        self._wanted = False
        # a message to oneself wakes the thread; should it stop before, the training thread will pass over it
        self._transport.deliver(Received(self._transport.rank, Kind.HEARTBEAT, empty_message(), now()))
        self._idle.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # is a thread's own
        torch.set_num_threads(self._threads)  # as many as the training thread's: results must not depend on the thread
        while True:
            self._starts.get()
            try:
                while self._wanted:
                    received = self._transport.receive(_PATIENCE)
                    if received is not None and received.kind != Kind.HEARTBEAT:
                        begin = now()
                        self._take(received)
                        self.busy += now() - begin
            except RankFailure:
                pass  # the transport tells the training thread, too
            except BaseException as error:
                self._error = error
            self._idle.set()
