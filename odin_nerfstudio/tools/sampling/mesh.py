"""Triangle meshes with a material and an object per triangle, built from a few solids."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]

#: Columns of the object table: bounds of the object's footprint, its height, style, base colour and a random number.
OBJECT_COLUMNS = ("x0", "y0", "x1", "y1", "height", "style", "red", "green", "blue", "salt")


@dataclass(frozen=True)
class Mesh:
    """One scene's geometry. World axes: x east, y north, z up."""

    vertices: NDArray[np.float32]
    """[V, 3] corners."""
    triangles: NDArray[np.uint32]
    """[T, 3] vertex indices, counter-clockwise seen from outside."""
    materials: NDArray[np.int32]
    """[T] material of each triangle, see ``texture.py``."""
    objects: NDArray[np.int32]
    """[T] row of ``table`` of each triangle."""
    table: NDArray[np.float64]
    """[O, 10] what the texture of an object depends on, see ``OBJECT_COLUMNS``."""


@dataclass
class MeshBuilder:
    """Collects solids and joins them into one ``Mesh``."""

    _vertices: list[Floats] = field(default_factory=list)
    _triangles: list[Ints] = field(default_factory=list)
    _materials: list[Ints] = field(default_factory=list)
    _objects: list[Ints] = field(default_factory=list)
    _rows: list[tuple[float, ...]] = field(default_factory=list)
    _count: int = 0

    def add_object(
        self,
        bounds: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
        height: float = 0.0,
        style: int = 0,
        colour: tuple[float, float, float] = (0.5, 0.5, 0.5),
        salt: float = 0.0,
    ) -> int:
        """Register an object and return its row in the table."""
        self._rows.append((*bounds, height, float(style), *colour, salt))
        return len(self._rows) - 1

    def add(self, vertices: Floats, triangles: Ints, material: int | Ints, obj: int) -> None:
        """Add triangles ``[T, 3]`` over ``vertices`` ``[V, 3]`` with one material, or one for each triangle."""
        self._vertices.append(np.asarray(vertices, dtype=np.float64))
        self._triangles.append(np.asarray(triangles, dtype=np.int64) + self._count)
        self._materials.append(np.broadcast_to(np.asarray(material, dtype=np.int32), (len(triangles),)))
        self._objects.append(np.full(len(triangles), obj, dtype=np.int32))
        self._count += len(vertices)

    def rectangle(self, x0: float, y0: float, x1: float, y1: float, z: float, material: int, obj: int) -> None:
        """A horizontal rectangle that faces up."""
        corners = np.array([[x0, y0, z], [x1, y0, z], [x1, y1, z], [x0, y1, z]])
        self.add(corners, np.array([[0, 1, 2], [0, 2, 3]]), material, obj)

    def box(self, low: Floats | tuple, high: Floats | tuple, sides: int, top: int, obj: int, turn: float = 0.0) -> None:
        """An upright box without a floor, turned about its vertical axis by ``turn`` radians."""
        centre = (np.asarray(low, dtype=float) + np.asarray(high, dtype=float)) / 2
        half = (np.asarray(high, dtype=float) - np.asarray(low, dtype=float)) / 2
        corners = _BOX_CORNERS * half
        if turn:
            cos, sin = np.cos(turn), np.sin(turn)
            corners = corners @ np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
        self.add(corners + centre, _BOX_TRIANGLES, np.array([sides] * 8 + [top] * 2), obj)

    def gable(self, low: tuple, high: tuple, roof: float, along_x: bool, sides: int, top: int, obj: int) -> None:
        """A house: a box from ``low`` to ``high`` and a ridge ``roof`` above it, with eaves that stand out a little."""
        (x0, y0, z0), (x1, y1, z1) = low, high
        self.box((x0, y0, z0), (x1, y1, z1), sides, top, obj)
        eave, drop = 0.5, 0.5 * roof / max(min(x1 - x0, y1 - y0) / 2, 0.1)
        if along_x:
            middle = (y0 + y1) / 2
            ridge = np.array([[x0, middle, z1 + roof], [x1, middle, z1 + roof]])
            low_edge = np.array([[x0, y0 - eave, z1 - drop], [x1, y0 - eave, z1 - drop]])
            high_edge = np.array([[x1, y1 + eave, z1 - drop], [x0, y1 + eave, z1 - drop]])
            ends = np.array([[x0, y0, z1], [x0, y1, z1], [x1, y0, z1], [x1, y1, z1]])
            end_triangles = np.array([[6, 0, 7], [8, 9, 1]])
        else:
            middle = (x0 + x1) / 2
            ridge = np.array([[middle, y1, z1 + roof], [middle, y0, z1 + roof]])
            low_edge = np.array([[x0 - eave, y1, z1 - drop], [x0 - eave, y0, z1 - drop]])
            high_edge = np.array([[x1 + eave, y0, z1 - drop], [x1 + eave, y1, z1 - drop]])
            ends = np.array([[x1, y1, z1], [x0, y1, z1], [x0, y0, z1], [x1, y0, z1]])
            end_triangles = np.array([[6, 7, 0], [8, 9, 1]])
        vertices = np.concatenate([ridge, low_edge, high_edge, ends])
        slopes = np.array([[2, 3, 1], [2, 1, 0], [4, 5, 0], [4, 0, 1]])
        triangles = np.concatenate([slopes, end_triangles])
        self.add(vertices, triangles, np.array([top] * 4 + [sides] * 2), obj)

    def revolved(self, profile: Floats, segments: int, centre: tuple, material: int, obj: int) -> None:
        """A solid of revolution about the vertical through ``centre``.

        Args:
            profile: [K, 2] radius and height, from below.
            segments: Faces around.
            centre: x, y, z of the foot.
            material: One for all faces.
            obj: Row of the table.
        """
        angles = np.linspace(0, 2 * np.pi, segments, endpoint=False)
        radius, height = profile[:, :1], profile[:, 1:]
        vertices = np.stack([radius * np.cos(angles), radius * np.sin(angles), height + 0 * angles], axis=-1)
        triangles = _grid_triangles(len(profile) - 1, segments, wrap_rows=False)
        self.add(vertices.reshape(-1, 3) + np.asarray(centre), triangles, material, obj)

    def build(self) -> Mesh:
        """Join everything that was added."""
        return Mesh(
            vertices=np.concatenate(self._vertices).astype(np.float32),
            triangles=np.concatenate(self._triangles).astype(np.uint32),
            materials=np.concatenate(self._materials).astype(np.int32),
            objects=np.concatenate(self._objects).astype(np.int32),
            table=np.array(self._rows, dtype=np.float64),
        )


_BOX_CORNERS = np.array(
    [[-1, -1, -1], [1, -1, -1], [1, 1, -1], [-1, 1, -1], [-1, -1, 1], [1, -1, 1], [1, 1, 1], [-1, 1, 1]], dtype=float
)
_BOX_TRIANGLES = np.array(
    [[0, 1, 5], [0, 5, 4], [1, 2, 6], [1, 6, 5], [2, 3, 7], [2, 7, 6], [3, 0, 4], [3, 4, 7], [4, 5, 6], [4, 6, 7]]
)


def _grid_triangles(rows: int, columns: int, wrap_rows: bool) -> Ints:
    """Triangles of a grid of ``rows`` x ``columns`` faces that closes along its columns (and rows)."""
    i, j = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    below = (i + 1) % rows if wrap_rows else i + 1
    right = (j + 1) % columns
    a, b, c, d = i * columns + j, i * columns + right, below * columns + right, below * columns + j
    return np.stack([np.stack([a, b, c], -1), np.stack([a, c, d], -1)], axis=2).reshape(-1, 3)


def tube(curve: Floats, radius: Floats, segments: int) -> tuple[Floats, Ints]:
    """A closed tube around a closed curve.

    Args:
        curve: [K, 3] points of the curve, the last one joins the first.
        radius: [K, segments] distance of the skin from the curve.
        segments: Corners of a cross-section.

    Returns:
        Vertices [K * segments, 3] and triangles [2 * K * segments, 3].
    """
    tangent = np.roll(curve, -1, axis=0) - np.roll(curve, 1, axis=0)
    tangent /= np.linalg.norm(tangent, axis=1, keepdims=True)
    # A frame from the curve's centre direction varies smoothly and closes, unlike a transported one.
    outward = curve - curve.mean(axis=0)
    side = np.cross(tangent, outward)
    side /= np.linalg.norm(side, axis=1, keepdims=True)
    normal = np.cross(side, tangent)
    angles = np.linspace(0, 2 * np.pi, segments, endpoint=False)[None, :, None]
    ring = np.cos(angles) * normal[:, None] + np.sin(angles) * side[:, None]
    vertices = curve[:, None] + radius[..., None] * ring
    return vertices.reshape(-1, 3), _grid_triangles(len(curve), segments, wrap_rows=True)[:, ::-1]


def icosphere(levels: int) -> tuple[Floats, Ints]:
    """A unit sphere of ``20 * 4**levels`` triangles: vertices [V, 3] and triangles [T, 3]."""
    golden = (1 + 5**0.5) / 2
    vertices = [(-1, golden, 0), (1, golden, 0), (-1, -golden, 0), (1, -golden, 0)]
    vertices += [(z, x, y) for x, y, z in vertices] + [(y, z, x) for x, y, z in vertices]
    points = [np.array(v, dtype=float) / np.linalg.norm(v) for v in vertices]
    # The twelve corners' hull: every triple of mutual neighbours is a face.
    corner = np.array(points)
    near = corner @ corner.T > 0.4
    faces = [
        (a, b, c) if np.dot(np.cross(corner[b] - corner[a], corner[c] - corner[a]), corner[a]) > 0 else (a, c, b)
        for a in range(12)
        for b in range(a + 1, 12)
        for c in range(b + 1, 12)
        if near[a, b] and near[b, c] and near[a, c]
    ]
    for _ in range(levels):
        middle: dict[tuple[int, int], int] = {}

        def midpoint(a: int, b: int, middle: dict[tuple[int, int], int] = middle) -> int:
            key = (min(a, b), max(a, b))
            if key not in middle:
                middle[key] = len(points)
                point = points[a] + points[b]
                points.append(point / np.linalg.norm(point))
            return middle[key]

        split = []
        for a, b, c in faces:
            ab, bc, ca = midpoint(a, b), midpoint(b, c), midpoint(c, a)
            split += [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
        faces = split
    return np.array(points), np.array(faces)
