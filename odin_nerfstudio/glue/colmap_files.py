"""A quick look into a COLMAP model's files: counts, image names, poses and faults, without building any objects.

nerfstudio's parser reads cameras and images from text where there is text, but points from binary where there is
binary; formats: https://colmap.github.io/format.html
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from nerfstudio.data.utils.colmap_parsing_utils import qvec2rotmat

from odin_nerfstudio.glue.input_error import InputError, bad_input

FILES = ("cameras", "images", "points3D")
TEXT, BINARY = ".txt", ".bin"
USUAL_PLACES = ("colmap/sparse/0", "sparse/0", "sparse", "colmap/sparse", "colmap", "model", ".")
IMAGE_HEADER = struct.Struct("<i7di")
POINT_BYTES = 43
DAMAGED = "export the model again (colmap model_converter), or copy it again from its source"


@dataclass
class RegisteredImage:
    """One image of a model: pose is qw qx qy qz tx ty tz (world to camera, COLMAP axes)."""

    image_id: int
    name: str
    camera_id: int
    pose: tuple[float, ...]


def formats_complete(folder: Path) -> list[str]:
    """The formats (``.txt``, ``.bin``) of which ``folder`` has all three files."""
    return [s for s in (TEXT, BINARY) if all((folder / f"{name}{s}").is_file() for name in FILES)]


def find_model(data: Path) -> Path | None:
    """The first usual place below ``data`` with a complete model, relative to ``data``; None if there is none."""
    return next((Path(place) for place in USUAL_PLACES if formats_complete(data / place)), None)


def read_images(path: Path) -> list[RegisteredImage]:
    """The registered images in the file's order, from images.txt or images.bin.

    Raises:
        InputError: the file is damaged, not UTF-8, or a text file whose image names hold spaces.
    """
    with _faults_named(path):
        return _images_text(path) if path.suffix == TEXT else _images_binary(path)


def count_points(path: Path) -> int:
    """The number of points in points3D.txt or points3D.bin, having walked the whole file.

    Raises:
        InputError: the file is damaged.
    """
    with _faults_named(path):
        if path.suffix == TEXT:
            count = 0
            for number, line in _lines(path):
                if not _is_point(line.split()):
                    raise bad_input(path, f"line {number} is not a point", DAMAGED)
                count += 1
            return count
        with _mapped(path) as view:
            (count,) = struct.unpack_from("<Q", view, 0)
            offset = 8
            for _ in range(count):
                (track,) = struct.unpack_from("<Q", view, offset + POINT_BYTES)
                offset += POINT_BYTES + 8 + 8 * track
            _inside(view, offset)
            return count


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise bad_input(path, f"names are not UTF-8 ({error.reason})", "rename the images and export again") from error
    except (struct.error, ValueError, IndexError, OSError, OverflowError) as error:
        raise bad_input(path, f"damaged or truncated ({error})", DAMAGED) from error


@contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            yield b""  # an empty file cannot be mapped; reading its count then reports the damage
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            yield view


def _inside(view: bytes | mmap.mmap, offset: int) -> None:
    if offset > len(view):
        raise ValueError(f"ends after {len(view)} of {offset} bytes")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are neither empty nor comments, with their numbers from 1."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            stripped = line.strip()
            if stripped and not stripped.startswith("#"):
                yield number, stripped


def _is_point(fields: list[str]) -> bool:
    """Whether id, x y z, r g b, error and pairs of image id and observation can be read; nan and inf can."""
    if len(fields) < 8 or len(fields) % 2:
        return False
    try:
        np.array([*fields[1:4], fields[7]], dtype=np.float64)
        integers = np.array([fields[0], *fields[4:7], *fields[8:]], dtype=np.int64)
    except (ValueError, OverflowError):
        return False
    return bool((integers[1:4] >= 0).all() and (integers[1:4] <= 255).all())


def _images_text(path: Path) -> list[RegisteredImage]:
    images: list[RegisteredImage] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            fields = stripped.split(None, 9)
            if len(fields) < 10:
                raise bad_input(path, f"line {number} is not an image (expected 10 fields)", DAMAGED)
            if " " in fields[9]:
                # nerfstudio and COLMAP itself cut the name at the first space
                raise bad_input(
                    path,
                    f"image name {fields[9]!r} holds spaces, which a text model cannot express",
                    "rename the images without spaces, or export the model as binary and remove the .txt files",
                )
            pose = tuple(float(value) for value in fields[1:8])
            images.append(RegisteredImage(int(fields[0]), fields[9], int(fields[8]), pose))
            observations = next(file, "").split()  # may be empty, for a view that sees nothing
            if len(observations) % 3:
                raise bad_input(path, f"line {number + 1} is not a list of x, y and point id", DAMAGED)
            # a ValueError here is reported as damage
            np.array(observations[0::3] + observations[1::3], dtype=np.float64)
            np.array(observations[2::3], dtype=np.int64)
    return images


def _images_binary(path: Path) -> list[RegisteredImage]:
    images: list[RegisteredImage] = []
    with _mapped(path) as view:
        (count,) = struct.unpack_from("<Q", view, 0)
        offset = 8
        for _ in range(count):
            image_id, *pose, camera_id = IMAGE_HEADER.unpack_from(view, offset)
            start = offset + IMAGE_HEADER.size
            end = view.find(b"\0", start)
            if end < 0:
                raise ValueError("an image name does not end")
            (observations,) = struct.unpack_from("<Q", view, end + 1)
            offset = end + 9 + 24 * observations
            _inside(view, offset)
            images.append(RegisteredImage(image_id, view[start:end].decode("utf-8"), camera_id, tuple(pose)))
    return images


def poses_finite(images: list[RegisteredImage]) -> list[bool]:
    """For each image, whether its pose is finite and its quaternion not zero."""
    return [bool(np.isfinite(image.pose).all() and any(image.pose[:4])) for image in images]


def centers(images: list[RegisteredImage]) -> npt.NDArray[np.float64]:
    """Camera centres -R^T t in the model's world. [n, 3]"""
    return np.array([-qvec2rotmat(np.array(i.pose[:4])).T @ np.array(i.pose[4:]) for i in images], dtype=np.float64)
