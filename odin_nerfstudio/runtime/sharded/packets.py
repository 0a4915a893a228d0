"""Splats and their gradients as int32 words: a header and a payload, no pickles.

    splats      step, lane, V, C; ids [V] of the primitives in the whole model; splats [V, C] float32
    gradients   step, lane, V, m, G, flags; a bit per splat, set for the m with a gradient; gradients [m, G] float32;
                with flag 1, norms of 2D gradients for the statistics [m] float32
    answer      as splats, with the number of the request in the place of the step

What the C and G columns hold, the kind of splat says (`rendering.stages`, `rendering.surfel_stages` and their twins for
devices); without rows they may be 0. Splats on a device travel apart, as the rows of `messages`: the header in host
memory, the payload where the splats are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime.messages import FRAME_WORDS

_SPLAT_HEAD, _GRADIENT_HEAD = 4, 6


@dataclass(frozen=True, eq=False)
class SplatPacket:
    """What one owner's rows look like in a view."""

    step: int
    lane: int
    ids: Tensor
    """Rows of the whole model, ascending. [V] int32."""
    splats: Tensor
    """[V, C] float32."""


@dataclass(frozen=True, eq=False)
class GradientPacket:
    """What comes back for a `SplatPacket`."""

    step: int
    lane: int
    count: int
    """Splats in the packet, V."""
    rows: Tensor
    """Those with a gradient, ascending. [m] int64."""
    gradients: Tensor
    """[m, G] float32."""
    norms: Tensor | None
    """2D gradient norms for the densification statistics. [m] float32."""


def _head(*numbers: int) -> Tensor:
    """The frame's header, which is the transport's, and this one."""
    return torch.tensor([0] * FRAME_WORDS + list(numbers), dtype=torch.int32)


def encode_splats(packet: SplatPacket) -> Tensor:
    """The words of a message, its first FRAME_WORDS left to the transport. [W] int32 on the CPU, as the splats."""
    count, columns = packet.splats.shape
    words = torch.empty(FRAME_WORDS + _SPLAT_HEAD + count * (1 + columns), dtype=torch.int32)
    at = FRAME_WORDS + _SPLAT_HEAD
    words[:at] = _head(packet.step, packet.lane, count, columns)
    words[at : at + count] = packet.ids
    words[at + count :] = packet.splats.reshape(-1).view(torch.int32)
    return words


def encode_splats_apart(packet: SplatPacket) -> tuple[Tensor, Tensor]:
    """The same as head, on the CPU, and body, where the splats are. [H], [W - H] int32."""
    count, columns = packet.splats.shape
    body = torch.cat((packet.ids, packet.splats.reshape(-1).view(torch.int32)))
    return _head(packet.step, packet.lane, count, columns), body


def decode_splats(words: Tensor, body: Tensor | None = None) -> SplatPacket:
    """The packet in a message, as views of its words or, where that came apart, of its body.

    Raises:
        RuntimeError: The length is not that of the header.
    """
    step, lane, count, columns = words[FRAME_WORDS : FRAME_WORDS + _SPLAT_HEAD].tolist()
    payload = words[FRAME_WORDS + _SPLAT_HEAD :] if body is None else body
    if payload.shape[0] != count * (1 + columns):
        raise RuntimeError(f"splats of step {step} lane {lane}: {payload.shape[0]} words for {count} splats")
    values = payload[count:].view(torch.float32).view(count, columns)
    return SplatPacket(step, lane, payload[:count], values)


def _bits_of(rows: Tensor, count: int) -> Tensor:
    """A bit per splat, set for some rows [m] int64. [count / 32, rounded up] int32."""
    size = -(-count // 32) * 32
    if rows.device.type == "cpu":
        marks = np.zeros(size, np.uint8)
        marks[rows.numpy()] = 1
        return torch.from_numpy(np.packbits(marks, bitorder="little").view(np.int32))
    flags = torch.zeros(size, dtype=torch.int32, device=rows.device).index_fill_(0, rows, 1)
    shifts = torch.arange(32, dtype=torch.int32, device=rows.device)
    return (flags.view(-1, 32) << shifts).sum(1, dtype=torch.int32)


def _rows_of(bits: Tensor) -> Tensor:
    """The rows whose bits are set, ascending. [m] int64."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")))
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).flatten().nonzero().flatten()


def _gradient_head(packet: GradientPacket) -> Tensor:
    count, columns = packet.gradients.shape
    return _head(packet.step, packet.lane, packet.count, count, columns, int(packet.norms is not None))


def encode_gradients(packet: GradientPacket) -> Tensor:
    """The words of a message, its first FRAME_WORDS left to the transport. [W] int32 on the CPU, as the rows."""
    bits = _bits_of(packet.rows, packet.count)
    count, columns = packet.gradients.shape
    flags = int(packet.norms is not None)
    words = torch.empty(FRAME_WORDS + _GRADIENT_HEAD + bits.shape[0] + count * (columns + flags), dtype=torch.int32)
    at = FRAME_WORDS + _GRADIENT_HEAD
    words[:at] = _gradient_head(packet)
    words[at : at + bits.shape[0]] = bits
    at += bits.shape[0]
    size = count * columns
    words[at : at + size] = packet.gradients.contiguous().view(-1).view(torch.int32)
    if packet.norms is not None:
        words[at + size :] = packet.norms.contiguous().view(torch.int32)
    return words


def encode_gradients_apart(packet: GradientPacket) -> tuple[Tensor, Tensor]:
    """The same as head, on the CPU, and body, where the rows are. [H], [W - H] int32."""
    parts = [_bits_of(packet.rows, packet.count), packet.gradients.reshape(-1).view(torch.int32)]
    if packet.norms is not None:
        parts.append(packet.norms.contiguous().view(torch.int32))
    return _gradient_head(packet), torch.cat(parts)


def decode_gradients(words: Tensor, body: Tensor | None = None) -> GradientPacket:
    """The packet in a message, as views of its words or, where that came apart, of its body.

    Raises:
        RuntimeError: The length is not that of the header.
    """
    step, lane, total, count, columns, flags = words[FRAME_WORDS : FRAME_WORDS + _GRADIENT_HEAD].tolist()
    payload, at = words[FRAME_WORDS + _GRADIENT_HEAD :] if body is None else body, -(-total // 32)
    if payload.shape[0] != at + count * (columns + flags):
        raise RuntimeError(f"gradients of step {step} lane {lane}: {payload.shape[0]} words for {count} of {total}")
    size = count * columns
    gradients = payload[at : at + size].view(torch.float32).view(count, columns)
    norms = payload[at + size :].view(torch.float32) if flags else None
    return GradientPacket(step, lane, total, _rows_of(payload[:at]), gradients, norms)
