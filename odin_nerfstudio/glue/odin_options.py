"""The options under ``--pipeline.odin``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class OdinOptions:
    """How Odin orders views."""

    order: Literal["rlg", "random"] = "rlg"
    """Order of the views. "rlg": by the Relative Locality Graph, so that views rendered at the same time on
    different devices share little; "random": shuffled, the baseline. One device sees shuffled views either way."""
    seed: int | None = None
    """Seed of view order, backgrounds and densification. Default: the run's --machine.seed."""
