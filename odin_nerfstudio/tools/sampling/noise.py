"""Hashes and band-limited value noise, as compiled scalar functions.

Everything is a pure function of coordinates and integers, so that an image does not depend on the order of its pixels
or on the number of threads.
"""

from __future__ import annotations

import math

import numba

_MASK = 0xFFFFFFFF


@numba.njit(cache=True, nogil=True)
def hash01(a: int, b: int, c: int) -> float:
    """A number in [0, 1) from three integers (the mixing steps of MurmurHash3's 32-bit finalizer)."""
    h = ((a & _MASK) * 0x9E3779B1 + (b & _MASK) * 0x85EBCA77 + (c & _MASK) * 0xC2B2AE3D) & _MASK
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _MASK
    h ^= h >> 16
    return h / 4294967296.0


@numba.njit(cache=True, nogil=True)
def value_noise(x: float, y: float, z: float) -> float:
    """Smooth noise in [0, 1] with a wavelength of about 2: random values on the integer lattice, interpolated."""
    fx, fy, fz = math.floor(x), math.floor(y), math.floor(z)
    i, j, k = int(fx), int(fy), int(fz)
    u, v, w = x - fx, y - fy, z - fz
    u = u * u * (3 - 2 * u)
    v = v * v * (3 - 2 * v)
    w = w * w * (3 - 2 * w)
    near = (hash01(i, j, k) * (1 - u) + hash01(i + 1, j, k) * u) * (1 - v) + (
        hash01(i, j + 1, k) * (1 - u) + hash01(i + 1, j + 1, k) * u
    ) * v
    far = (hash01(i, j, k + 1) * (1 - u) + hash01(i + 1, j, k + 1) * u) * (1 - v) + (
        hash01(i, j + 1, k + 1) * (1 - u) + hash01(i + 1, j + 1, k + 1) * u
    ) * v
    return near * (1 - w) + far * w


@numba.njit(cache=True, nogil=True)
def fractal(x: float, y: float, z: float, scale: float, octaves: int, pixel: float) -> float:
    """Sum of octaves of noise around 0 (about -1 to 1), without those too fine for the pixel.

    Args:
        x, y, z: Position.
        scale: Lattice spacing of the coarsest octave, in the unit of the position.
        octaves: How many octaves, each twice as fine and 0.6 times as strong.
        pixel: Extent of a pixel on the surface, same unit: octaves fade out before they could alias.
    """
    total, strength = 0.0, 1.0
    for octave in range(octaves):
        fade = (scale / pixel - 0.75) / 0.75
        if fade <= 0:
            break
        value = value_noise(x / scale, y / scale, z / scale + 17.3 * octave) - 0.5
        total += strength * min(fade, 1.0) * value
        scale *= 0.5
        strength *= 0.6
    return total


@numba.njit(cache=True, nogil=True)
def fraction(x: float) -> float:
    """The part of ``x`` after the point, in [0, 1)."""
    return x - math.floor(x)
