"""Splats and their gradients as int32 words: a header and a payload, no pickles.

    splats      step, lane, V; ids [V] of the primitives in the whole model; splats [V, 11] float32
    gradients   step, lane, V, m, flags; a bit per splat, set for the m with a gradient; gradients [m, 10] float32;
                with flag 1, norms of 2D gradients for the statistics [m] float32
    answer      as splats, with the number of the request in the place of the step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.rendering.stages import GRADIENT_COLUMNS, SPLAT_COLUMNS
from odin_nerfstudio.runtime.messages import FRAME_WORDS

_SPLAT_HEAD, _GRADIENT_HEAD = 3, 5


@dataclass(frozen=True, eq=False)
class SplatPacket:
    """What one owner's rows look like in a view."""

    step: int
    lane: int
    ids: Tensor
    """Rows of the whole model, ascending. [V] int32."""
    splats: Tensor
    """[V, SPLAT_COLUMNS] float32."""


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
    """[m, GRADIENT_COLUMNS] float32."""
    norms: Tensor | None
    """2D gradient norms for the densification statistics. [m] float32."""


def encode_splats(packet: SplatPacket) -> Tensor:
    """The words of a message, its first FRAME_WORDS left to the transport. [W] int32."""
    count = packet.ids.shape[0]
    words = torch.empty(FRAME_WORDS + _SPLAT_HEAD + count * (1 + SPLAT_COLUMNS), dtype=torch.int32)
    at = FRAME_WORDS + _SPLAT_HEAD
    words[:at] = torch.tensor([0] * FRAME_WORDS + [packet.step, packet.lane, count], dtype=torch.int32)
    words[at : at + count] = packet.ids
    words[at + count :] = packet.splats.reshape(-1).view(torch.int32)
    return words


def decode_splats(words: Tensor) -> SplatPacket:
    """The packet in a message, as views of its words.

    Raises:
        RuntimeError: The length is not that of the header.
    """
    step, lane, count = words[FRAME_WORDS : FRAME_WORDS + _SPLAT_HEAD].tolist()
    at = FRAME_WORDS + _SPLAT_HEAD
    if words.shape[0] != at + count * (1 + SPLAT_COLUMNS):
        raise RuntimeError(f"splats of step {step} lane {lane}: {words.shape[0]} words for {count} splats")
    values = words[at + count :].view(torch.float32).view(count, SPLAT_COLUMNS)
    return SplatPacket(step, lane, words[at : at + count], values)


def encode_gradients(packet: GradientPacket) -> Tensor:
    """The words of a message, its first FRAME_WORDS left to the transport. [W] int32."""
    marks = np.zeros(-(-packet.count // 32) * 32, np.uint8)
    marks[packet.rows.numpy()] = 1
    bits = np.packbits(marks, bitorder="little").view(np.int32)
    count = packet.rows.shape[0]
    columns = GRADIENT_COLUMNS + (packet.norms is not None)
    words = torch.empty(FRAME_WORDS + _GRADIENT_HEAD + bits.shape[0] + count * columns, dtype=torch.int32)
    at = FRAME_WORDS + _GRADIENT_HEAD
    head = [packet.step, packet.lane, packet.count, count, int(packet.norms is not None)]
    words[:at] = torch.tensor([0] * FRAME_WORDS + head, dtype=torch.int32)
    words[at : at + bits.shape[0]] = torch.from_numpy(bits)
    at += bits.shape[0]
    size = count * GRADIENT_COLUMNS
    words[at : at + size] = packet.gradients.contiguous().view(-1).view(torch.int32)
    if packet.norms is not None:
        words[at + size :] = packet.norms.contiguous().view(torch.int32)
    return words


def decode_gradients(words: Tensor) -> GradientPacket:
    """The packet in a message, as views of its words.

    Raises:
        RuntimeError: The length is not that of the header.
    """
    step, lane, total, count, flags = words[FRAME_WORDS : FRAME_WORDS + _GRADIENT_HEAD].tolist()
    at, mask = FRAME_WORDS + _GRADIENT_HEAD, -(-total // 32)
    if words.shape[0] != at + mask + count * (GRADIENT_COLUMNS + flags):
        raise RuntimeError(f"gradients of step {step} lane {lane}: {words.shape[0]} words for {count} of {total}")
    bits = words[at : at + mask].numpy().view(np.uint8)
    rows = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    at += mask
    size = count * GRADIENT_COLUMNS
    gradients = words[at : at + size].view(torch.float32).view(count, GRADIENT_COLUMNS)
    norms = words[at + size :].view(torch.float32) if flags else None
    return GradientPacket(step, lane, total, torch.from_numpy(rows), gradients, norms)
