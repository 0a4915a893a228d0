"""Pictures and rows of the whole model, for those who ask: evaluation, the viewer, checkpoints.

Rank 0 asks, owners answer in their training threads, at hooks or while they wait; nothing is collective. Any thread of
rank 0 may ask for a picture: its question goes through the transport to its own training thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from odin_nerfstudio.rendering.stages import StageView, ViewSplats
from odin_nerfstudio.runtime import rows
from odin_nerfstudio.runtime.candidates import ViewTest
from odin_nerfstudio.runtime.exchange import PICTURE, ROWS
from odin_nerfstudio.runtime.messages import FRAME_WORDS
from odin_nerfstudio.runtime.reads import VisibilityReads
from odin_nerfstudio.runtime.row_watch import KINDS
from odin_nerfstudio.runtime.sharded import packets
from odin_nerfstudio.runtime.sharded.crop import Crop
from odin_nerfstudio.runtime.sharded.engine import ShardedEngine
from odin_nerfstudio.runtime.sharded.exchange import header
from odin_nerfstudio.runtime.sharded.packets import SplatPacket
from odin_nerfstudio.runtime.sharded.views import MergedView
from odin_nerfstudio.runtime.telemetry import now
from odin_nerfstudio.runtime.transport import Kind, Received, empty_message

CHUNK = 16 << 20
"""Most bytes of rows in one answer."""
Painter = Callable[[Mapping[str, Tensor], str, Tensor | None], Mapping[str, Tensor]]
"""Parameters of rows by name [n, ...], one of `row_watch.KINDS` and its values of these rows ([n], None: nothing is
counted) -> the parameters, with colours that show it."""
_PATIENCE = 1.0


@dataclass(eq=False)
class _Question:
    """A picture that somebody waits for."""

    view: StageView
    step: int
    crop: Crop | None
    shows: str | None
    found: dict[int, SplatPacket] = field(default_factory=dict)
    asked: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Requests:
    """Questions and answers of one rank. Make it right after the engine, on every rank."""

    def __init__(self, engine: ShardedEngine, paint: Painter | None = None) -> None:
        """paint: Where pictures may show what happens to rows."""
        self.engine, self._paint = engine, paint
        self._exchange, self._owner = engine.exchange_of_shards, engine.owner
        self._me, self._world = engine.transport.rank, engine.transport.world_size
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._questions: dict[int, _Question] = {}
        self._number = 0
        self._offered: Sequence[Tensor] = ()
        self._rows: dict[tuple[int, int], Tensor] = {}
        for kind, handler in (
            (Kind.ASK_VIEW, self._answer_view),
            (Kind.VIEW, self._take_view),
            (Kind.ASK_ROWS, self._answer_rows),
            (Kind.ROWS, self._take_rows),
        ):
            self._exchange.handle(kind, handler)

    # -- pictures

    def splats(self, view: StageView, step: int, crop: Crop | None = None, shows: str | None = None) -> ViewSplats:
        """The splats of all primitives that a view sees, as each owner has them when it is asked. On rank 0.

        From another thread than the training thread this waits until the training thread comes to a hook.

        Args:
            step: Which bands of spherical harmonics are switched on.
            crop: Only what lies in it.
            shows: Instead of their colours, one of `row_watch.KINDS`.

        Raises:
            RankFailure: A rank failed (in the training thread).
            RuntimeError: The run has failed (in another thread).
        """
        if self._world == 1:  # the viewer and the training thread exclude each other by the trainer's lock
            return MergedView(
                {0: self._packet(_Question(view, step, crop, shows), 0)}, view, self._owner.projector.kind
            ).splats
        with self._lock:
            self._number += 1
            number = self._number
            question = self._questions[number] = _Question(view, step, crop, shows)
        try:
            if threading.get_ident() == self._thread:
                self._ask(number)
                while not question.done.is_set():
                    self._exchange.wait_for([r for r in range(self._world) if r not in question.found], PICTURE)
            else:  # by way of the training thread, which may be waiting for a message
                words = empty_message(torch.tensor([number], dtype=torch.int32))
                self.engine.transport.deliver(Received(self._me, Kind.ASK_VIEW, words, now()))
                while not question.done.wait(_PATIENCE):
                    self._fail_with_the_run()
        finally:
            with self._lock:
                self._questions.pop(number, None)
        return MergedView(question.found, view, self._owner.projector.kind).splats

    def pump(self) -> None:
        """Answer what has been asked, in the training thread, between two steps."""
        self._exchange.poll()
        with self._lock:
            waiting = [number for number, q in self._questions.items() if not q.asked]
        for number in waiting:
            self._ask(number)

    def _fail_with_the_run(self) -> None:
        failure = getattr(getattr(self.engine.transport, "inbox", None), "failure", None)
        if failure is not None:
            raise RuntimeError(f"no picture: {failure}")

    def _ask(self, number: int) -> None:
        with self._lock:
            question = self._questions.get(number)
        if question is None or question.asked:
            return
        question.asked = True
        peers = [r for r in range(self._world) if r != self._me]
        if peers:
            self._exchange.send_words(peers, Kind.ASK_VIEW, _encode_question(number, question))
        self._found(number, self._me, self._packet(question, number))

    def _answer_view(self, received: Received) -> None:
        if received.peer == self._me:
            self._ask(header(received.words, 1)[0])
            return
        number, question = _decode_question(received.words)
        self._exchange.send_splats(received.peer, Kind.VIEW, self._packet(question, number))

    def _packet(self, question: _Question, number: int) -> SplatPacket:
        owner, view, crop = self._owner, question.view, question.crop
        test = ViewTest.of(view.viewmat, view.K, view.width, view.height, near=view.near, far=view.far)
        mask = cast(VisibilityReads, owner.table.reads).mark_now(test)
        if crop is not None:
            mask &= crop.inside(owner.table.parameters["means"].detach()).to(mask.dtype)
        recolor = None if question.shows is None else partial(self._recolored, question.shows)
        places, splats = owner.snapshot(view, question.step, rows.ids_of_mask(mask), recolor)
        return SplatPacket(number, 0, places, splats)

    def _recolored(self, shows: str, leaves: Mapping[str, Tensor], ids: Tensor) -> Mapping[str, Tensor]:
        assert self._paint is not None
        values = self._owner.watch.values(shows, self._owner.low)
        if values is not None:
            padded = values.new_zeros(leaves["means"].shape[0])
            padded[: ids.shape[0]] = values[ids.long()]
            values = padded
        return self._paint(leaves, shows, values)

    def _take_view(self, received: Received) -> None:
        packet = packets.decode_splats(received.words, received.body)
        self._found(packet.step, received.peer, packet)

    def _found(self, number: int, rank: int, packet: SplatPacket) -> None:
        with self._lock:
            question = self._questions.get(number)
        if question is not None:
            question.found[rank] = packet
            if len(question.found) == self._world:
                question.done.set()

    # -- rows

    def gather(
        self, tensors: Mapping[str, Tensor], make: Callable[[str, tuple[int, ...], torch.dtype], Tensor]
    ) -> dict[str, Tensor] | None:
        """All ranks' rows in the order of the whole model, on rank 0; None elsewhere. Collective, at a drain.

        Rank 0 asks one owner after the other for pieces of at most `CHUNK` bytes, one on its way while another is put
        in place; beside what `make` returns it needs no more memory than two of them. From a device, pieces come
        through host memory.

        Args:
            tensors: Per-row tensors of this rank, of 4-byte types; the same names on all. [n, ...] each.
            make: Name, shape and dtype of a whole tensor -> where it is to be put, on the CPU.
        """
        names = sorted(tensors)
        self._offered = [self._owner.ids, *(tensors[name].detach() for name in names)]
        counts = self.engine.exchange(self._owner.ids.shape[0].to_bytes(8, "little"))
        out: dict[str, Tensor] | None = None
        if self._me == 0:
            total = self._owner.total
            out = {n: make(n, (total, *tensors[n].shape[1:]), tensors[n].dtype) for n in names}
            for rank, count in enumerate(int.from_bytes(c, "little") for c in counts):
                self._collect(rank, count, [out[n] for n in names])
        self._exchange.broadcast(b"gathered")
        self._offered = ()
        return out

    def _collect(self, rank: int, count: int, targets: Sequence[Tensor]) -> None:
        size = max(1, CHUNK // (4 * sum(rows.flat(t[:1]).shape[1] for t in self._offered[1:]) + 4))
        starts = range(0, count, size)
        for k, start in enumerate(starts):
            for ahead in starts[k : k + 2] if k == 0 else starts[k + 1 : k + 2]:
                if rank != self._me:
                    self._exchange.send_words([rank], Kind.ASK_ROWS, _ints(ahead, min(size, count - ahead)))
            if rank == self._me:
                piece = self._piece(start, min(size, count - start))
            else:
                while (rank, start) not in self._rows:
                    self._exchange.wait_for([rank], ROWS)
                piece = self._rows.pop((rank, start))
            _put(piece, min(size, count - start), targets)

    def _piece(self, start: int, count: int) -> Tensor:
        return torch.cat([t[start : start + count].reshape(-1).view(torch.int32) for t in self._offered]).cpu()

    def _answer_rows(self, received: Received) -> None:
        start, count = header(received.words, 2)
        piece = self._piece(start, count)
        self._exchange.send_words([received.peer], Kind.ROWS, torch.cat((_ints(start), piece)))

    def _take_rows(self, received: Received) -> None:
        self._rows[(received.peer, header(received.words, 1)[0])] = received.words[FRAME_WORDS + 1 :]


def _put(piece: Tensor, count: int, targets: Sequence[Tensor]) -> None:
    places, at = piece[:count].long(), count
    for target in targets:
        width = rows.flat(target[:1]).shape[1]
        values = piece[at : at + count * width].view(target.dtype).view(count, *target.shape[1:])
        target[places] = values
        at += count * width


def _ints(*values: int) -> Tensor:
    return empty_message(torch.tensor(values, dtype=torch.int32))


def _encode_question(number: int, question: _Question) -> Tensor:
    view, crop = question.view, question.crop
    shows = 0 if question.shows is None else 1 + KINDS.index(question.shows)
    flags = view.with_depth + 2 * view.antialiased + 4 * shows
    floats = [*view.viewmat.reshape(-1).tolist(), *view.K.reshape(-1).tolist()]
    floats += [view.near, view.far, view.radius_clip, view.eps2d, *(() if crop is None else crop.floats())]
    whole = torch.tensor([number, question.step, view.width, view.height, flags], dtype=torch.int32)
    return empty_message(torch.cat((whole, torch.tensor(floats, dtype=torch.float32).view(torch.int32))))


def _decode_question(words: Tensor) -> tuple[int, _Question]:
    number, step, width, height, flags = header(words, 5)
    floats = words[FRAME_WORDS + 5 :].clone().view(torch.float32)
    near, far, clip, eps2d, *crop = floats[25:].tolist()
    view = StageView(
        floats[:16].view(4, 4), floats[16:25].view(3, 3), width, height, near, far, clip, eps2d, bool(flags & 1),
        bool(flags & 2),
    )  # fmt: skip
    shows = KINDS[flags // 4 - 1] if flags // 4 else None
    return number, _Question(view, step, Crop.of(crop) if crop else None, shows)
