"""The global generators of a process: seeded alike on every rank, saved and restored with checkpoints.

Training itself draws from generators keyed by (seed, step, lane); see :mod:`odin_nerfstudio.runtime.keyed`.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch alike on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> dict[str, Any]:
    """The global generators of Python, numpy and torch, as plain values and tensors."""
    kind, keys, position, has_gauss, cached = cast(tuple, np.random.get_state())
    return {
        "python": list(random.getstate()),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Takes back what :func:`generator_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
