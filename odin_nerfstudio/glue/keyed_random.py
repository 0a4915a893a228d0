"""Randomness keyed by what it is for, never by rank, arrival or the history of a global generator.

Two runs that agree on (seed, step, lane) draw the same numbers, whatever the number of ranks and wherever they
were resumed.
"""

from __future__ import annotations

import hashlib
import random
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
def seeded_torch(seed: int, *key: int | str, device: torch.device | str = "cpu") -> Iterator[None]:
    """Runs a block of foreign code that draws from torch's global generators with keyed numbers.

    The global generators are put back afterwards, so that the block leaves no trace in them.
    """
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(seed, *key))
        yield


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch alike on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
