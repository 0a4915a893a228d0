"""Surface colours of the city: compiled scalar functions from a point to linear RGB albedo."""

from __future__ import annotations

import math

import numba

from odin_nerfstudio.tools.sampling.materials import BLOCK_PERIOD, STREET_WIDTH
from odin_nerfstudio.tools.sampling.noise import fractal, fraction, hash01

_Colour = tuple[float, float, float]


@numba.njit(cache=True, nogil=True)
def _mix(a: _Colour, b: _Colour, share: float) -> _Colour:
    share = min(max(share, 0.0), 1.0)
    keep = 1.0 - share
    return (a[0] * keep + b[0] * share, a[1] * keep + b[1] * share, a[2] * keep + b[2] * share)


@numba.njit(cache=True, nogil=True)
def _scale(a: _Colour, factor: float) -> _Colour:
    return (a[0] * factor, a[1] * factor, a[2] * factor)


@numba.njit(cache=True, nogil=True)
def grass(x: float, y: float, pixel: float) -> _Colour:
    """Lawn with dry patches."""
    patch = fractal(x, y, 3.1, 14.0, 3, pixel)
    blade = fractal(x, y, 8.7, 1.6, 4, pixel)
    colour = _mix((0.075, 0.15, 0.035), (0.23, 0.22, 0.08), 0.35 + 1.1 * patch)
    return _scale(colour, 1.0 + 1.3 * blade)


@numba.njit(cache=True, nogil=True)
def field(x: float, y: float, pixel: float) -> _Colour:
    """Farmland around the city: parcels of different crops with furrows."""
    warp = 6.0 * fractal(x, y, 1.0, 60.0, 2, pixel)
    u, v = (x + warp) / 74.0, (y - warp) / 46.0
    crop = hash01(math.floor(u), math.floor(v), 5)
    furrow = math.sin((x if crop > 0.5 else y) * 2.1) * (1.0 if pixel < 1.0 else 1.0 / pixel**2)
    colour = _mix((0.11, 0.17, 0.05), (0.34, 0.28, 0.13), crop)
    edge = min(min(fraction(u), 1 - fraction(u)) * 74.0, min(fraction(v), 1 - fraction(v)) * 46.0)
    if edge < 1.3:
        colour = (0.08, 0.11, 0.04)
    return _scale(colour, 1.0 + 0.12 * furrow + 0.8 * fractal(x, y, 2.0, 5.0, 4, pixel))


@numba.njit(cache=True, nogil=True)
def street(x: float, y: float, pixel: float) -> _Colour:
    """Asphalt with lane markings, crossings, patches and cracks, in both directions of the grid."""
    u, v = x - BLOCK_PERIOD * math.floor(x / BLOCK_PERIOD), y - BLOCK_PERIOD * math.floor(y / BLOCK_PERIOD)
    tone = 0.1 * (1.0 + 0.35 * fractal(x, y, 0.5, 9.0, 2, pixel) + 0.75 * fractal(x, y, 4.5, 1.2, 4, pixel))
    patch = hash01(math.floor(x / 5.0), math.floor(y / 7.0), 11)
    if patch > 0.9:
        tone *= 0.62
    crack = abs(fractal(x, y, 9.0, 11.0, 4, pixel))
    if crack < 0.008:
        tone *= 0.7
    colour = (tone, tone, tone * 1.06)
    along_y, along_x = u < STREET_WIDTH, v < STREET_WIDTH
    if along_x and along_y:
        return colour
    across, along = (u, v) if along_y else (v, u)
    worn = 0.62 + 0.9 * fractal(x, y, 2.5, 1.2, 3, pixel)
    white = (0.7 * worn, 0.7 * worn, 0.66 * worn)
    from_crossing = min(along - STREET_WIDTH, BLOCK_PERIOD - along)
    if from_crossing < 3.6:
        if from_crossing > 0.6 and 1.0 < across < STREET_WIDTH - 1.0 and fraction(across / 1.7) < 0.5:
            return white
        return colour
    if from_crossing < 5.4:
        mine = across > STREET_WIDTH / 2 if along - STREET_WIDTH < 20 else across < STREET_WIDTH / 2
        if from_crossing > 4.7 and mine and 1.0 < across < STREET_WIDTH - 1.0:
            return white
        return colour
    centre = abs(across - STREET_WIDTH / 2)
    if 0.14 < centre < 0.42:
        return (0.66 * worn, 0.5 * worn, 0.1 * worn)
    if abs(centre - 4.6) < 0.16 and fraction(along / 5.6) < 0.55:
        return white
    return colour


@numba.njit(cache=True, nogil=True)
def block(x: float, y: float, row: tuple, pixel: float) -> _Colour:
    """Ground of a block: pavement slabs along the kerb, then yards of concrete, gravel or lawn."""
    edge = min(min(x - row[0], row[2] - x), min(y - row[1], row[3] - y))
    if edge < 0.35:
        return _scale((0.42, 0.41, 0.39), 1.0 + 0.6 * fractal(x, y, 1.0, 1.0, 3, pixel))
    if edge < 3.4:
        slab = hash01(math.floor(x / 1.5), math.floor(y / 1.5), 3)
        seam = 0.86 if fraction(x / 1.5) < 0.08 or fraction(y / 1.5) < 0.08 else 1.0
        stain = fractal(x, y, 6.0, 4.0, 4, pixel)
        return _scale((0.33, 0.31, 0.285), seam * (0.78 + 0.34 * slab) * (1.0 + 0.7 * stain))
    kind = hash01(math.floor(x / 9.0), math.floor(y / 12.0), int(row[9] * 1000))
    if kind < 0.4:
        return grass(x, y, pixel)
    base = (0.27, 0.25, 0.22) if kind < 0.75 else (0.3, 0.2, 0.15)
    return _scale(base, 1.0 + 1.0 * fractal(x, y, 2.0, 3.0, 5, pixel))


@numba.njit(cache=True, nogil=True)
def park(x: float, y: float, row: tuple, pixel: float) -> _Colour:
    """A lawn with a kerb path, two crossing paths, flower beds and a round plaza."""
    edge = min(min(x - row[0], row[2] - x), min(y - row[1], row[3] - y))
    dx, dy = x - (row[0] + row[2]) / 2, y - (row[1] + row[3]) / 2
    wobble = 2.5 * fractal(x, y, row[9] * 50.0, 18.0, 2, pixel)
    radius = math.hypot(dx, dy)
    path = edge < 2.6 or abs(dx - dy + wobble) < 1.9 or abs(dx + dy - wobble) < 1.9
    if radius < 7.5 or path:
        if radius < 3.2:
            ripple = fractal(x, y, 1.0, 1.1, 3, pixel)
            return _scale((0.05, 0.16, 0.2), 1.0 + 1.2 * ripple)
        ring = math.floor(radius / 1.1)
        sector = math.floor((math.atan2(dy, dx) + 3.2) * (ring + 1) * 0.9)
        tile = hash01(ring, sector, 8) if radius < 7.5 else hash01(math.floor(x * 2), math.floor(y * 2), 4)
        return _scale((0.42, 0.33, 0.24), (0.7 + 0.5 * tile) * (1.0 + 0.5 * fractal(x, y, 5.0, 1.5, 3, pixel)))
    bed = fractal(x, y, 30.0 * row[9], 9.0, 2, pixel)
    if bed > 0.3:
        flower = hash01(math.floor(x * 1.7), math.floor(y * 1.7), 21)
        if flower > 0.55:
            return (0.55, 0.12, 0.16) if flower > 0.78 else (0.6, 0.5, 0.12)
    return grass(x, y, pixel)


@numba.njit(cache=True, nogil=True)
def facade(x: float, y: float, z: float, along_y: bool, row: tuple, pixel: float) -> _Colour:
    """A wall with rows of windows in one of five styles; shop fronts at street level."""
    style, salt = int(row[5]), int(row[9] * 100000)
    start, length = (row[1], row[3] - row[1]) if along_y else (row[0], row[2] - row[0])
    u = (y if along_y else x) - start
    floor_height = 3.1 + 0.7 * hash01(salt, 1, 0)
    pitch = length / max(math.floor(length / (2.1 + 1.6 * hash01(salt, 2, 0))), 1.0)
    column, level = math.floor(u / pitch), math.floor(z / floor_height)
    cu, cv = fraction(u / pitch), fraction(z / floor_height)
    side = (1 if along_y else 0) + (2 if along_y and x > (row[0] + row[2]) / 2 else 0)
    dice = hash01(column + 97 * side, level, salt)
    stain = fractal(x, y, z, 5.0, 5, pixel)
    wall = _scale((row[6], row[7], row[8]), 1.0 + 0.75 * stain)
    if z > row[4] - 0.6:
        return _scale(wall, 1.25)
    if level == 0:
        if 0.08 < cu < 0.92 and 0.12 < cv < 0.62:
            return _mix((0.03, 0.035, 0.04), (0.5, 0.4, 0.25), 0.8 * dice * hash01(column, int(cu * 5), salt))
        if 0.62 <= cv < 0.9 and hash01(salt, 3, 0) > 0.35:
            sign = hash01(column // 2, 4, salt)
            return _scale(_mix((0.5, 0.08, 0.07), (0.08, 0.25, 0.42), sign), 0.7 + 0.6 * (cu > 0.5))
        return _scale(wall, 0.8)
    left, low = (0.22, 0.28) if style < 3 else ((0.05, 0.12) if style == 3 else (0.02, 0.36))
    high = 0.86 if style < 3 else 0.93
    if left < cu < 1 - left and low < cv < high:
        rim_u, rim_v = min(cu - left, 1 - left - cu) * pitch, min(cv - low, high - cv) * floor_height
        if style < 3 and min(rim_u, rim_v) < 0.14:
            return (0.55, 0.53, 0.5)
        sky = (0.1, 0.16, 0.23)
        pane = _mix((0.018, 0.024, 0.03), sky, 0.35 + 0.75 * (cv - low) + 0.5 * (dice - 0.5))
        if dice > 0.72 and cv > low + (high - low) * fraction(dice * 37):
            return _mix((0.6, 0.55, 0.46), (0.36, 0.2, 0.14), fraction(dice * 91))
        return pane
    if style == 0:
        course = hash01(math.floor(u / 0.5), math.floor(z / 0.25), salt)
        return _scale(wall, 0.72 + 0.56 * course)
    if style == 1 and cv < 0.09:
        return _scale(wall, 1.4)
    if style == 4 and cv < 0.3:
        return _scale(wall, 0.85 + 0.3 * hash01(column, 1, salt))
    return wall


@numba.njit(cache=True, nogil=True)
def roof(x: float, y: float, row: tuple, pixel: float) -> _Colour:
    """A flat roof: gravel, tar sheets, pale coating or planting, with puddle marks."""
    kind = hash01(int(row[9] * 100000), 31, 0)
    rough = fractal(x, y, 40.0 * row[9], 1.3, 4, pixel)
    stain = fractal(x, y, 90.0 * row[9], 7.0, 4, pixel)
    u, v = x - row[0], y - row[1]
    if kind < 0.3:
        sheet = hash01(math.floor(u / 2.4), math.floor(v / 8.0), 2)
        seam = 0.7 if fraction(u / 2.4) < 0.1 or fraction(v / 8.0) < 0.03 else 1.0
        return _scale((0.13, 0.13, 0.14), seam * (0.75 + 0.5 * sheet) * (1.0 + 0.7 * stain + 0.5 * rough))
    if kind < 0.6:
        return _scale((0.27, 0.245, 0.215), 1.0 + 0.8 * rough + 0.5 * stain)
    if kind < 0.85:
        seam = 0.8 if fraction(u / 4.0) < 0.06 or fraction(v / 4.0) < 0.06 else 1.0
        return _scale((0.5, 0.49, 0.47), seam * (1.0 + 0.45 * stain + 0.3 * rough))
    if min(min(u, row[2] - x), min(v, row[3] - y)) < 1.6:
        return _scale((0.36, 0.35, 0.33), 1.0 + 0.8 * rough)
    return grass(x + 100 * row[9], y, pixel)


@numba.njit(cache=True, nogil=True)
def tiles(x: float, y: float, z: float, along_y: bool, row: tuple, pixel: float) -> _Colour:
    """A pitched roof: courses of tiles of uneven colour and moss."""
    u = x if along_y else y
    course, place = math.floor(z / 0.45), math.floor(u / 0.7)
    tile = hash01(course, place, int(row[9] * 100000))
    shadow = 0.72 if fraction(z / 0.45) < 0.2 else 1.0
    salt = hash01(int(row[9] * 100000), 77, 0)
    base = _mix((0.36, 0.12, 0.065), (0.16, 0.14, 0.15), 1.6 * salt - 0.3)
    moss = fractal(x, y, z, 4.0, 4, pixel)
    return _mix(_scale(base, shadow * (0.62 + 0.76 * tile)), (0.12, 0.15, 0.05), 1.6 * moss)


@numba.njit(cache=True, nogil=True)
def foliage(x: float, y: float, z: float, row: tuple, pixel: float) -> _Colour:
    """Leaves: clumps of light and dark, of the plant's own size and green."""
    clump = fractal(x, y, z, row[4], 4, pixel)
    return _scale((row[6], row[7], row[8]), max(1.0 + 1.7 * clump, 0.1))


@numba.njit(cache=True, nogil=True)
def paint(z: float, facing_up: bool, row: tuple) -> _Colour:
    """A car: dark windows between the body and the roof."""
    if z > row[4] and not facing_up:
        return (0.02, 0.025, 0.03)
    return (row[6], row[7], row[8])


@numba.njit(cache=True, nogil=True)
def machine(x: float, y: float, z: float, facing_up: bool, row: tuple, pixel: float) -> _Colour:
    """Roof machinery: sheet metal with louvres, and a dark fan on top."""
    dirt = 1.0 + 0.8 * fractal(x, y, z, 1.6, 4, pixel)
    if facing_up:
        dx, dy = x - (row[0] + row[2]) / 2, y - (row[1] + row[3]) / 2
        radius = math.hypot(dx, dy)
        if radius < 0.38 * min(row[2] - row[0], row[3] - row[1]):
            return (0.05, 0.05, 0.05) if math.sin(5 * math.atan2(dy, dx)) > 0 else (0.16, 0.16, 0.16)
    elif fraction(z / 0.6) < 0.4:
        dirt *= 0.6
    return (row[6] * dirt, row[7] * dirt, row[8] * dirt)
