"""Transport over gloo: a sending and a receiving thread per peer, and one that watches over them.

Gloo's ``is_completed()`` stays false until ``wait()``, so progress needs threads. Messages travel in `frames`, and
bodies of messages that live on a device go through `pinned` host memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from odin_nerfstudio.runtime.faults import (
    Deadline,
    FaultLimits,
    OwnPauses,
    RankFailure,
    brief,
    kill_process,
    machine_word,
)
from odin_nerfstudio.runtime.frames import FrameReader, send_frames
from odin_nerfstudio.runtime.messages import FRAME_WORDS
from odin_nerfstudio.runtime.peers import Peer
from odin_nerfstudio.runtime.pinned import HostCopies, Parcel
from odin_nerfstudio.runtime.transport import (
    HEAD_WORDS_AT,
    MAGIC,
    Activity,
    Inbox,
    Kind,
    Observer,
    PeerReport,
    Received,
    bytes_message,
    empty_message,
    frame,
    message_bytes,
)

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.frontier import TaskPlan

_TICK = 0.25
_LAST_WORDS = 3.0
"""Longest that a rank that gives up waits for its peers to have taken its reason in. [s]"""


class GlooTransport:
    """Point-to-point messages over a gloo group of its own.

    Make it right after ``torch.distributed.init_process_group``, on every rank: from then on a rank that dies, stalls
    or raises (and calls `abort`) is noticed by the others.
    """

    def __init__(
        self, limits: FaultLimits | None = None, setup_timeout: float = 300.0, device: torch.device | None = None
    ) -> None:
        """Connect to all ranks of the default process group.

        setup_timeout: seconds within which every rank must get here. device: where the rows of messages live, if not in
        host memory.
        """
        self.limits = limits or FaultLimits()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.bytes_sent = self.bytes_received = 0
        self.tap: Callable[[Received], None] | None = None
        self.observer: Observer | None = None
        self.apart = device is not None
        self._copies = None if device is None else HostCopies(device)
        self.inbox = Inbox()
        self.deadline = Deadline(self.limits.exit_grace)
        self._step, self._activity = -1, Activity.SETUP
        self._closing = False
        self._lock = threading.Lock()
        # one group to meet within the time allowed for set-up, and one that never times out by itself:
        # a paused run may be silent for hours but for heartbeats, and stalls are noticed by this class
        meeting: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=setup_timeout))
        identities = torch.zeros(self.world_size, 2, dtype=torch.int64)
        identities[self.rank] = torch.tensor([machine_word(), os.getpid()])
        dist.all_reduce(identities, group=meeting)
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        self._peers = {r: Peer(r) for r in range(self.world_size) if r != self.rank}
        self._readers: list[FrameReader] = []
        for peer in self._peers.values():
            peer.pid = int(identities[peer.rank, 1])
            peer.same_machine = bool(identities[peer.rank, 0] == identities[self.rank, 0])
            for work, name in ((self._receive_loop, "receive"), (self._send_loop, "send")):
                threading.Thread(target=work, args=(peer,), name=f"odin-{name}-{peer.rank}", daemon=True).start()
        threading.Thread(target=self._watch_loop, name="odin-watch", daemon=True).start()

    # -- the engine's side

    def follow(self, plan: TaskPlan, start_step: int) -> None:
        pass  # nothing here depends on the order of messages

    def send(self, peers: Iterable[int], kind: Kind, words: Tensor, body: Tensor | None = None) -> None:
        peers = list(peers)
        parcel = Parcel(words, receivers=len(peers))
        if body is not None and self._copies is not None:
            parcel = self._copies.to_host(words, body, len(peers))
        frame(parcel.words, kind, self._step, self._activity, 0 if body is None else words.shape[0])
        self._post(peers, parcel)

    def _post(self, peers: Iterable[int], parcel: Parcel) -> None:
        for number in peers:
            self._enqueue(self._peers[number], parcel)

    def deliver(self, message: Received) -> None:
        self.inbox.put(message)

    def receive(self, timeout: float | None) -> Received | None:
        return self.inbox.get(timeout)

    def report(self, step: int, activity: Activity) -> None:
        changed = activity != self._activity
        self._step, self._activity = step, activity
        if changed:  # peers should know before they lose patience
            self.send(self._peers, Kind.HEARTBEAT, empty_message())

    def activity(self, peer: int) -> PeerReport:
        known = self._peers[peer]
        answers = time.monotonic() - known.heard < 3 * self.limits.heartbeat
        return PeerReport(known.step, known.activity, answers)

    def fail(self, failure: RankFailure) -> None:
        if self._closing:
            return
        if self.inbox.fail(failure):
            self.deadline.arm(str(failure))

    def abort(self, reason: str, root: int | None = None) -> None:
        words = bytes_message(f"{self.rank if root is None else root} {reason}".encode())
        frame(words, Kind.ABORT, self._step, self._activity)
        self._closing = True
        for peer in self._peers.values():
            self._enqueue(peer, Parcel(words), urgent=True)
        self.deadline.arm(reason)
        end = time.monotonic() + _LAST_WORDS
        for peer in self._peers.values():
            while not peer.left and not peer.said_bye.wait(0.05) and time.monotonic() < end:
                pass

    def close(self) -> None:
        frame(bye := empty_message(), Kind.BYE, self._step, self._activity)
        self._post(self._peers, Parcel(bye, receivers=len(self._peers)))
        end = time.monotonic() + self.limits.stall
        for peer in self._peers.values():
            while not peer.said_bye.wait(0.1):
                if self.inbox.failure is not None:
                    raise self.inbox.failure
                if time.monotonic() > end and peer.activity == Activity.TRAINING:
                    raise RankFailure(
                        peer.rank, f"did not finish within {self.limits.stall:g} s of this rank", self._step
                    )
        self._flush(10.0)
        self._closing = True
        self.deadline.disarm()

    def _enqueue(self, peer: Peer, parcel: Parcel, urgent: bool = False) -> None:
        with peer.ready:
            peer.outgoing.appendleft(parcel) if urgent else peer.outgoing.append(parcel)
            peer.ready.notify()

    def _flush(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for peer in self._peers.values():
            with peer.ready:
                while (peer.outgoing or peer.sending) and not peer.left and time.monotonic() < end:
                    peer.ready.wait(0.05)

    # -- threads

    def _send_loop(self, peer: Peer) -> None:
        try:
            while not peer.left:
                with peer.ready:
                    if not peer.outgoing:
                        peer.ready.wait(self.limits.heartbeat)
                    if peer.outgoing:
                        parcel = peer.outgoing.popleft()
                    else:
                        parcel = Parcel(empty_message())
                        frame(parcel.words, Kind.HEARTBEAT, self._step, self._activity)
                    peer.sending = True
                words = parcel.ready()
                begin = time.monotonic()
                send_frames(words, peer.rank, self._group)
                self.bytes_sent += 4 * words.shape[0]
                if self.observer is not None:
                    self.observer("send", peer.rank, words, begin, time.monotonic())
                last = int(words[1]) == Kind.BYE
                parcel.sent()
                with peer.ready:
                    peer.sending = False
                    peer.ready.notify_all()
                if last:
                    return
        except (RuntimeError, ValueError) as error:
            self._lost(peer, error)

    def _receive_loop(self, peer: Peer) -> None:
        def heard() -> None:
            peer.heard = time.monotonic()

        try:
            reader = FrameReader(peer.rank, self._group, lambda words: self._open(peer, words))
            self._readers.append(reader)  # kept: gloo writes into its frames for as long as the process lives
            while True:
                words = reader.read(heard)
                self.bytes_received += 4 * words.shape[0]
                if self.observer is not None:
                    self.observer("receive", peer.rank, words, peer.heard, peer.heard)
                if self._handle(peer, words, peer.heard):
                    return
        except (RuntimeError, ValueError) as error:
            self._lost(peer, error)

    def _open(self, peer: Peer, words: Tensor) -> Tensor:
        magic, kind, size, step, activity, head_words = words[:6].tolist()
        if magic != MAGIC or size < FRAME_WORDS or kind not in set(Kind):
            raise RuntimeError(
                f"message of rank {peer.rank} does not start with a header (magic {magic:#x}, {size} words)"
            )
        peer.step, peer.activity = step, Activity(activity)
        if head_words and self._copies is not None:
            return self._copies.buffers.take(size)
        return torch.empty(size, dtype=torch.int32)

    def _handle(self, peer: Peer, words: Tensor, arrived: float) -> bool:
        """Deal with a whole message; whether it was the peer's last."""
        kind = Kind(int(words[1]))
        if kind == Kind.BYE:
            peer.said_bye.set()
            return True
        if kind == Kind.ABORT:
            root, text = message_bytes(words).decode(errors="replace").split(" ", 1)
            source = "" if int(root) == peer.rank else f" [reported by rank {peer.rank}]"
            self.fail(RankFailure(int(root), text + source))
            frame(bye := empty_message(), Kind.BYE, self._step, self._activity)
            self._enqueue(peer, Parcel(bye), urgent=True)  # the peer stays until it knows that its reason has arrived
        elif kind != Kind.HEARTBEAT:
            self._arrived(peer.rank, kind, words, arrived)
        return False

    def _arrived(self, peer: int, kind: Kind, words: Tensor, arrived: float) -> None:
        head_words = int(words[HEAD_WORDS_AT])
        body: Tensor | None = None
        if head_words and self._copies is not None:
            words, body = self._copies.to_device(words, head_words)
        elif head_words:
            body = words[head_words:]
            words = words[:head_words]
        self._take_in(Received(peer, kind, words, arrived, body))

    def _take_in(self, received: Received) -> None:
        """Hand a message to the tap and to the engine."""
        if self.tap is not None:
            try:
                self.tap(received)
            except Exception as error:
                self.fail(RankFailure(self.rank, f"could not use a message of rank {received.peer}: {error}"))
        self.inbox.put(received)

    def _lost(self, peer: Peer, error: Exception) -> None:
        with peer.ready:
            peer.left = True
            peer.outgoing.clear()
            peer.sending = False
            peer.ready.notify_all()
        if self._closing or peer.said_bye.is_set():
            return
        if self.inbox.failure is None:
            time.sleep(0.2)  # a reason that the peer sent may still be on its way through the other thread
        self.fail(RankFailure(peer.rank, f"died or lost its connection at its step {peer.step} [{brief(error)}]"))

    def _watch_loop(self) -> None:
        pauses = OwnPauses(_TICK)
        while not self._closing:
            time.sleep(_TICK)
            now = time.monotonic()
            if pauses.paused():
                for peer in self._peers.values():
                    peer.heard = now
            for peer in self._peers.values():
                silent = now - peer.heard
                if silent > self.limits.stall and not peer.left and not peer.said_bye.is_set():
                    self.fail(
                        RankFailure(
                            peer.rank, f"has stalled at its step {peer.step}: no sign of life for {silent:.0f} s"
                        )
                    )
                    if self.limits.kill_stalled and peer.same_machine:
                        kill_process(peer.pid)
                    peer.left = True
