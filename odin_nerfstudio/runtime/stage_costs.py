"""What the two stages of a view cost where different ranks run them (placement sharded)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Linear:
    """Seconds of a call on n rows: `call` + `row` * n."""

    call: float = 0.0
    row: float = 0.0

    def seconds(self, rows: float) -> float:
        """Of one call. [s]"""
        return self.call + self.row * rows

    def faster(self, speed: float, call_speed: float) -> Linear:
        """Where rows go `speed` times as fast, and calls `call_speed` times."""
        return Linear(self.call / call_speed, self.row / speed)

    @staticmethod
    def fit(rows: Sequence[float], seconds: Sequence[float]) -> Linear:
        """The line through measured times with the least relative error; neither part is negative."""
        n, t = np.asarray(rows, np.float64), np.asarray(seconds, np.float64)
        weight = 1 / np.maximum(t, 1e-9)
        columns = np.stack([np.ones_like(n), n], 1) * weight[:, None]
        call, row = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
        if call < 0:
            return Linear(0.0, float((n * weight).sum() / ((n * weight) ** 2).sum()))
        if row < 0:
            return Linear(float(weight.sum() / (weight**2).sum()), 0.0)
        return Linear(float(call), float(row))


_PARTS = ("project", "back", "merge", "split")
_BYTES = ("splat_bytes", "gradient_bytes", "norm_bytes")


@dataclass(frozen=True)
class StageCosts:
    """Times of the parts of a view, on the device that recorded.

    Attributes:
        project: Copy and projection of candidate rows at their owner, by their number.
        back: From splats' gradients to rows' gradients, packed, by the number of candidate rows.
        merge: Putting the owners' splats together at the view's rank, by the number of splats.
        split: Taking the splats' gradients apart, by the number of splats.
        pixels: Share of a view's compute time, as recorded in one piece, that its rank still has.
        splat_bytes: A splat that travels, with its number.
        gradient_bytes: Its gradient.
        norm_bytes: What goes with that where densification statistics are kept.
    """

    project: Linear = Linear()
    back: Linear = Linear()
    merge: Linear = Linear()
    split: Linear = Linear()
    pixels: float = 1.0
    splat_bytes: int = 48
    gradient_bytes: int = 40
    norm_bytes: int = 4

    def faster(self, speed: float, call_speed: float) -> StageCosts:
        """On other devices; see `Linear.faster`."""
        parts = {name: getattr(self, name).faster(speed, call_speed) for name in _PARTS}
        return replace(self, **parts)

    def as_dict(self) -> dict[str, float]:
        """Plain values, for a file."""
        out = {f"{name} {key}": value for name in _PARTS for key, value in vars(getattr(self, name)).items()}
        return out | {name: getattr(self, name) for name in ("pixels", *_BYTES)}

    @staticmethod
    def from_dict(values: dict[str, float]) -> StageCosts:
        """What `as_dict` gave."""
        found: dict[str, Any] = {name: Linear(values[f"{name} call"], values[f"{name} row"]) for name in _PARTS}
        found |= {name: int(values[name]) for name in _BYTES if name in values}  # older files have Gaussians only
        return StageCosts(**found, pixels=values["pixels"])
