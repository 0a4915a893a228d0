"""Randomness keyed by what it is for, never by rank, arrival or the history of a global generator.

Two runs that agree on (seed, step, lane) draw the same numbers, whatever the number of ranks and wherever they
were resumed.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, cast

import numpy as np
import torch


def derive_seed(seed: int, *key: int | str) -> int:
    """A 63-bit seed for one purpose.

    Args:
        seed: the run's seed.
        key: what the numbers are for, for example ``("background", step, lane)``.

    Returns:
        A non-negative integer that depends on all arguments and on nothing else (SHA-256, so that neighbouring
        keys give unrelated streams).
    """
    text = "/".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """A CPU generator for one purpose; see :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, *key))


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
