"""Expected gain of the modes: a first estimate from predicted conflicts, before anything has been measured.

With barriers a rank waits a share w of its time for the others. A mode that hides a share h of that wait runs faster by

    gain = 1 / (1 - w h).

``quality`` hides the wait of a task that reads nothing written on another rank in the step before; ``throughput`` that
of a task whose overlap with those writes is small enough to be admitted. Both shares are taken from the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from odin_nerfstudio.planning.prediction import ADMISSIBLE_OVERLAP, Prediction

ASSUMED_WAIT = 0.2
"""Share of time that barriers wait, unless measured: 15 to 30 % was seen on 2 to 8 ranks."""
NEGLIGIBLE_OVERLAP = 0.01


@dataclass(frozen=True)
class Gain:
    """Expected speed relative to ``barrier``.

    Attributes:
        quality: Of quality-first.
        throughput: Of throughput-first.
        ceiling: If all wait were hidden.
        assumptions: What the figures rest on, one sentence each.
    """

    quality: float
    throughput: float
    ceiling: float
    assumptions: tuple[str, ...]


def expected_gain(prediction: Prediction, ranks: int, wait: float = ASSUMED_WAIT) -> Gain:
    """Estimate the gain of the modes over ``barrier``.

    Args:
        prediction: Predicted conflicts of the plan.
        ranks: Ranks that run it; one rank waits for nobody.
        wait: Share of time that barriers wait, in [0, 1).

    Raises:
        ValueError: ``wait`` is out of range.
    """
    if not 0.0 <= wait < 1.0:
        raise ValueError(f"wait must be a share in [0, 1), got {wait}")
    if ranks == 1:
        return Gain(1.0, 1.0, 1.0, ("one rank waits for nobody",))
    assumptions = (
        f"barriers wait {wait:.0%} of the time (measured shares were 15 to 30 %)",
        f"quality hides the wait of tasks that share at most {NEGLIGIBLE_OVERLAP:.0%} of what they read with the "
        f"last step's tasks of other ranks ({prediction.free:.0%} of tasks)",
        f"throughput hides the wait of tasks that share at most {ADMISSIBLE_OVERLAP:.0%} "
        f"({prediction.admissible:.0%} of tasks)",
        "updates older than one step have arrived, and observed points stand for primitives",
    )
    return Gain(
        quality=1.0 / (1.0 - wait * prediction.free),
        throughput=1.0 / (1.0 - wait * prediction.admissible),
        ceiling=1.0 / (1.0 - wait),
        assumptions=assumptions,
    )
