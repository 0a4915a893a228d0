"""A box that a picture is cropped to, as owners are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Crop:
    """An oriented box: primitives whose means lie outside are left out."""

    rotation: Tensor
    """Box to world. [3, 3]."""
    center: Tensor
    """[3]."""
    size: Tensor
    """Lengths of the edges. [3]."""

    def inside(self, points: Tensor) -> Tensor:
        """Which points lie within. points: [n, 3], on any device. [n] bool."""
        rotation, center, size = (part.to(points.device) for part in (self.rotation, self.center, self.size))
        local = (points - center) @ rotation
        return (local.abs() < size / 2).all(1)

    def floats(self) -> list[float]:
        """15 values that `of` understands."""
        return torch.cat([part.flatten() for part in (self.rotation, self.center, self.size)]).tolist()

    @staticmethod
    def of(values: Sequence[float]) -> Crop:
        """From the 15 values of `floats`."""
        numbers = torch.tensor(values, dtype=torch.float32)
        return Crop(numbers[:9].view(3, 3), numbers[9:12], numbers[12:])
