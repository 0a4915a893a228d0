"""What the engine says to its peers, and what it makes of their answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from odin_nerfstudio.runtime import messages
from odin_nerfstudio.runtime.blame import who_stalls
from odin_nerfstudio.runtime.faults import RankFailure
from odin_nerfstudio.runtime.gate import BARRIER, Awaited, Decision
from odin_nerfstudio.runtime.messages import FRAME_WORDS, Contribution
from odin_nerfstudio.runtime.reduction import OwnerReducer, share_for
from odin_nerfstudio.runtime.status import StatusBoard
from odin_nerfstudio.runtime.telemetry import now
from odin_nerfstudio.runtime.trace import network_spans
from odin_nerfstudio.runtime.transport import Kind, Received, bytes_message, empty_message, message_bytes

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.engine import Engine

EXCHANGE, PICTURE, ROWS = "exchange", "picture", "rows"
"""What else ranks wait for, beside what gates do: each other's data at a drain, splats of a picture, rows."""
_PARTS = {EXCHANGE: "data", PICTURE: "splats", ROWS: "rows"}
_PATIENCE = 0.5
"""Seconds between looks at whether the peers that are waited for are still working."""
_ANSWERS = 5.0
"""Seconds within which a peer whose process lives says what it is doing."""
_STEPWISE = (Kind.CONTRIBUTION, Kind.SHARE, Kind.SUMS, Kind.PROGRESS)
"""Messages that belong to a step; their first word is its number."""


class Exchange:
    """The engine's side of all messages."""

    of_owners = "sums"
    """What ranks get from owners of rows, in words."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport = engine.transport
        self._peers = [r for r in range(engine.transport.world_size) if r != engine.transport.rank]
        self._early: list[Received] = []
        self._announced: dict[str, int] = {}
        self._blobs: dict[tuple[int, int], bytes] = {}
        self._round = 0
        plan, lanes = engine.plan, range(engine.plan.views_per_step)
        self.reducer = OwnerReducer(
            self._transport.rank,
            self._transport.world_size,
            lambda step: sum(plan.view(step, lane) >= 0 for lane in lanes),
            self._send_sums,
        )
        self.board = StatusBoard(
            engine.telemetry,
            self._peers,
            lambda peers, data: self._transport.send(peers, Kind.STATUS, bytes_message(data)),
            plan.rank,
        )
        if self._peers:
            self._transport.tap = self._tap
            if engine.options.trace:
                self._transport.observer = network_spans(engine.telemetry)

    # -- contributions

    def contribute(self, message: Contribution, reduced: bool) -> int:
        """Stage a contribution of this rank and send it to the peers; returns the bytes sent."""
        if not reduced:
            sent = self._send_whole(message)
            self._engine.frontier.stage(message)
            return sent
        me, world_size = self._transport.rank, self._transport.world_size
        sent = 0
        for peer in self._peers:
            sent += self._send([peer], Kind.SHARE, share_for(message, peer, world_size))
        mine = share_for(message, me, world_size)
        self._engine.frontier.stage(mine)
        self.reducer.add(mine)
        return sent

    def _tap(self, received: Received) -> None:
        """In a thread of the transport: sum a step's rows as soon as the last of them is here; answer questions."""
        if received.kind == Kind.STATUS:
            self.board.take(received)
        elif received.kind == Kind.SHARE:
            self.reducer.add(messages.decode(received.words, received.body))

    def _send_sums(self, sums: Contribution) -> None:
        words, body = self._encode(sums)
        self._transport.send(self._peers, Kind.SUMS, words, body)
        self._transport.deliver(Received(self._transport.rank, Kind.SUMS, words, now(), body))

    def _send_whole(self, message: Contribution) -> int:
        """Send a contribution to all peers, in two messages if rows are deferred; returns the bytes."""
        if not self._peers:
            return 0
        sent = self._send(self._peers, Kind.CONTRIBUTION, message, rest=message.deferred == 0)
        if message.deferred:
            sent += self._send(self._peers, Kind.CONTRIBUTION, message, first=False)
        return sent

    def _send(self, peers: list[int], kind: Kind, message: Contribution, first: bool = True, rest: bool = True) -> int:
        words, body = self._encode(message, first, rest)
        self._transport.send(peers, kind, words, body)
        return 4 * (words.shape[0] + (0 if body is None else body.shape[0])) * len(peers)

    def _encode(self, message: Contribution, first: bool = True, rest: bool = True) -> tuple[Tensor, Tensor | None]:
        if self._transport.apart:
            return messages.encode_apart(message, first=first, rest=rest)
        return messages.encode(message, first=first, rest=rest), None

    def send_progress(self, step: int) -> None:
        """Say that this rank had nothing to render at a step."""
        self._transport.send(self._peers, Kind.PROGRESS, empty_message(torch.tensor([step], dtype=torch.int32)))

    def poll(self) -> None:
        """Take in everything that has arrived."""
        while (received := self._transport.receive(0)) is not None:
            self._take(received)

    def wait(self, step: int, decision: Decision) -> int:
        """Block until something arrives, and take in all of it; returns the rank that it came from.

        Raises:
            RankFailure: A rank failed, or one that is waited for keeps this rank waiting beyond the limit.
        """
        begin, asked = now(), 0.0
        while True:
            try:
                received = self._transport.receive(_PATIENCE)
            except RankFailure as failure:
                raise failure.at(step, self._words(decision)) from None
            # answers to who watches the run are dealt with by the tap; they are nothing that a gate could wait for
            if received is not None and received.kind != Kind.STATUS:
                self._take(received)
                self.poll()
                self._engine.telemetry.timeline.reacted(now() - received.arrival)
                return received.peer
            reports = {r: self._transport.activity(r) for r in self._peers}
            if not all(report.working for report in reports.values()):
                begin, asked = now(), 0.0  # somebody is busy or paused on purpose
            if now() - begin <= self._engine.options.stall:
                continue
            if not asked:
                asked = now()
                self.board.ask()
            elif now() - asked > _ANSWERS or len(self.board.heard_since(asked)) == len(self._peers):
                awaited = {a.rank(self._engine.plan.rank) for a in decision.awaited}
                doing = self.board.heard_since(asked)
                found = who_stalls(self._transport.rank, awaited, doing, reports, self._engine.options.stall)
                if found is not None:
                    raise RankFailure(*found).at(step, self._words(decision))
                asked = 0.0

    def wait_for(self, ranks: Iterable[int], what: str) -> None:
        """As `wait`, for something of some ranks that belongs to no task: `EXCHANGE`, `PICTURE` or `ROWS`."""
        step, telemetry = self._engine.current, self._engine.telemetry
        decision = Decision(what, tuple(Awaited(step, -1 - rank) for rank in ranks))
        doing = telemetry.doing
        telemetry.enter("waiting", step, what, tuple((a.step, a.lane) for a in decision.awaited))
        self.wait(step, decision)
        telemetry.doing = doing

    def _words(self, decision: Decision) -> str:
        plan, part = self._engine.plan, _PARTS.get(decision.hazard or "", self.of_owners)
        names = [
            f"step {a.step} {f'lane {a.lane}' if a.lane >= 0 else part} of rank {a.rank(plan.rank)}"
            for a in decision.awaited[:4]
        ]
        more = f" and {len(decision.awaited) - 4} more" if len(decision.awaited) > 4 else ""
        return f"{', '.join(names) or 'a peer'}{more} ({decision.hazard or BARRIER})"

    def _take(self, received: Received) -> None:
        if received.kind in _STEPWISE:
            step = int(received.words[FRAME_WORDS])
            if self._engine.crosses_structure(step):
                self._early.append(received)
            elif received.kind == Kind.PROGRESS:
                self._engine.frontier.staging(step).settle(received.peer)
            else:
                self._take_contribution(received)
        elif received.kind == Kind.NOTE:
            number, word = message_bytes(received.words).decode().split(" ", 1)
            self._note(word, int(number))
        elif received.kind == Kind.BLOB:
            data = message_bytes(received.words)
            self._blobs[(received.peer, int.from_bytes(data[:8], "little"))] = data[8:]
        elif received.kind != Kind.STATUS:
            raise RuntimeError(f"rank {received.peer} sent an unexpected message of kind {received.kind.name}")

    def _take_contribution(self, received: Received) -> None:
        engine, peer = self._engine, received.peer
        message = messages.decode(received.words, received.body)
        step, lane = message.step, message.lane
        sender = -1 - lane if lane < 0 else engine.plan.rank(step, lane) if lane < engine.plan.views_per_step else -1
        if sender != peer:
            raise RuntimeError(
                f"rank {peer} sent step {step} lane {lane}, which the plan gives to another rank; the plans differ"
            )
        if step < engine.low:
            raise RuntimeError(
                f"rank {peer} sent step {step} lane {lane} again; everything before {engine.low} is published"
            )
        size = 4 * received.size
        record = engine.telemetry.record(step)
        if peer == self._transport.rank:
            record.sent += size * len(self._peers)
        else:
            record.received += size
            if message.has_rest:
                engine.telemetry.timeline.arrived(step, lane, received.arrival)
        if received.kind == Kind.SHARE:
            self.reducer.add(message)  # ignored if the transport's thread has brought it
        for section, table in zip(message.tables, engine.tables, strict=True):
            width = table.layout(step).total
            if section.total != table.count or section.first_rows.shape[1] != width:
                raise RuntimeError(
                    f"rank {peer} sent step {step} lane {lane} for {section.total} rows of table {table.name} in"
                    f" {section.first_rows.shape[1]} columns; this rank has {table.count} in {width}"
                )
        engine.frontier.stage(messages.to_device(message, engine.tables[0].device))

    def release(self) -> None:
        """After a structural step: take in the messages that arrived too early for it."""
        early, self._early = self._early, []
        for received in early:
            self._take(received)

    # -- words, at the same step on all ranks

    def announce(self, word: str, step: int) -> None:
        """Tell all ranks a word and the step at which it takes effect."""
        self._note(word, step)
        self._transport.send(self._peers, Kind.NOTE, bytes_message(f"{step} {word}".encode()))

    def _note(self, word: str, step: int) -> None:
        self._announced[word] = min(step, self._announced.get(word, step))

    def announced(self, word: str) -> bool:
        """Whether a word that was told or heard has not taken effect yet."""
        return word in self._announced

    def due(self, step: int) -> list[str]:
        """Words that take effect at a step or did before, each returned once."""
        words = sorted(w for w, s in self._announced.items() if s <= step)
        for word in words:
            del self._announced[word]
        return words

    def idle(self, seconds: float) -> None:
        """Take in what arrives within some seconds."""
        end = now() + seconds
        while (left := end - now()) > 0:
            if not self._peers:
                time.sleep(left)
                return
            received = self._transport.receive(left)
            if received is not None:
                self._take(received)

    # -- collective exchanges at a drain

    def gather(self, data: bytes) -> list[bytes] | None:
        """All ranks' data on rank 0; None elsewhere."""
        return self._exchange_blobs(data, [0])

    def gather_everywhere(self, data: bytes) -> list[bytes]:
        """All ranks' data on every rank."""
        parts = self._exchange_blobs(data, list(range(self._transport.world_size)))
        assert parts is not None
        return parts

    def _exchange_blobs(self, data: bytes, targets: list[int]) -> list[bytes] | None:
        self._round += 1
        me = self._transport.rank
        tagged = self._round.to_bytes(8, "little") + data
        others = [r for r in targets if r != me]
        if others:
            self._transport.send(others, Kind.BLOB, bytes_message(tagged))
        if me not in targets:
            return None
        while missing := [p for p in self._peers if (p, self._round) not in self._blobs]:
            self.wait_for(missing, EXCHANGE)
        return [data if r == me else self._blobs.pop((r, self._round)) for r in range(self._transport.world_size)]

    def gather_summaries(self, summary: dict[str, float]) -> list[dict[str, float]] | None:
        """All ranks' totals on rank 0; None elsewhere."""
        parts = self.gather(json.dumps(summary).encode())
        return None if parts is None else [json.loads(p) for p in parts]

    def compare(self, digests: dict[str, int], step: int) -> None:
        """Raise RuntimeError unless all ranks have the same digests."""
        for rank, part in enumerate(self.gather_everywhere(json.dumps(digests).encode())):
            theirs = json.loads(part)
            different = sorted(k for k in digests.keys() | theirs.keys() if digests.get(k) != theirs.get(k))
            if different:
                raise RuntimeError(
                    f"step {step}: ranks {self._transport.rank} and {rank} differ in {', '.join(different[:6])}"
                    f"{' and more' if len(different) > 6 else ''}; their states must be equal here"
                )
