"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Adds up monotonic host time per phase (data, render, loss, backward, optimizer, structural).

    On CUDA, kernels run behind the host, so a phase shows when its work was issued, not when it ran.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block as part of the named phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Milliseconds per step of each phase since the last call, and starts anew."""
        steps = max(self.steps, 1)
        result = {name: 1e3 * seconds / steps for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self.steps = 0
        return result
