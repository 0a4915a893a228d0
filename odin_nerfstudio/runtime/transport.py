"""How messages travel between ranks. The engine sees `Transport` only.

A transport moves int32 messages whose first FRAME_WORDS words are its own. It never blocks the caller of `send`,
delivers the messages of one peer in order, and turns every kind of loss into a `RankFailure`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from odin_nerfstudio.runtime.faults import RankFailure
from odin_nerfstudio.runtime.messages import FRAME_WORDS

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.frontier import TaskPlan

MAGIC = 0x4F44494E
HEAD_WORDS_AT, FOLLOWS_AT = 5, 6
"""Places in the frame header, see `frame`."""


class Kind(IntEnum):
    """What a message is."""

    HEARTBEAT = 1
    ABORT = 2
    BYE = 3
    CONTRIBUTION = 4
    PROGRESS = 5
    NOTE = 6
    BLOB = 7
    SHARE = 8
    SUMS = 9
    STATUS = 10
    """Questions of who watches the run, and answers; see `status`."""
    SPLATS = 20
    """This and the following: see `sharded.packets` and `sharded.requests`."""
    SPLAT_GRADIENTS = 21
    ASK_VIEW = 22
    VIEW = 23
    ASK_ROWS = 24
    ROWS = 25
    MOVED = 26
    CAMERA_SUMS = 27


class Activity(IntEnum):
    """What a rank says it is doing. Peers wait without limit for a rank that is busy on purpose."""

    SETUP = 0
    TRAINING = 1
    BUSY = 2
    PAUSED = 3


@dataclass(frozen=True)
class Received:
    """A message from a peer."""

    peer: int
    kind: Kind
    words: Tensor
    """The whole message, or its head. [W] int32 on the CPU."""
    arrival: float
    """Monotonic clock, seconds."""
    body: Tensor | None = None
    """What follows the head, where it was sent apart. [B] int32 on the device of the sender's body."""

    @property
    def size(self) -> int:
        """Words of the whole message."""
        return self.words.shape[0] + (0 if self.body is None else self.body.shape[0])


Observer = Callable[[str, int, Tensor, float, float], None]
"""Gets ``send`` or ``receive``, the peer, the words, and when it began and ended (monotonic); called in a thread of the
transport."""


@dataclass(frozen=True)
class PeerReport:
    """What a rank knows of a peer."""

    step: int
    """Step that it last reported."""
    activity: Activity
    answers: bool
    """It gave a sign of life lately."""

    @property
    def working(self) -> bool:
        """Not busy with something that peers wait for without limit."""
        return self.activity in (Activity.SETUP, Activity.TRAINING)


class Transport(Protocol):
    """Moves messages between ranks."""

    rank: int
    world_size: int
    bytes_sent: int
    bytes_received: int
    apart: bool
    """Messages with rows are wanted as head and body (`messages.encode_apart`)."""
    tap: Callable[[Received], None] | None
    """Called with every message as soon as it has arrived, in a thread of the transport."""
    observer: Observer | None
    """Told of every message that has left or arrived, for a trace."""

    def follow(self, plan: TaskPlan, start_step: int) -> None:
        """Say which tasks there will be, before the first message with a body."""
        ...

    def send(self, peers: Iterable[int], kind: Kind, words: Tensor, body: Tensor | None = None) -> None:
        """Queue a message for some peers. Neither words nor body must change afterwards."""
        ...

    def deliver(self, message: Received) -> None:
        """Put a message of this rank's own in line with those of the peers."""
        ...

    def receive(self, timeout: float | None) -> Received | None:
        """The next message, or None after `timeout` seconds (0: at once; None: wait). Raises the failure, if any."""
        ...

    def report(self, step: int, activity: Activity) -> None:
        """Say where this rank is; travels with every message and heartbeat."""
        ...

    def activity(self, peer: int) -> PeerReport:
        """What is known of a peer."""
        ...

    def fail(self, failure: RankFailure) -> None:
        """Note a failure; the first one counts."""
        ...

    def abort(self, reason: str, root: int | None = None) -> None:
        """Tell every peer that rank `root` (default: this one) has failed and why. Returns within seconds."""
        ...

    def close(self) -> None:
        """Leave in good order: everything queued is delivered, and every peer leaves too."""
        ...


def frame(words: Tensor, kind: Kind, step: int, activity: Activity, head_words: int = 0, follows: int = 0) -> None:
    """Fill the frame header of a message.

    head_words: how many of the words are the head of a message whose others are its body; 0: it is not split.
    follows: 1 + the words of a body that travels by another way; 0: nothing follows.
    """
    head = [MAGIC, int(kind), words.shape[0], step, int(activity), head_words, follows]
    words[: len(head)] = torch.tensor(head, dtype=torch.int32)


def empty_message(payload: Tensor | None = None) -> Tensor:
    """A message around a payload of int32 words."""
    size = 0 if payload is None else payload.shape[0]
    words = torch.zeros(FRAME_WORDS + size, dtype=torch.int32)
    if payload is not None:
        words[FRAME_WORDS:] = payload
    return words


def bytes_message(data: bytes) -> Tensor:
    """A message around bytes: their number, then the bytes padded to words."""
    padded = data + b"\0" * (-len(data) % 4)
    payload = torch.empty(1 + len(padded) // 4, dtype=torch.int32)
    payload[0] = len(data)
    if padded:
        payload[1:] = torch.frombuffer(bytearray(padded), dtype=torch.int32)
    return empty_message(payload)


def message_bytes(words: Tensor) -> bytes:
    """The bytes in a message made by `bytes_message`."""
    size = int(words[FRAME_WORDS])
    return words[FRAME_WORDS + 1 :].contiguous().view(torch.uint8).numpy().tobytes()[:size]


class LocalTransport:
    """The transport of a run with one rank: nothing travels."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.apart = False
        self.bytes_sent = self.bytes_received = 0
        self.tap: Callable[[Received], None] | None = None
        self.observer: Observer | None = None

    def follow(self, plan: TaskPlan, start_step: int) -> None:
        pass

    def send(self, peers: Iterable[int], kind: Kind, words: Tensor, body: Tensor | None = None) -> None:
        if list(peers):
            raise ValueError("a run with one rank has no peers to send to")

    def deliver(self, message: Received) -> None:
        raise ValueError("a run with one rank has no messages")

    def receive(self, timeout: float | None) -> Received | None:
        if timeout != 0:
            raise RuntimeError("a run with one rank would wait for a message for ever")
        return None

    def report(self, step: int, activity: Activity) -> None:
        pass

    def activity(self, peer: int) -> PeerReport:
        raise ValueError(f"a run with one rank has no rank {peer}")

    def fail(self, failure: RankFailure) -> None:
        raise failure

    def abort(self, reason: str, root: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class Inbox:
    """Messages of all peers, in order of arrival, and the first failure."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self.failure: RankFailure | None = None

    def put(self, message: Received) -> None:
        self._queue.put(message)

    def fail(self, failure: RankFailure) -> bool:
        """Note a failure and wake the reader; whether it was the first."""
        if self.failure is not None:
            return False
        self.failure = failure
        self._queue.put(None)
        return True

    def get(self, timeout: float | None) -> Received | None:
        """The next message, or None after `timeout` seconds. Raises the failure, if any."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if self.failure is not None:
                raise self.failure
            try:
                if timeout == 0:
                    message = self._queue.get_nowait()
                else:
                    left = None if end is None else max(0.0, end - time.monotonic())
                    message = self._queue.get(timeout=left)
            except queue.Empty:
                return None
            if message is not None:
                return message
