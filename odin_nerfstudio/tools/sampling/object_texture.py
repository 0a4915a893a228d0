"""Surface colours of the object scene: compiled scalar functions from a point to linear RGB albedo."""

from __future__ import annotations

import math

import numba

from odin_nerfstudio.tools.sampling.noise import fractal, fraction, hash01

_Colour = tuple[float, float, float]


@numba.njit(cache=True, nogil=True)
def _mix(a: _Colour, b: _Colour, share: float) -> _Colour:
    share = min(max(share, 0.0), 1.0)
    keep = 1.0 - share
    return (a[0] * keep + b[0] * share, a[1] * keep + b[1] * share, a[2] * keep + b[2] * share)


@numba.njit(cache=True, nogil=True)
def _scale(a: _Colour, factor: float) -> _Colour:
    factor = max(factor, 0.05)
    return (a[0] * factor, a[1] * factor, a[2] * factor)


@numba.njit(cache=True, nogil=True)
def paving(x: float, y: float, pixel: float) -> _Colour:
    """A courtyard: rings of setts around the pedestal, then flagstones with moss in the joints."""
    radius = math.hypot(x, y)
    grain = 1.0 + 0.9 * fractal(x, y, 1.0, 0.35, 5, pixel)
    moss = fractal(x, y, 7.0, 1.1, 4, pixel)
    if radius < 2.4:
        ring = math.floor(radius / 0.2)
        count = max(round(2 * math.pi * (ring + 0.5) * 0.2 / 0.24), 1.0)
        turn = (math.atan2(y, x) / (2 * math.pi) + 0.5) * count + 0.37 * ring
        sett = hash01(ring, math.floor(turn) % int(count), 1)
        joint = fraction(radius / 0.2) < 0.1 or fraction(turn) < 0.09
        colour = _mix((0.2, 0.19, 0.19), (0.42, 0.3, 0.22), sett if ring % 3 else 0.4 * sett)
    else:
        row = math.floor(y / 0.55)
        offset = 0.5 * (row % 2) + 0.3 * hash01(row, 9, 9)
        column = math.floor(x / 0.8 + offset)
        sett = hash01(row, column, 2)
        joint = fraction(y / 0.55) < 0.05 or fraction(x / 0.8 + offset) < 0.035
        colour = _mix((0.2, 0.18, 0.155), (0.37, 0.33, 0.275), sett)
    if joint or moss > 0.36:
        colour = _mix((0.07, 0.065, 0.05), (0.09, 0.14, 0.035), 0.5 + 2.0 * moss)
    return _scale(colour, grain)


@numba.njit(cache=True, nogil=True)
def wall(x: float, y: float, z: float, row: tuple, pixel: float) -> _Colour:
    """A round wall of bricks, plaster that has come off in places, and painted posters."""
    turn = math.atan2(y, x) * math.hypot(x, y)
    course = math.floor(z / 0.16)
    brick_at = turn / 0.5 + 0.5 * (course % 2)
    brick = hash01(course, math.floor(brick_at), 6)
    joint = fraction(z / 0.16) < 0.12 or fraction(brick_at) < 0.05
    colour = (0.4, 0.37, 0.33) if joint else _mix((0.26, 0.09, 0.06), (0.44, 0.2, 0.12), brick)
    plaster = fractal(x, y, z, 2.6, 5, pixel)
    if plaster > 0.06:
        colour = _scale((0.55, 0.5, 0.4), 1.0 + 0.5 * fractal(x, y, z, 0.9, 4, pixel))
    poster_at = turn / 2.7
    poster, place = math.floor(poster_at), fraction(poster_at)
    pick = hash01(poster, 3, 3)
    if pick > 0.35 and 0.2 < place < 0.75 and 0.8 + 0.5 * pick < z < 2.3 + 0.5 * pick:
        u, v = (place - 0.2) / 0.55, (z - 0.8 - 0.5 * pick) / 1.5
        ink = hash01(int(u * 5), int(v * 7), poster)
        colour = _mix((0.62, 0.56, 0.42), (0.7 * pick, 0.15 + 0.3 * ink, 0.75 - 0.7 * pick), 1.4 * (ink > 0.45))
        if min(min(u, 1 - u) * 1.5, min(v, 1 - v) * 1.5) < 0.07:
            colour = (0.6, 0.57, 0.5)
    return _scale(colour, 1.0 + 0.5 * fractal(x, y, z, 0.4, 4, pixel))


@numba.njit(cache=True, nogil=True)
def stone(x: float, y: float, z: float, pixel: float) -> _Colour:
    """Veined marble with a meander band."""
    vein = abs(fractal(x, y, z, 0.9, 6, pixel))
    colour = _mix((0.14, 0.13, 0.14), (0.5, 0.46, 0.41), 0.1 + 4.5 * vein)
    if 0.42 < z < 0.66:
        turn = (math.atan2(y, x) / (2 * math.pi) + 0.5) * 20
        u, v = fraction(turn), (z - 0.42) / 0.24
        key = v < 0.14 or v > 0.86 or (u < 0.16) or (0.16 <= u < 0.7 and 0.62 < v < 0.76)
        key = key or (0.55 < u < 0.7 and 0.3 < v < 0.76) or (0.36 < u < 0.7 and 0.3 < v < 0.42)
        if key:
            colour = (0.32, 0.06, 0.05)
    return _scale(colour, 1.0 + 0.4 * fractal(x, y, z, 0.15, 4, pixel))


@numba.njit(cache=True, nogil=True)
def rock(x: float, y: float, z: float, pixel: float) -> _Colour:
    """Granite with lichen."""
    speck = fractal(x, y, z, 0.05, 3, pixel)
    lichen = fractal(x, y, z, 0.33, 5, pixel)
    colour = _mix((0.13, 0.12, 0.12), (0.38, 0.34, 0.31), 0.5 + 1.1 * speck + 0.5 * lichen)
    if lichen > 0.2:
        colour = (0.42, 0.4, 0.12) if fractal(x, z, y, 0.8, 2, pixel) > 0 else (0.36, 0.42, 0.34)
    return _scale(colour, 1.0 + 0.6 * fractal(x, y, z, 0.12, 3, pixel))


@numba.njit(cache=True, nogil=True)
def mosaic(x: float, y: float, z: float, pixel: float) -> _Colour:
    """Small chips of glass: the nearest of scattered seeds gives each chip's colour, the gap between two the grout."""
    size = 0.085
    u, v, w = x / size, y / size, z / size
    i, j, k = math.floor(u), math.floor(v), math.floor(w)
    first, second, owner = 9.0, 9.0, 0.0
    for a in range(i - 1, i + 2):
        for b in range(j - 1, j + 2):
            for c in range(k - 1, k + 2):
                dice = hash01(a, b, c)
                dx = a + 0.15 + 0.7 * dice - u
                dy = b + 0.15 + 0.7 * fraction(dice * 61) - v
                dz = c + 0.15 + 0.7 * fraction(dice * 3721) - w
                distance = math.sqrt(dx * dx + dy * dy + dz * dz)
                if distance < first:
                    first, second, owner = distance, first, dice
                elif distance < second:
                    second = distance
    if second - first < 0.09:
        return (0.3, 0.28, 0.25)
    zone = fractal(x, y, z, 0.9, 2, pixel) + 0.25 * (owner - 0.5)
    if zone > 0.16:
        colour = _mix((0.72, 0.4, 0.03), (0.75, 0.62, 0.2), fraction(owner * 13))
    elif zone > -0.02:
        colour = _mix((0.02, 0.12, 0.34), (0.04, 0.35, 0.5), fraction(owner * 13))
    elif zone > -0.2:
        colour = _mix((0.5, 0.05, 0.04), (0.6, 0.2, 0.1), fraction(owner * 13))
    else:
        colour = _mix((0.03, 0.25, 0.13), (0.5, 0.52, 0.45), fraction(owner * 13))
    return _scale(colour, 1.0 + 0.35 * fractal(x, y, z, 0.05, 2, pixel))


@numba.njit(cache=True, nogil=True)
def glaze(x: float, y: float, z: float, pixel: float) -> _Colour:
    """Reactive glaze: flowing bands of blue, ochre and white."""
    warp = fractal(x, y, z, 0.6, 5, pixel)
    band = fraction(3.0 * z + 2.4 * warp)
    colour = _mix((0.03, 0.1, 0.25), (0.5, 0.55, 0.5), 2.2 * abs(band - 0.5))
    if band > 0.86:
        colour = (0.5, 0.24, 0.05)
    return _scale(colour, 1.0 + 0.9 * fractal(x, y, z, 0.12, 4, pixel))


@numba.njit(cache=True, nogil=True)
def wood(x: float, y: float, z: float, facing_up: bool, row: tuple, pixel: float) -> _Colour:
    """A crate of five boards with grain; on top the boards follow one side of it.

    Row: ``height`` is that of a board, ``green`` the height of the floor, ``blue`` the turn of the crate.
    """
    size, turn = row[4], row[8]
    dx, dy = x - (row[0] + row[2]) / 2, y - (row[1] + row[3]) / 2
    u, v = math.cos(turn) * dx + math.sin(turn) * dy, math.cos(turn) * dy - math.sin(turn) * dx
    across = u + 2.5 * size if facing_up else z - row[7]
    board = math.floor(across / size)
    fibre = 0.08 * fractal(x, y, z, 0.25, 3, pixel) + across
    grain = fractal(0.6 * v, 0.6 * (z if facing_up else u), 8.0 * fibre + 31.0 * row[9], 0.25, 5, pixel)
    tone = 0.5 + 0.9 * grain + 0.5 * (hash01(board, int(row[9] * 999), 1) - 0.5)
    colour = _mix((0.2, 0.1, 0.04), (0.5, 0.31, 0.15), tone)
    if fraction(across / size) < 0.07:
        colour = (0.05, 0.03, 0.02)
    return _scale(colour, 1.3) if board == 0 or board == 4 else colour


@numba.njit(cache=True, nogil=True)
def ball(x: float, y: float, z: float, row: tuple, pixel: float) -> _Colour:
    """A leather ball: gores of two colours, seams, scuffs."""
    cx, cy, radius = (row[0] + row[2]) / 2, (row[1] + row[3]) / 2, (row[2] - row[0]) / 2
    dx, dy, dz = (x - cx) / radius, (y - cy) / radius, (z - radius) / radius
    turn = (math.atan2(dz, dx) / (2 * math.pi) + 0.5) * 8
    scuff = fractal(x, y, z, 0.22, 5, pixel)
    if fraction(turn) < 0.05 or abs(dy) > 0.92:
        return _scale((0.1, 0.08, 0.07), 1.0 + scuff)
    own = (row[6], row[7], row[8])
    colour = own if math.floor(turn) % 2 == 0 else (0.6, 0.55, 0.45)
    return _mix(_scale(colour, 1.0 + 0.6 * scuff), (0.2, 0.17, 0.14), 2.5 * (scuff - 0.3))


@numba.njit(cache=True, nogil=True)
def pot(x: float, y: float, z: float, row: tuple, pixel: float) -> _Colour:
    """A terracotta pot with lime marks and two incised lines."""
    lime = fractal(x, y, z, 0.4, 5, pixel)
    colour = _mix((0.38, 0.15, 0.08), (0.6, 0.5, 0.42), 0.25 + 1.2 * lime)
    share = z / row[4]
    if abs(share - 0.45) < 0.025 or abs(share - 0.6) < 0.025:
        colour = _scale(colour, 0.45)
    return _scale(colour, 1.0 + 0.6 * fractal(x, y, z, 0.06, 3, pixel))
