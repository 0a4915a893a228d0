"""Colour of every ray of an image: material, sun with cast shadows, and light of the sky."""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from odin_nerfstudio.tools.sampling import city_texture as city
from odin_nerfstudio.tools.sampling import materials as m
from odin_nerfstudio.tools.sampling import object_texture as still

#: Direction to the sun in the world (x east, y north, z up), unit length.
SUN = (-0.48, -0.42, 0.77)
_SUN_X, _SUN_Y, _SUN_Z = (c / math.sqrt(sum(s * s for s in SUN)) for c in SUN)


@numba.njit(cache=True, nogil=True)
def _albedo(material, x, y, z, along_y, facing_up, row, pixel):
    if material == m.STREET:
        return city.street(x, y, pixel)
    if material == m.BLOCK:
        return city.block(x, y, row, pixel)
    if material == m.PARK:
        return city.park(x, y, row, pixel)
    if material == m.FACADE:
        return city.facade(x, y, z, along_y, row, pixel)
    if material == m.ROOF:
        return city.roof(x, y, row, pixel)
    if material == m.TILES:
        return city.tiles(x, y, z, along_y, row, pixel)
    if material == m.FOLIAGE:
        return city.foliage(x, y, z, row, pixel)
    if material == m.TRUNK:
        return (0.12, 0.08, 0.05)
    if material == m.PAINT:
        return city.paint(z, facing_up, row)
    if material == m.MACHINE:
        return city.machine(x, y, z, facing_up, row, pixel)
    if material == m.PAVING:
        return still.paving(x, y, pixel)
    if material == m.WALL:
        return still.wall(x, y, z, row, pixel)
    if material == m.STONE:
        return still.stone(x, y, z, pixel)
    if material == m.ROCK:
        return still.rock(x, y, z, pixel)
    if material == m.MOSAIC:
        return still.mosaic(x, y, z, pixel)
    if material == m.GLAZE:
        return still.glaze(x, y, z, pixel)
    if material == m.WOOD:
        return still.wood(x, y, z, facing_up, row, pixel)
    if material == m.BALL:
        return still.ball(x, y, z, row, pixel)
    if material == m.POT:
        return still.pot(x, y, z, row, pixel)
    return city.field(x, y, pixel)


@numba.njit(cache=True, nogil=True)
def shade(
    points: NDArray[np.float32],
    normals: NDArray[np.float32],
    materials: NDArray[np.int32],
    objects: NDArray[np.int32],
    table: NDArray[np.float64],
    sunlit: NDArray[np.bool_],
    pixels: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Write the linear colour of each surface point.

    Args:
        points: [R, 3] in the world.
        normals: [R, 3] unit, towards the camera.
        materials: [R] material, -1 for the sky.
        objects: [R] row of ``table``.
        table: [O, 10] see ``mesh.OBJECT_COLUMNS``.
        sunlit: [R] no surface between the point and the sun.
        pixels: [R] extent of a pixel on the surface, same unit as the points.
        out: [R, 3] linear RGB, mostly in [0, 1].
    """
    for r in range(len(points)):
        if materials[r] < 0:
            out[r, 0], out[r, 1], out[r, 2] = 0.33, 0.47, 0.66
            continue
        o = table[objects[r]]
        row = (o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7], o[8], o[9])
        nx, ny, nz = float(normals[r, 0]), float(normals[r, 1]), float(normals[r, 2])
        x, y, z = float(points[r, 0]), float(points[r, 1]), float(points[r, 2])
        red, green, blue = _albedo(materials[r], x, y, z, abs(nx) > abs(ny), nz > 0.9, row, float(pixels[r]))
        sun = max(nx * _SUN_X + ny * _SUN_Y + nz * _SUN_Z, 0.0) if sunlit[r] else 0.0
        # The sky lights what faces up in blue, the ground what faces down in a warmer tone.
        up = 0.5 + 0.5 * nz
        out[r, 0] = red * (1.75 * sun + 0.36 * up + 0.2 * (1 - up) + 0.08)
        out[r, 1] = green * (1.66 * sun + 0.43 * up + 0.18 * (1 - up) + 0.08)
        out[r, 2] = blue * (1.48 * sun + 0.54 * up + 0.15 * (1 - up) + 0.08)
