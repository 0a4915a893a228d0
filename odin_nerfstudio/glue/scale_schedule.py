"""Keeps training the same when a step renders several views.

splatfacto's settings count steps of one view. With ``L`` views per step the same number of views is L times fewer
steps, so every interval that counts steps is divided by L. The mean gradient of L views has a variance L times
smaller; the square-root rule (learning rate times sqrt(L), moments' decay b to b**L, so that they average over the
same number of views) keeps the noise of Adam's path the same: see Malladi et al., "On the SDEs and Scaling Rules for
Adaptive Gradient Algorithms" (2022), and "On Scaling Up 3D Gaussian Splatting Training" (2024) for splats.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

MODEL_INTERVALS = (
    "warmup_length",
    "refine_every",
    "resolution_schedule",
    "sh_degree_interval",
    "stop_screen_size_at",
    "stop_split_at",
    "normal_start_iter",
    "distortion_start_iter",
)
"""Fields of the model config that count steps (opacity resets count refinements, so they follow)."""

TRAINER_INTERVALS = (
    "max_num_iterations",
    "steps_per_save",
    "steps_per_eval_batch",
    "steps_per_eval_image",
    "steps_per_eval_all_images",
)

SCHEDULER_INTERVALS = ("max_steps", "warmup_steps", "warm_up_end")


def divided(steps: int, views_per_step: float) -> int:
    """``steps`` of one view as steps of several: rounded, at least 1 (0 stays 0)."""
    return max(1, round(steps / views_per_step)) if steps > 0 else steps


def scale_schedule(config: Any, views_per_step: float) -> dict[str, tuple[Any, Any]]:
    """Adapts a trainer config, in place, to several views per step.

    Args:
        config: an ``OdinTrainerConfig``.
        views_per_step: the number of lanes L (a ratio, where the config was already adapted to some).

    Returns:
        Old and new value of everything that changed, by name, for the log.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    if views_per_step == 1:
        return changes

    def change(holder: Any, name: str, label: str, value: Any) -> None:
        old = getattr(holder, name)
        if value != old:
            changes[label] = (old, value)
            setattr(holder, name, value)

    for name in TRAINER_INTERVALS:
        change(config, name, name, divided(getattr(config, name), views_per_step))
    for name in MODEL_INTERVALS:
        if hasattr(config.pipeline.model, name):
            change(config.pipeline.model, name, name, divided(getattr(config.pipeline.model, name), views_per_step))

    optimizers = dict(config.optimizers)
    for group, settings in optimizers.items():
        optimizer = dataclasses.replace(settings["optimizer"])
        change(optimizer, "lr", f"{group}.lr", optimizer.lr * math.sqrt(views_per_step))
        if hasattr(optimizer, "betas"):
            change(optimizer, "betas", f"{group}.betas", tuple(b**views_per_step for b in optimizer.betas))
        scheduler = settings["scheduler"]
        if scheduler is not None:
            scheduler = dataclasses.replace(scheduler)
            for name in SCHEDULER_INTERVALS:
                if hasattr(scheduler, name):
                    value = divided(getattr(scheduler, name), views_per_step)
                    change(scheduler, name, f"{group}.{name}", value)
            for name in ("lr_final", "lr_pre_warmup"):
                if getattr(scheduler, name, None):
                    value = getattr(scheduler, name) * math.sqrt(views_per_step)
                    change(scheduler, name, f"{group}.{name}", value)
        optimizers[group] = {**settings, "optimizer": optimizer, "scheduler": scheduler}
    config.optimizers = optimizers
    return changes
