"""gsplat's default strategy as the runtime needs it."""

from __future__ import annotations

import dataclasses
from typing import Any

from gsplat.strategy import DefaultStrategy


class FedStrategy(DefaultStrategy):
    """gsplat's strategy, fed with statistics by the runtime, lane by lane, instead of by the last rendered view."""

    @classmethod
    def like(cls, strategy: DefaultStrategy) -> FedStrategy:
        """One with the settings of a stock strategy."""
        return cls(**{f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)})

    def _update_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: see :class:`odin_nerfstudio.runtime.statistics.DensificationStatistics`."""

    def acts_at(self, step: int) -> bool:
        """Whether the strategy changes primitives after a step (densify, prune or reset opacities)."""
        refines = step > self.refine_start_iter and step % self.refine_every == 0
        rested = step % self.reset_every >= self.pause_refine_after_reset
        return step < self.refine_stop_iter and ((refines and rested) or step % self.reset_every == 0)
