"""Messages between owners of primitives and ranks that render views."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from odin_nerfstudio.runtime.exchange import EXCHANGE, Exchange
from odin_nerfstudio.runtime.messages import FRAME_WORDS
from odin_nerfstudio.runtime.sharded import packets
from odin_nerfstudio.runtime.sharded.packets import GradientPacket, SplatPacket
from odin_nerfstudio.runtime.transport import Kind, Received, bytes_message

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.engine import Engine
    from odin_nerfstudio.runtime.sharded.engine import ShardedEngine

Handler = Callable[[Received], None]


class ShardExchange(Exchange):
    """The sharded engine's side of all messages."""

    of_owners = "splats"

    def __init__(self, engine: ShardedEngine) -> None:
        super().__init__(cast("Engine", engine))
        self._sharded = engine
        self.splats: dict[tuple[int, int], dict[int, SplatPacket]] = {}
        """Packets for this rank's tasks, by step and lane, and by owner."""
        self._effects: set[int] = set()
        self._handlers: dict[Kind, Handler] = {}

    def handle(self, kind: Kind, handler: Handler) -> None:
        """Have the messages of a kind given to a function, in the training thread."""
        self._handlers[kind] = handler

    def ship(self, rank: int, packet: SplatPacket) -> int:
        """Hand splats to the rank that renders the view; returns the bytes sent."""
        if rank == self._transport.rank:
            self._put(rank, packet)
            return 0
        return self.send_splats(rank, Kind.SPLATS, packet)

    def send_splats(self, rank: int, kind: Kind, packet: SplatPacket) -> int:
        """Send splats to another rank; returns the bytes sent."""
        if self._transport.apart:
            return self._send_apart(rank, kind, *packets.encode_splats_apart(packet))
        return self._send_apart(rank, kind, packets.encode_splats(packet), None)

    def _send_apart(self, rank: int, kind: Kind, words: Tensor, body: Tensor | None) -> int:
        self._transport.send([rank], kind, words, body)
        return 4 * (words.shape[0] + (0 if body is None else body.shape[0]))

    def send_gradients(self, rank: int, packet: GradientPacket) -> int:
        """Hand gradients back to an owner of splats; returns the bytes sent."""
        if rank == self._transport.rank:
            self._sharded.owner.returned(packet)
            return 0
        if self._transport.apart:
            return self._send_apart(rank, Kind.SPLAT_GRADIENTS, *packets.encode_gradients_apart(packet))
        return self._send_apart(rank, Kind.SPLAT_GRADIENTS, packets.encode_gradients(packet), None)

    def send_words(self, ranks: list[int], kind: Kind, words: Tensor) -> None:
        """Send a message that one of the handlers will understand."""
        self._transport.send(ranks, kind, words)

    def _put(self, owner: int, packet: SplatPacket) -> None:
        found = self.splats.setdefault((packet.step, packet.lane), {})
        if owner in found:
            raise RuntimeError(f"rank {owner} sent its splats of step {packet.step} lane {packet.lane} twice")
        found[owner] = packet

    def take(self, received: Received) -> None:
        """Take in a message that somebody else has received."""
        self._take(received)

    def _take(self, received: Received) -> None:
        if received.kind == Kind.SPLATS:
            packet = packets.decode_splats(received.words, received.body)
            plan = self._sharded.plan
            if packet.lane >= plan.views_per_step or plan.rank(packet.step, packet.lane) != self._transport.rank:
                raise RuntimeError(
                    f"rank {received.peer} sent splats of step {packet.step} lane {packet.lane}, which another rank"
                    " renders; the plans differ"
                )
            self._put(received.peer, packet)
            self._sharded.telemetry.record(packet.step).received += 4 * received.size
        elif received.kind == Kind.SPLAT_GRADIENTS:
            gradients = packets.decode_gradients(received.words, received.body)
            self._sharded.telemetry.record(gradients.step).received += 4 * received.size
            self._sharded.owner.returned(gradients)
        elif received.kind == Kind.CONTRIBUTION and self._sharded.views is not None:
            self._sharded.views.take_contribution(received)
            self._sharded.owner.changed = True
        elif received.kind == Kind.CAMERA_SUMS and self._sharded.views is not None:
            self._sharded.views.take_sums(received)
            self._sharded.owner.changed = True
        elif received.kind == Kind.ASK_VIEW and self._sharded.changing:
            self._early.append(received)  # answered when rows and their numbers fit each other again
        elif received.kind == Kind.HEARTBEAT:
            pass  # this rank woke itself
        elif received.kind in self._handlers:
            self._handlers[received.kind](received)
        else:
            super()._take(received)

    def idle(self, seconds: float) -> None:
        """Take in what arrives within some seconds, and do what it asks for."""
        super().idle(seconds)
        self._sharded.owner.advance()

    def takes_effect(self, step: int) -> bool:
        """Whether an announced word takes effect at the start of a step."""
        return step in self._effects

    def _note(self, word: str, step: int) -> None:
        super()._note(word, step)
        self._effects.add(self._announced[word])

    def union(self, words: Tensor) -> Tensor:
        """Bitwise or of all ranks' masks, on every rank; collective, at a drain. [W] int64."""
        if not self._peers:
            return words
        total = words.clone()
        parts = self.gather(words.numpy().tobytes())
        if parts is not None:
            for part in parts:
                total |= torch.frombuffer(bytearray(part), dtype=torch.int64)
        return torch.frombuffer(bytearray(self.broadcast(total.numpy().tobytes())), dtype=torch.int64)

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's data on every rank; collective, at a drain."""
        if not self._peers:
            return data
        self._round += 1
        if self._transport.rank == 0:
            self._transport.send(self._peers, Kind.BLOB, bytes_message(self._round.to_bytes(8, "little") + data))
            return data
        while (0, self._round) not in self._blobs:
            self.wait_for([0], EXCHANGE)
        return self._blobs.pop((0, self._round))


def header(words: Tensor, count: int) -> list[int]:
    """The first words of a message behind the frame's header."""
    return words[FRAME_WORDS : FRAME_WORDS + count].tolist()
