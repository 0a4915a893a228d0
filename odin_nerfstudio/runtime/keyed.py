"""Randomness keyed by what it is for, never by rank, arrival or the history of a global generator.

Runs that agree on (seed, step, lane) draw the same numbers, whatever the number of ranks and wherever they were
resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def keyed_randomness(seed: int, step: int, device: torch.device) -> Iterator[None]:
    """Seed torch's and numpy's global generators for a block, and put them back after it."""
    devices = (
        [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    )
    before = np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        key = derive_seed(seed, "structural", step)
        torch.manual_seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        try:
            yield
        finally:
            np.random.set_state(before)
