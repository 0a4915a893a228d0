"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine; the same on every rank."""

    lookahead: int = 2
    """A rank starts a task at most this many steps after the oldest incomplete step; bounds memory."""
    seed: int = 42
    stall: float = 120.0
    """Longest wait for a peer that is not busy or paused. [s]"""
    debug: bool = False
    """Check hazards at every hook, and all ranks' states at structural steps."""
    trace: bool = False
    """Keep spans for a trace file."""
    reduce: Literal["auto", "always", "never"] = "auto"
    """Sum rows at their owners instead of sending all to all: where it saves bytes (from 3 ranks on), always or
    never."""

    linger: bool = True
    """Wait for whole steps where that turns out to be cheaper than publishing in parts."""

    def __post_init__(self) -> None:
        if self.lookahead < 0 or self.stall <= 0 or self.reduce not in ("auto", "always", "never"):
            raise ValueError(f"lookahead, stall, reduce: {self.lookahead}, {self.stall}, {self.reduce} make no sense")
