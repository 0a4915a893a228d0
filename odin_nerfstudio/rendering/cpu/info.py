"""The third result of `rasterization`: gsplat's dictionary of intermediate results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from odin_nerfstudio.rendering.cpu.layout import P_SPLAT, TILE
from odin_nerfstudio.rendering.cpu.records import Projected, Settings, Tiles


class Info(dict[str, Any]):
    """A dictionary whose entries may be computed when first asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: dict[str, Callable[[], Any]] = {}

    def defer(self, key: str, compute: Callable[[], Any]) -> None:
        """Add an entry whose value is `compute()`, called at most once."""
        self[key] = None
        self._pending[key] = compute

    def _resolve(self, key: str) -> None:
        compute = self._pending.pop(key, None)
        if compute is not None:
            super().__setitem__(key, compute())

    def __getitem__(self, key: str) -> Any:
        self._resolve(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._pending.pop(key, None)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def items(self) -> Any:
        for key in list(self._pending):
            self._resolve(key)
        return super().items()

    def values(self) -> Any:
        for key in list(self._pending):
            self._resolve(key)
        return super().values()


def defer_tile_entries(info: Info, cameras: list[Projected], tiles: list[Tiles], settings: Settings) -> None:
    """Add gsplat's tile entries. They list the pairs that the CPU rasterizer keeps, without those that cannot be seen:

    tiles_per_gauss [C, N] int32, flatten_ids [P] int32 (camera * N + row), isect_offsets [C, tiles y, tiles x] int32,
    isect_ids [P] int64 (camera, tile and depth bits, as gsplat packs them).
    """
    across, down = settings.tiles

    def tiles_per_gauss() -> torch.Tensor:
        counts = np.zeros((len(cameras), len(cameras[0].radii)), np.int32)
        for row, camera, listed in zip(counts, cameras, tiles):
            row[camera.rows] = listed.runs[:, 1] - listed.runs[:, 0]
        return torch.from_numpy(counts)

    def flatten_ids() -> torch.Tensor:
        parts = [
            camera.rows[listed.pairs[:, P_SPLAT]] + k * len(camera.radii)
            for k, (camera, listed) in enumerate(zip(cameras, tiles))
        ]
        return torch.from_numpy(np.concatenate(parts).astype(np.int32))

    def isect_offsets() -> torch.Tensor:
        offsets, before = [], 0
        for listed in tiles:
            offsets.append(listed.tile_start[:-1] + before)
            before += int(listed.tile_start[-1])
        return torch.from_numpy(np.stack(offsets).astype(np.int32).reshape(len(tiles), down, across))

    def isect_ids() -> torch.Tensor:
        bits = (across * down).bit_length()
        parts = []
        for k, (camera, listed) in enumerate(zip(cameras, tiles)):
            tile = np.repeat(np.arange(across * down), np.diff(listed.tile_start))
            depth = camera.depths[camera.rows[listed.pairs[:, P_SPLAT]]].view(np.int32).astype(np.int64)
            parts.append((k << (32 + bits)) | (tile << 32) | depth)
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    info["tile_width"], info["tile_height"], info["tile_size"] = across, down, TILE
    info.defer("tiles_per_gauss", tiles_per_gauss)
    info.defer("isect_ids", isect_ids)
    info.defer("flatten_ids", flatten_ids)
    info.defer("isect_offsets", isect_offsets)
