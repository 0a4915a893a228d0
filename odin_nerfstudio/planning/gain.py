"""The expected gain of the modes over a barrier, as a report shows it. It is simulated: `simulation.expected`."""

from __future__ import annotations

from dataclasses import dataclass

ASSUMED_WAIT = 0.2
"""Share of time that barriers wait, unless measured: 15 to 30 % was seen on 2 to 8 ranks."""


@dataclass(frozen=True)
class Gain:
    """Expected speed relative to ``barrier``.

    Attributes:
        quality: Of quality-first.
        throughput: Of throughput-first.
        ceiling: If all wait were hidden.
        hidden_quality: Share of the barrier's wait that quality-first hides.
        hidden_throughput: Share that throughput-first hides.
        assumptions: What the figures rest on, one phrase each.
    """

    quality: float = 1.0
    throughput: float = 1.0
    ceiling: float = 1.0
    hidden_quality: float = 0.0
    hidden_throughput: float = 0.0
    assumptions: tuple[str, ...] = ("one rank waits for nobody",)
