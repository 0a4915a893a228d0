"""Files of a posed capture: COLMAP's binary model, and nerfstudio's transforms.json with a point cloud.

The world of the scenes has z up. COLMAP's guess of gravity is -y, so its model holds (x, -z, y), and the usual
``applied_transform`` of nerfstudio takes that back to (x, y, z): what transforms.json and the point cloud hold.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from odin_nerfstudio.tools.sampling.cameras import Cameras
from odin_nerfstudio.tools.sampling.tracks import Tracks

#: Scene world to COLMAP world.
TO_COLMAP = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
#: Where ``ns-process-data`` leaves the model and nerfstudio's COLMAP parser looks for it.
MODEL_FOLDER = Path("colmap/sparse/0")
POINT_CLOUD = "sparse_pc.ply"
_PINHOLE = 1


def image_name(view: int) -> str:
    """File name of a view's image."""
    return f"frame_{view + 1:05d}.jpg"


def write_model(folder: Path, cameras: Cameras, tracks: Tracks) -> None:
    """Write cameras.bin, images.bin and points3D.bin into ``folder`` (made if missing).

    Format: https://colmap.github.io/format.html. One PINHOLE camera; image and point ids start at 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = len(cameras)
    focal, width, height = cameras.focal, cameras.width, cameras.height
    camera = struct.pack("<QiiQQ4d", 1, 1, _PINHOLE, width, height, focal, focal, width / 2, height / 2)
    (folder / "cameras.bin").write_bytes(camera)

    first = np.searchsorted(tracks.views, np.arange(count + 1))
    observation = np.zeros(len(tracks.views), dtype=[("xy", "<f8", 2), ("point", "<i8")])
    observation["xy"], observation["point"] = tracks.pixels, tracks.points + 1
    with (folder / "images.bin").open("wb") as file:
        file.write(struct.pack("<Q", count))
        for view in range(count):
            rotation = cameras.rotations[view] @ TO_COLMAP.T
            translation = -cameras.rotations[view] @ cameras.centres[view]
            file.write(struct.pack("<i7di", view + 1, *_quaternion(rotation), *translation, 1))
            file.write(image_name(view).encode() + b"\0")
            part = observation[first[view] : first[view + 1]]
            file.write(struct.pack("<Q", len(part)) + part.tobytes())

    # Observations are sorted by view; a stable sort by point keeps each track in the order of its views.
    order = np.argsort(tracks.points, kind="stable")
    element = np.zeros(len(order), dtype=[("image", "<i4"), ("index", "<i4")])
    element["image"] = tracks.views[order] + 1
    element["index"] = (np.arange(len(order)) - first[tracks.views])[order]
    start = np.searchsorted(tracks.points[order], np.arange(len(tracks.positions) + 1))
    positions = tracks.positions @ TO_COLMAP.T
    with (folder / "points3D.bin").open("wb") as file:
        file.write(struct.pack("<Q", len(positions)))
        for p, (position, colour, error) in enumerate(zip(positions, tracks.colours, tracks.errors)):
            part = element[start[p] : start[p + 1]]
            file.write(struct.pack("<Q3d3BdQ", p + 1, *position, *colour, error, len(part)) + part.tobytes())


def write_transforms(folder: Path, cameras: Cameras, tracks: Tracks) -> None:
    """Write transforms.json and the point cloud it names into ``folder``."""
    frames = []
    for view in range(len(cameras)):
        pose = np.eye(4)
        # nerfstudio's camera axes are OpenGL's: y up, z backward.
        pose[:3, :3] = cameras.rotations[view].T * (1, -1, -1)
        pose[:3, 3] = cameras.centres[view]
        frames.append(
            {
                "file_path": f"images/{image_name(view)}",
                "transform_matrix": pose.tolist(),
                "colmap_im_id": view + 1,
            }
        )
    meta = {
        "camera_model": "OPENCV",
        "w": cameras.width,
        "h": cameras.height,
        "fl_x": cameras.focal,
        "fl_y": cameras.focal,
        "cx": cameras.width / 2,
        "cy": cameras.height / 2,
        "k1": 0.0,
        "k2": 0.0,
        "p1": 0.0,
        "p2": 0.0,
        # The poses are upright already; a survey that looks down would mislead the guess from the cameras' up axes.
        "orientation_override": "none",
        "applied_transform": np.hstack([TO_COLMAP.T, np.zeros((3, 1))]).tolist(),
        "ply_file_path": POINT_CLOUD,
        "frames": frames,
    }
    (folder / "transforms.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    _write_ply(folder / POINT_CLOUD, tracks.positions, tracks.colours)


def _write_ply(path: Path, positions: NDArray[np.float64], colours: NDArray[np.uint8]) -> None:
    names = ("x", "y", "z", "red", "green", "blue")
    vertices = np.zeros(len(positions), dtype=list(zip(names, ["<f4"] * 3 + ["u1"] * 3)))
    for axis in range(3):
        vertices[names[axis]], vertices[names[3 + axis]] = positions[:, axis], colours[:, axis]
    kinds = ["float"] * 3 + ["uchar"] * 3
    properties = "".join(f"property {kind} {name}\n" for kind, name in zip(kinds, names))
    header = f"ply\nformat binary_little_endian 1.0\nelement vertex {len(positions)}\n{properties}end_header\n"
    path.write_bytes(header.encode() + vertices.tobytes())


def _quaternion(rotation: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Unit quaternion (w, x, y, z), w >= 0, of a rotation matrix [3, 3], from the largest of its four components."""
    r = rotation
    squares = np.array(
        [
            1 + r[0, 0] + r[1, 1] + r[2, 2],
            1 + r[0, 0] - r[1, 1] - r[2, 2],
            1 - r[0, 0] + r[1, 1] - r[2, 2],
            1 - r[0, 0] - r[1, 1] + r[2, 2],
        ]
    )
    products = {
        (0, 1): r[2, 1] - r[1, 2], (0, 2): r[0, 2] - r[2, 0], (0, 3): r[1, 0] - r[0, 1],
        (1, 2): r[0, 1] + r[1, 0], (1, 3): r[0, 2] + r[2, 0], (2, 3): r[1, 2] + r[2, 1],
    }  # fmt: skip
    largest = int(np.argmax(squares))
    q = np.empty(4)
    q[largest] = np.sqrt(squares[largest]) / 2
    for other in range(4):
        if other != largest:
            q[other] = products[min(largest, other), max(largest, other)] / (4 * q[largest])
    if q[0] < 0:
        q = -q
    q /= np.linalg.norm(q)
    return float(q[0]), float(q[1]), float(q[2]), float(q[3])
