"""Contributions and their encoding as int32 words: a header and a payload, no pickles.

A task sends message 1 with all ids of its active rows and the rows that the receivers' next tasks may read, and message
2 with the other rows and the densification statistics. Without all ids in message 1 a receiver could not tell "later"
from "untouched". Where nothing is deferred, one message carries both parts. Where rows are summed by their owners
(`reduction`), a *share* carries all ids and the statistics, but only the receiver's rows.

    frame header  FRAME_WORDS words, filled by the transport
    body header   step, lane, parts (1: first, 2: rest, 4: share), tables, statistics rows, 3 spare
    per table     ids, first, columns, rows of the table
    part 1        per table: ids, first rows
    part 2        per table: other rows; then statistics ids, norms, radii
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FRAME_WORDS = 16
"""Words in front of every message that belong to the transport."""
_BODY_WORDS = 8
_TABLE_WORDS = 4
FIRST, REST, SHARE = 1, 2, 4

Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False)
class Section:
    """A contribution to one table."""

    ids: Tensor
    """Active rows, those of message 1 in front, ascending within each part. [n] int32."""
    first: int
    """How many of the ids have their rows in message 1."""
    first_rows: Tensor
    """[first, C] float32."""
    rest_rows: Tensor
    """[n - first, C] float32; empty in message 1."""
    total: int
    """Rows of the table, N."""


@dataclass(eq=False)
class Contribution:
    """One or both messages of a task."""

    step: int
    lane: int
    tables: Sequence[Section]
    statistics: Triple | None
    """Ids [m] int32, 2D gradient norms [m] float32, radii [m] float32 of the visible primitives."""
    has_first: bool = True
    has_rest: bool = True
    share: bool = False
    """Of the ids, only the first `first` rows that the receiver owns are here; others never come."""

    @property
    def deferred(self) -> int:
        """Rows that are not in message 1."""
        if self.share:
            return 0
        return sum(s.ids.shape[0] - s.first for s in self.tables)


def _write(buffer: Tensor, at: int, values: Tensor) -> int:
    """Copy a contiguous tensor of 4-byte values into the buffer; returns the next position."""
    words = values.reshape(-1)
    if words.dtype != torch.int32:
        words = words.view(torch.int32)
    buffer[at : at + words.shape[0]].copy_(words)
    return at + words.shape[0]


def _size(message: Contribution, first: bool, rest: bool) -> int:
    words = FRAME_WORDS + _BODY_WORDS + _TABLE_WORDS * len(message.tables)
    for s in message.tables:
        if first:
            words += s.ids.shape[0] + s.first_rows.numel()
        if rest and not message.share:
            words += s.rest_rows.numel()
    if rest and message.statistics is not None:
        words += 3 * message.statistics[0].shape[0]
    return words


def encode(message: Contribution, *, first: bool, rest: bool) -> Tensor:
    """The words of a message with the chosen parts, its first FRAME_WORDS left to the transport. [W] int32 on the CPU.

    Raises:
        ValueError: Ids and rows differ in length.
    """
    head = _head(message, first, rest)
    buffer = torch.empty(_size(message, first, rest), dtype=torch.int32)
    _write_body(buffer, _write(buffer, 0, head), message, first, rest)
    return buffer


def encode_apart(message: Contribution, *, first: bool, rest: bool) -> tuple[Tensor, Tensor]:
    """The words of a message as head and body, for a body that stays where the rows are.

    Returns:
        Both headers [H] int32 on the CPU; ids, rows and statistics [W - H] int32 on the device of the rows. Nothing
        waits for the device.

    Raises:
        ValueError: Ids and rows differ in length.
    """
    head = _head(message, first, rest)
    where = message.tables[0].ids.device
    body = torch.empty(_size(message, first, rest) - head.shape[0], dtype=torch.int32, device=where)
    _write_body(body, 0, message, first, rest)
    return head, body


def _head(message: Contribution, first: bool, rest: bool) -> Tensor:
    for k, s in enumerate(message.tables):
        n, width = s.ids.shape[0], s.first_rows.shape[1]
        later = 0 if message.share else n - s.first
        if s.first_rows.shape != (s.first, width) or s.rest_rows.shape != (later, width) or s.first > n:
            raise ValueError(
                f"step {message.step} lane {message.lane} table {k}: {n} ids, {s.first} first, but rows"
                f" {tuple(s.first_rows.shape)} and {tuple(s.rest_rows.shape)}"
            )
    statistics = message.statistics if rest else None
    count = statistics[0].shape[0] if statistics is not None else -1
    parts = FIRST * first + REST * rest + SHARE * message.share
    head = [*[0] * FRAME_WORDS, message.step, message.lane, parts, len(message.tables), count, 0, 0, 0]
    for s in message.tables:
        head += [s.ids.shape[0], s.first, s.first_rows.shape[1], s.total]
    return torch.tensor(head, dtype=torch.int32)


def _write_body(buffer: Tensor, at: int, message: Contribution, first: bool, rest: bool) -> None:
    if first:
        for s in message.tables:
            at = _write(buffer, at, s.ids)
            at = _write(buffer, at, s.first_rows)
    if rest:
        for s in message.tables:
            if not message.share:
                at = _write(buffer, at, s.rest_rows)
        if message.statistics is not None:
            for values in message.statistics:
                at = _write(buffer, at, values)
    assert at == buffer.shape[0]


def unit_of(head: Tensor) -> tuple[int, int, int]:
    """Step, lane and parts (FIRST | REST | SHARE) of an encoded message."""
    step, lane, parts = head[FRAME_WORDS : FRAME_WORDS + 3].tolist()
    return step, lane, parts


def decode(words: Tensor, body: Tensor | None = None) -> Contribution:
    """The contribution in a received message, as views of its words. Sections without part 1 have no ids.

    words: the whole message, or its head where `body` is the rest of it.

    Raises:
        RuntimeError: The lengths in the header do not add up to the length of the message.
    """
    at = FRAME_WORDS
    head = words[at : at + _BODY_WORDS].tolist()
    step, lane, parts, tables, count = head[:5]
    first, rest, share = bool(parts & FIRST), bool(parts & REST), bool(parts & SHARE)
    at += _BODY_WORDS
    shapes = words[at : at + _TABLE_WORDS * tables].view(tables, _TABLE_WORDS).tolist()
    at += _TABLE_WORDS * tables
    buffer, at = (words, at) if body is None else (body, 0)
    expected = at
    for n, front, width, _ in shapes:
        expected += (n + front * width if first else 0) + ((n - front) * width if rest and not share else 0)
    expected += 3 * count if rest and count > 0 else 0
    if expected != buffer.shape[0]:
        raise RuntimeError(
            f"message of step {step} lane {lane}: {buffer.shape[0]} words received, its header says {expected}"
        )

    def take(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        nonlocal at
        at += size
        return buffer[at - size : at].view(dtype)

    none = buffer.new_empty(0)
    sections = []
    for n, front, width, total in shapes:
        ids = take(n) if first else none
        rows = (
            take(front * width, torch.float32).view(front, width)
            if first
            else buffer.new_empty((0, width), dtype=torch.float32)
        )
        sections.append(Section(ids, front, rows, buffer.new_empty((0, width), dtype=torch.float32), total))
    statistics = None
    if rest:
        for section, (n, front, width, _) in zip(sections, shapes):
            if not share:
                section.rest_rows = take((n - front) * width, torch.float32).view(n - front, width)
        if count >= 0:
            statistics = (take(count), take(count, torch.float32), take(count, torch.float32))
    return Contribution(step, lane, sections, statistics, first, rest, share)


def to_device(message: Contribution, device: torch.device) -> Contribution:
    """The contribution with all tensors on a device."""
    if device.type == "cpu":
        return message
    for s in message.tables:
        s.ids, s.first_rows, s.rest_rows = s.ids.to(device), s.first_rows.to(device), s.rest_rows.to(device)
    if message.statistics is not None:
        ids, norms, radii = message.statistics
        message.statistics = (ids.to(device), norms.to(device), radii.to(device))
    return message
