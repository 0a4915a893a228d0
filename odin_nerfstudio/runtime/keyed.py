"""Randomness keyed by (seed, step), so that every rank draws the same numbers without communicating."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mix(seed: int, step: int) -> int:
    """A well-spread 63-bit number for (seed, step) (SplitMix64's finalizer)."""
    z = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


@contextmanager
def keyed_randomness(seed: int, step: int, device: torch.device) -> Iterator[None]:
    """Seed torch's and numpy's global generators for a block, and put them back after it."""
    devices = (
        [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    )
    before = np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        key = mix(seed, step)
        torch.manual_seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        try:
            yield
        finally:
            np.random.set_state(before)
