"""A city of blocks and the flight of an aerial survey over it."""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.tools.sampling import materials as m
from odin_nerfstudio.tools.sampling.cameras import Cameras, look_along
from odin_nerfstudio.tools.sampling.mesh import Mesh, MeshBuilder, icosphere

#: Height of the flight and the ground distances between photos of a strip and between strips, metres. With the
#: default field of view photos overlap by three quarters along a strip and by two thirds across.
ALTITUDE, PHOTO_SPACING, STRIP_SPACING = 92.0, 20.0, 32.0
#: How far the camera looks ahead of the vertical, radians.
TILT = 0.30
#: Width of what a view shows of the ground right below, as a share of the altitude: sets the focal length.
FIELD = 1.17
#: City beyond the flight on every side, metres.
MARGIN = 110.0
#: Points farther away than this are not matched, metres.
MAX_RANGE = 190.0

_WALL_COLOURS = (
    (0.42, 0.17, 0.11), (0.52, 0.44, 0.33), (0.36, 0.34, 0.31), (0.58, 0.53, 0.44), (0.30, 0.13, 0.10),
    (0.45, 0.33, 0.20), (0.25, 0.28, 0.31), (0.55, 0.36, 0.24), (0.33, 0.40, 0.40), (0.60, 0.56, 0.50),
)  # fmt: skip
_CAR_COLOURS = (
    (0.6, 0.6, 0.6), (0.04, 0.04, 0.05), (0.5, 0.04, 0.03), (0.05, 0.12, 0.4), (0.3, 0.31, 0.33),
    (0.65, 0.5, 0.05), (0.03, 0.2, 0.12), (0.7, 0.68, 0.64),
)  # fmt: skip


def survey(views: int, width: int, height: int, rng: np.random.Generator) -> Cameras:
    """Parallel strips flown to and fro, looking down and somewhat ahead, with the jitter of a drone in wind."""
    strips = max(1, round(np.sqrt(views * PHOTO_SPACING / STRIP_SPACING)))
    per_strip = [len(part) for part in np.array_split(np.arange(views), strips)]
    centres, headings = [], []
    for strip, count in enumerate(per_strip):
        along = (np.arange(count) - (count - 1) / 2) * PHOTO_SPACING
        sign = 1.0 if strip % 2 == 0 else -1.0
        across = np.full(count, (strip - (strips - 1) / 2) * STRIP_SPACING)
        centres.append(np.stack([across, sign * along, np.full(count, ALTITUDE)], axis=1))
        headings.append(np.full(count, sign))
    centre = np.concatenate(centres) + rng.normal(0, (1.2, 1.2, 0.8), (views, 3))
    sign = np.concatenate(headings)
    tilt = TILT + rng.normal(0, 0.03, views)
    yaw = rng.normal(0, 0.05, views)
    forward = np.stack([np.sin(yaw), sign * np.cos(yaw), np.zeros(views)], axis=1) * np.sin(tilt)[:, None]
    forward[:, 2] = -np.cos(tilt)
    # The longer side of the image sets the scale, so that portrait images overlap as well.
    focal = max(width, height) / FIELD
    return Cameras(width, height, focal, centre, look_along(forward, rng.normal(0, 0.03, views)))


def build(cameras: Cameras, seed: int) -> Mesh:
    """Blocks under and around the flight. A block's content depends on the seed and its place only."""
    builder = MeshBuilder()
    low = np.floor((cameras.centres[:, :2].min(axis=0) - MARGIN) / m.BLOCK_PERIOD).astype(int)
    high = np.ceil((cameras.centres[:, :2].max(axis=0) + MARGIN) / m.BLOCK_PERIOD).astype(int)
    x0, y0 = low * m.BLOCK_PERIOD
    x1, y1 = high * m.BLOCK_PERIOD + m.STREET_WIDTH
    ground = builder.add_object()
    builder.rectangle(x0, y0, x1, y1, 0.0, m.STREET, ground)
    builder.rectangle(x0 - 2000, y0 - 2000, x1 + 2000, y1 + 2000, -0.3, m.FIELD, ground)
    for i in range(low[0], high[0]):
        for j in range(low[1], high[1]):
            # Negative numbers are no seeds.
            rng = np.random.default_rng([seed, 1, i + 2**20, j + 2**20])
            _block(builder, i * m.BLOCK_PERIOD, j * m.BLOCK_PERIOD, rng)
    return builder.build()


def _block(builder: MeshBuilder, x: float, y: float, rng: np.random.Generator) -> None:
    """One block with the two streets to its west and south."""
    x0, y0, x1, y1 = x + m.STREET_WIDTH, y + m.STREET_WIDTH, x + m.BLOCK_PERIOD, y + m.BLOCK_PERIOD
    is_park = rng.random() < 0.13
    obj = builder.add_object((x0, y0, x1, y1), salt=rng.random())
    kind = m.PARK if is_park else m.BLOCK
    builder.box((x0, y0, -0.1), (x1, y1, 0.15), m.BLOCK, kind, obj)
    for share in (0.12, 0.32, 0.52, 0.72, 0.92):
        for tx, ty in ((x0 + share * 48, y0 + 1.6), (x0 + share * 48, y1 - 1.6), (x0 + 1.6, y0 + share * 48)):
            if rng.random() < 0.45:
                _tree(builder, tx + rng.normal(0, 0.3), ty + rng.normal(0, 0.3), rng.uniform(1.5, 2.4), rng)
    if is_park:
        for _ in range(34):
            tx, ty = x0 + rng.uniform(4, 44), y0 + rng.uniform(4, 44)
            if np.hypot(tx - x0 - 24, ty - y0 - 24) > 9:
                _tree(builder, tx, ty, rng.uniform(1.8, 3.9), rng)
    else:
        _buildings(builder, x0 + 3.6, y0 + 3.6, x1 - 3.6, y1 - 3.6, rng)
    for lane in range(2):
        for side in (3.2, 6.0, 10.0, 12.8):
            for place in np.arange(4.0, 46.0, 7.0):
                parked = side in (3.2, 12.8)
                if rng.random() < (0.5 if parked else 0.14):
                    across, along = side + rng.normal(0, 0.15), m.STREET_WIDTH + place + rng.normal(0, 0.6)
                    _car(builder, *((x + across, y + along) if lane else (x + along, y + across)), bool(lane), rng)


def _buildings(b: MeshBuilder, x0: float, y0: float, x1: float, y1: float, rng: np.random.Generator) -> None:
    columns, rows = [(1, 1), (2, 2), (2, 2), (2, 3), (3, 2), (3, 3), (2, 1)][rng.integers(7)]
    cut_x = np.concatenate([[0], np.sort(np.arange(1, columns) / columns + rng.uniform(-0.06, 0.06, columns - 1)), [1]])
    cut_y = np.concatenate([[0], np.sort(np.arange(1, rows) / rows + rng.uniform(-0.06, 0.06, rows - 1)), [1]])
    xs, ys = x0 + cut_x * (x1 - x0), y0 + cut_y * (y1 - y0)
    centre = 7.5 + 6.0 * rng.random()
    for i in range(columns):
        for j in range(rows):
            if columns * rows > 2 and rng.random() < 0.1:
                for _ in range(4):
                    _tree(b, rng.uniform(xs[i] + 2, xs[i + 1] - 2), rng.uniform(ys[j] + 2, ys[j + 1] - 2), 2.0, rng)
                continue
            gap = rng.uniform(0.3, 2.2, 4)
            bounds = (xs[i] + gap[0], ys[j] + gap[1], xs[i + 1] - gap[2], ys[j + 1] - gap[3])
            _building(b, bounds, float(np.clip(centre * rng.lognormal(0, 0.4), 5.0, 25.0)), rng)


def _building(b: MeshBuilder, bounds: tuple, height: float, rng: np.random.Generator) -> None:
    x0, y0, x1, y1 = bounds
    colour = np.array(_WALL_COLOURS[rng.integers(len(_WALL_COLOURS))]) * rng.uniform(0.75, 1.15)
    salt = rng.random()
    if height < 9.5 and min(x1 - x0, y1 - y0) < 17 and rng.random() < 0.75:
        obj = b.add_object(bounds, height + 9, int(rng.integers(2)), tuple(colour), salt)
        roof = 0.28 * min(x1 - x0, y1 - y0)
        b.gable((x0, y0, 0.0), (x1, y1, height), roof, x1 - x0 > y1 - y0, m.FACADE, m.TILES, obj)
        return
    style = int(rng.choice(5, p=[0.28, 0.24, 0.14, 0.16, 0.18]))
    _tower(b, bounds, 0.0, height, style, tuple(colour), salt, rng)
    if height > 14 and min(x1 - x0, y1 - y0) > 15 and rng.random() < 0.6:
        inset = rng.uniform(0.16, 0.3, 4) * np.array([x1 - x0, y1 - y0, x1 - x0, y1 - y0])
        upper = (x0 + inset[0], y0 + inset[1], x1 - inset[2], y1 - inset[3])
        _tower(b, upper, height, min(height * rng.uniform(1.2, 1.6), 32.0), style, tuple(colour), salt, rng)


def _tower(b: MeshBuilder, bounds: tuple, base: float, top: float, style: int, colour: tuple, salt: float, rng) -> None:
    """A block with a parapet, and machinery on its roof."""
    x0, y0, x1, y1 = bounds
    obj = b.add_object(bounds, top + 0.7, style, colour, salt)
    b.box((x0, y0, base), (x1, y1, top), m.FACADE, m.ROOF, obj)
    edge = 0.45
    for low, high in (
        ((x0, y0), (x1, y0 + edge)),
        ((x0, y1 - edge), (x1, y1)),
        ((x0, y0), (x0 + edge, y1)),
        ((x1 - edge, y0), (x1, y1)),
    ):
        b.box((*low, top - 0.2), (*high, top + 0.7), m.FACADE, m.FACADE, obj)
    for _ in range(int(rng.integers(1, 3 + int((x1 - x0) * (y1 - y0) / 90)))):
        size = rng.uniform((0.9, 0.9, 0.8), (2.6, 2.2, 2.1))
        if min(x1 - x0, y1 - y0) < 2 * size.max() + 2.4:
            continue
        cx, cy = rng.uniform((x0 + 1 + size[0], y0 + 1 + size[1]), (x1 - 1 - size[0], y1 - 1 - size[1]))
        box = (cx - size[0], cy - size[1], cx + size[0], cy + size[1])
        tint = rng.uniform(0.25, 0.6) * rng.uniform((1.0, 0.9, 0.8), (1.0, 1.05, 1.1))
        unit = b.add_object(box, top, 0, tuple(tint), rng.random())
        b.box((*box[:2], top), (*box[2:], top + size[2]), m.MACHINE, m.MACHINE, unit)


def _car(b: MeshBuilder, x: float, y: float, along_y: bool, rng: np.random.Generator) -> None:
    colour = np.array(_CAR_COLOURS[rng.integers(len(_CAR_COLOURS))]) * rng.uniform(0.8, 1.1)
    long = rng.uniform(2.0, 2.4)
    half, cabin = (np.array([0.92, long]), np.array([0.8, 0.55 * long]))
    if not along_y:
        half, cabin = half[::-1], cabin[::-1]
    obj = b.add_object((x - half[0], y - half[1], x + half[0], y + half[1]), 0.95, 0, tuple(colour))
    b.box((x - half[0], y - half[1], 0.25), (x + half[0], y + half[1], 0.95), m.PAINT, m.PAINT, obj)
    b.box((x - cabin[0], y - cabin[1], 0.9), (x + cabin[0], y + cabin[1], 1.5), m.PAINT, m.PAINT, obj)


_CROWN = icosphere(2)


def _tree(b: MeshBuilder, x: float, y: float, radius: float, rng: np.random.Generator) -> None:
    tint = rng.uniform((0.05, 0.11, 0.02), (0.17, 0.2, 0.06))
    obj = b.add_object(height=1.5, colour=tuple(tint))
    sphere, triangles = _CROWN
    wave = rng.normal(0, 1, (3, 3))
    bumps = 1.0 + 0.09 * np.sin(3.5 * sphere @ wave.T + rng.uniform(0, 6, 3)).sum(axis=1)
    leaves = sphere * bumps[:, None] * radius * rng.uniform((0.9, 0.9, 0.95), (1.1, 1.1, 1.4))
    height = radius * 1.15 + 1.2
    b.add(leaves + np.array([x, y, height]), triangles, m.FOLIAGE, obj)
    b.box((x - 0.18, y - 0.18, 0), (x + 0.18, y + 0.18, height), m.TRUNK, m.TRUNK, obj)
