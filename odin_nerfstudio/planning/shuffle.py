"""Keyed randomness that is the same on every machine and with every library version.

numpy does not promise that its generators' streams stay as they are, and a plan must not change with an upgrade of one
machine. Keys are therefore hashed by SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def keyed_bits(count: int, *key: int) -> np.ndarray:
    """``count`` pseudo-random 64-bit words that depend on the integers in ``key`` alone. (count,) uint64"""
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = _mix((state + int(part) * 0x9E3779B97F4A7C15 + 1) & _MASK)
    x = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keyed_permutation(count: int, *key: int) -> np.ndarray:
    """A permutation of 0..count-1 that depends on ``key`` alone. (count,) int64"""
    return np.argsort(keyed_bits(count, *key), kind="stable")
