"""Options of a model that Odin cannot honour, found before anything starts."""

from __future__ import annotations

from typing import Any

POSITIVE = (
    *("resolution_schedule", "sh_degree_interval", "refine_every", "reset_alpha_every"),
    *("max_gs_num", "num_random"),
)
"""Intervals and counts, which divide or size things."""

NOT_NEGATIVE = ("num_downscales", "warmup_length", "stop_split_at", "stop_screen_size_at", "noise_lr")


def refusal(model: Any) -> str | None:
    """Why a model config cannot be trained: the option, what is wrong, what to do; ``None``: it can."""
    for name in POSITIVE:
        if hasattr(model, name) and getattr(model, name) < 1:
            return f"{flag(name)} is {getattr(model, name)}; it must be at least 1"
    for name in NOT_NEGATIVE:
        if hasattr(model, name) and getattr(model, name) < 0:
            return f"{flag(name)} is {getattr(model, name)}; it must not be negative"
    degree = getattr(model, "sh_degree", 0)
    if not 0 <= degree <= 3:
        return f"{flag('sh_degree')} is {degree}; colours have spherical harmonics of degree 0 to 3"
    cameras = getattr(model, "camera_optimizer", None)
    if cameras is not None and cameras.mode not in ("off", "SO3xR3"):
        return (
            f"{flag('camera_optimizer')}.mode {cameras.mode}: its rotations also move the camera, how far is not known"
            " from the learning rate, and so Odin could not know what a view sees; use SO3xR3"
        )
    if getattr(model, "use_bilateral_grid", False) and min(model.grid_shape) < 2:
        return f"{flag('grid_shape')} is {model.grid_shape}; its total variation needs at least 2 cells each way"
    return None


def flag(name: str) -> str:
    """The option as it is typed."""
    return f"--pipeline.model.{name.replace('_', '-')}"
