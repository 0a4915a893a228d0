"""Whether a task waits a little for the whole of the steps before it, instead of having them published in parts.

Publishing a step in parts lets tasks start early, but costs more than publishing it whole: candidate sets of the tasks
that are still to contribute, messages in two pieces, more passes over the primitives. Where the rest of a step
usually arrives sooner than that takes, parts do not pay. Both are measured while training, as running means, and the
ranks decide each for itself: the bits are the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass

_RATE = 0.1
"""Weight of a new measurement in a running mean."""


@dataclass
class Patience:
    """Running means of what publishing takes and of how long the rest of a step takes to arrive. Seconds."""

    wanted: bool = True
    """Whether to wait at all."""
    whole: float | None = None
    """Publishing a step whole."""
    parts: float | None = None
    """Publishing a step in parts, with what the gates of its readers take for it."""
    rest: float = 0.0
    """From a task's gate to the arrival of the last contribution to the steps before."""

    def published(self, seconds: float, in_parts: bool) -> None:
        """A step was published."""
        if in_parts:
            self.parts = _mean(self.parts, seconds)
        else:
            self.whole = _mean(self.whole, seconds)

    def arrived(self, seconds: float) -> None:
        """The rest of the steps before a task came that long after its gate; 0: it had come before."""
        self.rest = _mean(self.rest, seconds)

    @property
    def price(self) -> float:
        """What publishing in parts takes more; nothing as long as it is not known."""
        if self.parts is None:
            return 0.0
        whole = 0.5 * self.parts if self.whole is None else self.whole
        return max(0.0, self.parts - whole)

    @property
    def budget(self) -> float:
        """How long to wait for the rest of the steps before, then to go on in parts: the price, or not at all where the
        rest usually takes longer than half of it. So a wrong guess costs no more than the price once more."""
        return self.price if self.wanted and self.rest < 0.5 * self.price else 0.0


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _RATE * (value - mean)
