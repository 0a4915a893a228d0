"""A sculpture in a courtyard, and rings of views around it."""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.tools.sampling import materials as m
from odin_nerfstudio.tools.sampling.cameras import Cameras, look_along
from odin_nerfstudio.tools.sampling.mesh import Mesh, MeshBuilder, icosphere, tube

#: Elevation, distance from the centre and share of the views of each ring; degrees, metres.
RINGS = ((14.0, 4.5, 0.4), (30.0, 4.7, 0.35), (50.0, 4.6, 0.25))
#: What the views look at, metres.
CENTRE = (0.0, 0.0, 1.25)
#: Width of what a view shows at distance 1: sets the focal length.
FIELD = 1.0
#: Radius of the courtyard and height of its wall, metres.
COURT_RADIUS, COURT_HEIGHT = 9.0, 4.2
#: Points farther away than this are not matched, metres.
MAX_RANGE = 14.0


def orbit(views: int, width: int, height: int, rng: np.random.Generator) -> Cameras:
    """Rings at three heights, with the unsteady hand of a person."""
    cuts = np.round(np.cumsum([0.0] + [share for _, _, share in RINGS]) * views).astype(int)
    cuts[-1] = views
    centres = []
    for (elevation, distance, _), first, last in zip(RINGS, cuts, cuts[1:]):
        count = last - first
        turn = 2 * np.pi * (np.arange(count) + rng.uniform(0, 1) + rng.normal(0, 0.12, count)) / max(count, 1)
        lift = np.radians(elevation + rng.normal(0, 1.5, count))
        reach = distance * rng.normal(1.0, 0.03, count)
        direction = np.stack([np.cos(lift) * np.cos(turn), np.cos(lift) * np.sin(turn), np.sin(lift)], axis=1)
        centres.append(direction * reach[:, None])
    centre = np.concatenate(centres) + CENTRE
    target = np.array(CENTRE) + rng.normal(0, 0.1, (views, 3))
    rotations = look_along(target - centre, rng.normal(0, 0.02, views))
    return Cameras(width, height, max(width, height) / FIELD, centre, rotations)


def build(seed: int) -> Mesh:
    """The courtyard: paving, a round wall, a pedestal with a knot of mosaic, and things that lie around it."""
    rng = np.random.default_rng([seed, 1])
    b = MeshBuilder()
    ground = b.add_object()
    b.rectangle(-COURT_RADIUS, -COURT_RADIUS, COURT_RADIUS, COURT_RADIUS, 0.0, m.PAVING, ground)
    b.revolved(np.array([[COURT_RADIUS - 0.1, 0.0], [COURT_RADIUS - 0.1, COURT_HEIGHT]]), 96, (0, 0, 0), m.WALL, ground)
    _pedestal(b)
    _knot(b, rng)
    places = np.arange(7) * 2 * np.pi / 7 + rng.normal(0, 0.16, 7)
    makers = (_crate, _ball, _pot, _crate, _boulder, _ball, _pot)
    for turn, make in zip(places, makers):
        reach = rng.uniform(1.5, 2.1)
        make(b, reach * np.cos(turn), reach * np.sin(turn), rng)
    return b.build()


def _pedestal(b: MeshBuilder) -> None:
    profile = np.array(
        [[0.95, 0.0], [0.95, 0.1], [0.85, 0.16], [0.78, 0.2], [0.72, 0.28], [0.7, 0.36], [0.7, 0.7],
         [0.74, 0.76], [0.8, 0.8], [0.8, 0.9], [0.0, 0.9]]
    )  # fmt: skip
    b.revolved(profile, 128, (0, 0, 0), m.STONE, b.add_object())


def _knot(b: MeshBuilder, rng: np.random.Generator) -> None:
    """A (2, 3) torus knot on edge with a rippled skin, and a glazed ball in its middle."""
    t = np.linspace(0, 2 * np.pi, 900, endpoint=False)
    reach = 0.48 + 0.21 * np.cos(3 * t)
    curve = np.stack([reach * np.cos(2 * t), 0.26 * np.sin(3 * t), reach * np.sin(2 * t)], axis=1)
    around = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    ripple = 0.012 * np.sin(6 * around[None] + 30 * t[:, None]) + 0.01 * np.sin(24 * t[:, None] - 2 * around[None])
    vertices, triangles = tube(curve, 0.15 + ripple, 72)
    turn = rng.uniform(0, 2 * np.pi)
    cos, sin = np.cos(turn), np.sin(turn)
    vertices = vertices @ np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    vertices[:, 2] += 0.9 - vertices[:, 2].min() - 0.02
    b.add(vertices, triangles, m.MOSAIC, b.add_object())
    sphere, faces = icosphere(6)
    dents = 1.0 + 0.05 * np.sin(7 * sphere @ rng.normal(0, 1, (3, 4))).sum(axis=1) / 2
    b.add(sphere * dents[:, None] * 0.2 + (0, 0, float(vertices[:, 2].mean())), faces, m.GLAZE, b.add_object())


def _crate(b: MeshBuilder, x: float, y: float, rng: np.random.Generator) -> None:
    low, half, turn = 0.0, rng.uniform(0.2, 0.32), rng.uniform(0, np.pi)
    for _ in range(int(rng.integers(1, 3))):
        bounds = (x - half, y - half, x + half, y + half)
        obj = b.add_object(bounds, 2 * half / 5, 0, (0.0, low, turn), rng.random())
        b.box((*bounds[:2], low), (*bounds[2:], low + 2 * half), m.WOOD, m.WOOD, obj, turn)
        low, half, turn = low + 2 * half, half * 0.62, turn + rng.uniform(0.3, 1.0)


def _ball(b: MeshBuilder, x: float, y: float, rng: np.random.Generator) -> None:
    radius = rng.uniform(0.2, 0.3)
    colour = ((0.55, 0.08, 0.05), (0.06, 0.2, 0.5), (0.6, 0.38, 0.05))[rng.integers(3)]
    sphere, faces = icosphere(5)
    obj = b.add_object((x - radius, y - radius, x + radius, y + radius), 0, 0, colour)
    b.add(sphere * radius + (x, y, radius), faces, m.BALL, obj)


def _boulder(b: MeshBuilder, x: float, y: float, rng: np.random.Generator) -> None:
    sphere, faces = icosphere(5)
    size = np.ones(len(sphere))
    for k in range(1, 6):
        size += 0.16 / k * np.sin(2 * k * sphere @ rng.normal(0, 1, 3) + rng.uniform(0, 6))
    b.add(sphere * size[:, None] * (0.42, 0.34, 0.3) + (x, y, 0.2), faces, m.ROCK, b.add_object())


def _pot(b: MeshBuilder, x: float, y: float, rng: np.random.Generator) -> None:
    size = rng.uniform(0.8, 1.15)
    obj = b.add_object(height=0.5 * size)
    profile = np.array([[0.15, 0.0], [0.23, 0.4], [0.27, 0.4], [0.27, 0.5], [0.23, 0.5], [0.22, 0.42], [0.0, 0.42]])
    b.revolved(size * profile, 64, (x, y, 0.0), m.POT, obj)
    sphere, faces = icosphere(2)
    for _ in range(26):
        tint = rng.uniform((0.06, 0.14, 0.02), (0.2, 0.26, 0.06))
        leaf = b.add_object(height=0.08, colour=tuple(tint))
        shape = sphere * rng.uniform(0.05, 0.13, 3) * size
        b.add(shape + (x, y, 0.62 * size) + rng.normal(0, (0.13, 0.13, 0.1)) * size, faces, m.FOLIAGE, leaf)
