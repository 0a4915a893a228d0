"""Optimizer configs."""

from __future__ import annotations

from dataclasses import dataclass, field

from nerfstudio.engine.optimizers import AdamOptimizerConfig

from odin_nerfstudio.runtime.adam import OdinAdam


@dataclass
class OdinAdamConfig(AdamOptimizerConfig):
    """Adam with torch's state and results; its step is fused on the CPU."""

    _target: type = field(default_factory=lambda: OdinAdam)
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments per step; with several views per step they are raised to that power."""
