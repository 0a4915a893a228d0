"""Splats and their gradients as int32 words: a header and a payload, no pickles.

    splats      step, lane, V, C; ids [V] of the primitives in the whole model; splats [V, C] float32
    gradients   step, lane, V, m, G, flags; a bit per splat, set for the m with a gradient; gradients [m, G] float32;
                with flag 1, norms of 2D gradients for the statistics [m] float32
    answer      as splats, with the number of the request in the place of the step

What the C and G columns hold, the kind of splat says (`rendering.stages`, `rendering.surfel_stages`); without rows they
may be 0.
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


def encode_splats(packet: SplatPacket) -> Tensor:
    """The words of a message, its first FRAME_WORDS left to the transport. [W] int32."""
    count, columns = packet.splats.shape
    words = torch.empty(FRAME_WORDS + _SPLAT_HEAD + count * (1 + columns), dtype=torch.int32)
    at = FRAME_WORDS + _SPLAT_HEAD
    words[:at] = torch.tensor([0] * FRAME_WORDS + [packet.step, packet.lane, count, columns], dtype=torch.int32)
    words[at : at + count] = packet.ids
    words[at + count :] = packet.splats.reshape(-1).view(torch.int32)
    return words


def decode_splats(words: Tensor) -> SplatPacket:
    """The packet in a message, as views of its words.

    Raises:
        RuntimeError: The length is not that of the header.
    """
    step, lane, count, columns = words[FRAME_WORDS : FRAME_WORDS + _SPLAT_HEAD].tolist()
    at = FRAME_WORDS + _SPLAT_HEAD
    if words.shape[0] != at + count * (1 + columns):
        raise RuntimeError(f"splats of step {step} lane {lane}: {words.shape[0]} words for {count} splats")
    values = words[at + count :].view(torch.float32).view(count, columns)
    return SplatPacket(step, lane, words[at : at + count], values)


def encode_gradients(packet: GradientPacket) -> Tensor:
    """The words of a message, its first FRAME_WORDS left to the transport. [W] int32."""
    marks = np.zeros(-(-packet.count // 32) * 32, np.uint8)
    marks[packet.rows.numpy()] = 1
    bits = np.packbits(marks, bitorder="little").view(np.int32)
    count, columns = packet.gradients.shape
    flags = int(packet.norms is not None)
    words = torch.empty(FRAME_WORDS + _GRADIENT_HEAD + bits.shape[0] + count * (columns + flags), dtype=torch.int32)
    at = FRAME_WORDS + _GRADIENT_HEAD
    head = [packet.step, packet.lane, packet.count, count, columns, flags]
    words[:at] = torch.tensor([0] * FRAME_WORDS + head, dtype=torch.int32)
    words[at : at + bits.shape[0]] = torch.from_numpy(bits)
    at += bits.shape[0]
    size = count * columns
    words[at : at + size] = packet.gradients.contiguous().view(-1).view(torch.int32)
    if packet.norms is not None:
        words[at + size :] = packet.norms.contiguous().view(torch.int32)
    return words


def decode_gradients(words: Tensor) -> GradientPacket:
    """The packet in a message, as views of its words.

    Raises:
        RuntimeError: The length is not that of the header.
    """
    step, lane, total, count, columns, flags = words[FRAME_WORDS : FRAME_WORDS + _GRADIENT_HEAD].tolist()
    at, mask = FRAME_WORDS + _GRADIENT_HEAD, -(-total // 32)
    if words.shape[0] != at + mask + count * (columns + flags):
        raise RuntimeError(f"gradients of step {step} lane {lane}: {words.shape[0]} words for {count} of {total}")
    bits = words[at : at + mask].numpy().view(np.uint8)
    rows = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    at += mask
    size = count * columns
    gradients = words[at : at + size].view(torch.float32).view(count, columns)
    norms = words[at + size :].view(torch.float32) if flags else None
    return GradientPacket(step, lane, total, torch.from_numpy(rows), gradients, norms)
