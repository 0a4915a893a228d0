"""Reading the images and tracks of a COLMAP model.

Why not an existing reader: nerfstudio's loops over every observation in Python, and pycolmap builds an object per 2D
and 3D point; both need minutes and tens of gigabytes for the 100 million observations of a large aerial capture. The
tracks that planning needs are 8 bytes per observation on disk, so they are walked in place (memory-mapped) twice: once
to count, once to fill the compressed rows. Only the incidence itself is ever held in memory.
"""

from __future__ import annotations

import logging
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

FILES = ("cameras", "images", "points3D")
_IMAGE_HEADER = struct.Struct("<I7dI")  # image id, qw qx qy qz, tx ty tz, camera id
_COUNT = struct.Struct("<Q")
_BYTES_PER_POINT2D = 24


@dataclass(frozen=True)
class ModelImages:
    """Registered images of a model, in the order of the file.

    Attributes:
        ids: COLMAP image ids. (n,) int64
        names: Names relative to the image folder, unique.
        centers: Camera centres in the model's world frame. (n, 3) float64
    """

    ids: np.ndarray
    names: list[str]
    centers: np.ndarray


@dataclass(frozen=True)
class ModelTracks:
    """Observations of a model's points by chosen images, as compressed rows (one row per chosen image).

    Attributes:
        indptr: Start of each image's observations. (V + 1,) int64
        indices: Point rows, ascending within an image, each at most once. (nnz,) int32
        xyz: All points of the model, in the order of the file. (P, 3) float32
    """

    indptr: np.ndarray
    indices: np.ndarray
    xyz: np.ndarray


def has_model(folder: Path) -> bool:
    """Whether ``folder`` holds cameras, images and points3D, all binary or all text."""
    return any(all((folder / f"{name}{suffix}").is_file() for name in FILES) for suffix in (".bin", ".txt"))


def model_suffix(folder: Path) -> str:
    """``".bin"`` or ``".txt"``: the one format from which all three files of the model are read.

    Binary wins where both are complete, with a warning if the two differ in images or points.

    Raises:
        ValueError: Neither format is complete.
    """
    complete = [s for s in (".bin", ".txt") if all((folder / f"{name}{s}").is_file() for name in FILES)]
    if not complete:
        found = sorted(p.name for p in folder.glob("*") if p.stem in FILES) if folder.is_dir() else []
        raise ValueError(
            f"{folder} holds no complete COLMAP model: found {', '.join(found) or 'nothing'}, needs "
            "cameras, images and points3D, all .bin or all .txt (colmap model_converter writes either)"
        )
    if len(complete) == 2:
        binary, text = _summary(folder, ".bin"), _summary(folder, ".txt")
        if binary != text:
            logger.warning(
                "%s holds a binary and a text model that differ (%d and %d images, %d and %d points): "
                "the binary one is used; delete the stale one",
                folder, len(binary[0]), len(text[0]), binary[1], text[1],
            )  # fmt: skip
    return complete[0]


def _summary(folder: Path, suffix: str) -> tuple[set[str], int]:
    images = read_images(folder, suffix)
    path = folder / f"points3D{suffix}"
    if suffix == ".bin":
        with path.open("rb") as file:
            points = _COUNT.unpack(_exactly(file.read(8), 8, path))[0]
    else:
        points = sum(1 for _ in _text_lines(path))
    return set(images.names), points


def read_images(folder: Path, suffix: str) -> ModelImages:
    """Ids, names and centres of the registered images.

    Args:
        folder: Model folder.
        suffix: ``".bin"`` or ``".txt"``, see :func:`model_suffix`.

    Raises:
        ValueError: The file is cut short or malformed, or two images have one name.
    """
    path = folder / f"images{suffix}"
    records = list(_images_binary(path) if suffix == ".bin" else _images_text(path))
    names = [name for _, _, name in records]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"{path}: two images are named {twice!r}; views are matched by name, so names must be unique")
    poses = np.array([pose for _, pose, _ in records], dtype=np.float64).reshape(-1, 7)
    return ModelImages(np.array([i for i, _, _ in records], dtype=np.int64), names, _centers(poses))


def _images_binary(path: Path) -> Iterator[tuple[int, tuple[float, ...], str]]:
    if path.stat().st_size < 8:
        raise ValueError(f"{path} is cut short; write the model again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (count,) = _COUNT.unpack_from(data, 0)
        at = 8
        for _ in range(count):
            try:
                image_id, *pose, _camera = _IMAGE_HEADER.unpack_from(data, at)
                at += _IMAGE_HEADER.size
                end = data.find(b"\0", at)
                (points,) = _COUNT.unpack_from(data, end + 1)
            except struct.error as error:
                raise ValueError(f"{path} is cut short at byte {at}; write the model again") from error
            name = data[at:end].decode("utf-8")
            at = end + 1 + 8 + points * _BYTES_PER_POINT2D
            if end < 0 or at > len(data):
                raise ValueError(f"{path} is cut short in image {name!r}; write the model again")
            yield image_id, tuple(pose), name


def _images_text(path: Path) -> Iterator[tuple[int, tuple[float, ...], str]]:
    # Two lines per image; the second (its 2D points) may be empty, so empty lines count here.
    with path.open(encoding="utf-8") as file:
        lines = (line for line in file if not line.startswith("#"))
        for line in lines:
            if not line.strip():
                continue
            fields = line.split(maxsplit=9)
            if len(fields) != 10:
                raise ValueError(f"{path}: not an image line: {line[:80]!r}")
            yield int(fields[0]), tuple(float(f) for f in fields[1:8]), fields[9].strip()
            next(lines, "")


def _centers(poses: np.ndarray) -> np.ndarray:
    """Camera centres -R^T t of world-to-camera poses (qw qx qy qz tx ty tz). (n, 7) -> (n, 3)"""
    q = poses[:, :4] / np.maximum(np.linalg.norm(poses[:, :4], axis=1, keepdims=True), 1e-300)
    t = poses[:, 4:]
    # R^T t is t turned by the conjugate quaternion (w, -x, -y, -z).
    w, axis = q[:, :1], -q[:, 1:]
    cross = np.cross(axis, t)
    return -(t + 2.0 * (w * cross + np.cross(axis, cross)))


def read_tracks(folder: Path, suffix: str, image_ids: np.ndarray) -> ModelTracks:
    """Which of the chosen images observed which point, from the tracks in points3D.

    Args:
        folder: Model folder.
        suffix: ``".bin"`` or ``".txt"``, see :func:`model_suffix`.
        image_ids: COLMAP id of each row to make, unique; -1 makes an empty row. (V,) int64

    Raises:
        ValueError: The file is cut short or malformed.
    """
    path = folder / f"points3D{suffix}"
    rows = np.flatnonzero(image_ids >= 0)
    order = rows[np.argsort(image_ids[rows], kind="stable")]
    sorted_ids, sorted_rows = image_ids[order].astype(np.int64), order.astype(np.int32)
    if suffix == ".bin":
        return _tracks_binary(path, sorted_ids, sorted_rows, len(image_ids))
    return _tracks_text(path, sorted_ids, sorted_rows, len(image_ids))


def _tracks_binary(path: Path, sorted_ids: np.ndarray, sorted_rows: np.ndarray, views: int) -> ModelTracks:
    from odin_nerfstudio.planning import kernels

    if path.stat().st_size < 8:
        raise ValueError(f"{path} is cut short; write the model again")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    points = int(data[:8].view("<u8")[0])
    if points * 51 > len(data):  # 43 bytes of point, 8 of track length: the least a record takes
        raise ValueError(f"{path} names {points} points but is too short for them; write the model again")
    counts = np.zeros(views + 1, np.int64)
    xyz = np.empty((points, 3), np.float32)
    if kernels.scan_points3d(data, points, sorted_ids, sorted_rows, counts, xyz) < 0:
        raise ValueError(f"{path} is cut short; write the model again")
    indptr = np.cumsum(counts)
    indices = np.empty(int(indptr[-1]), np.int32)
    kernels.fill_points3d(data, points, sorted_ids, sorted_rows, indptr[:-1].copy(), indices)
    return ModelTracks(indptr, indices, xyz)


def _tracks_text(path: Path, sorted_ids: np.ndarray, sorted_rows: np.ndarray, views: int) -> ModelTracks:
    xyz: list[tuple[float, float, float]] = []
    view_parts: list[np.ndarray] = [np.empty(0, np.int64)]
    point_parts: list[np.ndarray] = [np.empty(0, np.int64)]
    for row, line in enumerate(_text_lines(path)):
        fields = line.split()
        if len(fields) < 8 or len(fields) % 2:
            raise ValueError(f"{path}: not a point line: {line[:80]!r}")
        xyz.append((float(fields[1]), float(fields[2]), float(fields[3])))
        seen = np.unique(np.array(fields[8::2], dtype=np.int64))
        at = np.searchsorted(sorted_ids, seen)
        known = at < len(sorted_ids)
        known[known] = sorted_ids[at[known]] == seen[known]
        view_parts.append(sorted_rows[at[known]].astype(np.int64))
        point_parts.append(np.full(int(known.sum()), row, np.int64))
    view, point = np.concatenate(view_parts), np.concatenate(point_parts)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(view, minlength=views))]).astype(np.int64)
    indices = point[np.argsort(view, kind="stable")].astype(np.int32)
    return ModelTracks(indptr, indices, np.array(xyz, dtype=np.float32).reshape(-1, 3))


def _text_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                yield line


def _exactly(data: bytes, size: int, path: Path) -> bytes:
    if len(data) != size:
        raise ValueError(f"{path} is cut short; write the model again")
    return data
