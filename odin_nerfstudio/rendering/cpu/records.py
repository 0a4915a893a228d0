"""What the stages of one call hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from odin_nerfstudio.rendering.cpu.buffers import Array
from odin_nerfstudio.rendering.cpu.layout import SPLAT, TILE


@dataclass(frozen=True)
class Settings:
    """What stays the same for all cameras of a call."""

    width: int
    height: int
    sh_degree: int  # -1: colours are final values
    color_channels: int  # channels taken from the colours (0 where only depth is rendered)
    depth_channel: int  # channel that carries the depth, or -1
    antialiased: bool

    @property
    def channels(self) -> int:
        return self.color_channels + (self.depth_channel >= 0)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along x and y."""
        return (self.width + TILE - 1) // TILE, (self.height + TILE - 1) // TILE


@dataclass
class Primitives:
    """Contiguous float32 arrays: means (N, 3), quats (N, 4), scales (N, 3), opacities (N,), colors (N, K, 3 or D)."""

    means: Array
    quats: Array
    scales: Array
    opacities: Array
    colors: Array


@dataclass
class Projected:
    """One camera's projection of all rows, and the records of the visible ones."""

    radii: Array  # (N,) int32
    means2d: Array  # (N, 2)
    depths: Array  # (N,)
    conics: Array  # (N, 3)
    opacities: Array  # (N,), compensated
    rows: Array = field(default_factory=lambda: np.empty(0, np.int64))  # (V,) visible rows, ascending
    splats: Array = field(default_factory=lambda: np.empty((0, SPLAT), np.float32))  # (V, 16)
    tile_bound: Array = field(default_factory=lambda: np.empty(0, np.int32))  # (V,)


@dataclass
class Tiles:
    """Pairs of splats and tiles, listed per tile front to back."""

    tile_start: Array  # (T + 1,) int64
    block_start: Array  # (T + 1,) int64
    pairs: Array  # (P, 4) int32, see `layout`
    runs: Array  # (V, 2) int32: each splat's slots


@dataclass
class Blended:
    """What blending leaves for the backward pass."""

    transmittance: Array  # (T, 256)
    processed: Array  # (T,) int64
    lanes: Array  # (B,) uint16
