"""Checks of a transforms.json capture before nerfstudio's parser sees it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from nerfstudio.cameras.cameras import CAMERA_MODEL_TO_TYPE
from nerfstudio.data.dataparsers.nerfstudio_dataparser import MAX_AUTO_RESOLUTION, NerfstudioDataParserConfig

from odin_nerfstudio.glue.check_common import MAX_SIZE, MIN_POINTS, missing_files, refuse_one_place
from odin_nerfstudio.glue.colmap_files import find_model
from odin_nerfstudio.glue.images import open_image
from odin_nerfstudio.glue.input_error import bad_input

INTRINSICS = ("fl_x", "fl_y", "cx", "cy", "w", "h")
RANDOM_START = "pass `nerfstudio-data --load-3D-points False` to start from random points"


def check_transforms(config: NerfstudioDataParserConfig, images: bool = True) -> None:
    """Check the file's frames, its point cloud and, if ``images``, that every frame's image is on disk.

    Raises:
        InputError: the first fault found.
    """
    path = config.data if config.data.suffix == ".json" else config.data / "transforms.json"
    meta = _read(path, config.data)
    frames = _check_frames(path, meta)
    if config.auto_scale_poses:
        centers = np.array([frame["transform_matrix"] for frame in frames], dtype=np.float64)[:, :3, 3]
        refuse_one_place(path, centers, config.center_method)
    if config.load_3D_points:
        _check_points(path, meta, config.data)
    if images:
        _check_images(config, path, frames)


def _read(path: Path, data: Path) -> dict[str, Any]:
    if not path.is_file():
        model = find_model(data) if data.is_dir() else None
        if model is not None:
            remedy = f"there is a COLMAP model: pass `colmap --data {data} --colmap-path {model}`"
        else:
            remedy = "pass the folder or the .json file by --data"
        raise bad_input(path, "no such file", remedy)
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise bad_input(path, f"not valid JSON in UTF-8 ({error})", "correct it, or write it again") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("frames"), list) or not meta["frames"]:
        raise bad_input(path, "no frames", "it needs a list `frames` with at least one frame; process the data again")
    return meta


def _check_frames(path: Path, meta: dict[str, Any]) -> list[dict[str, Any]]:
    frames = meta["frames"]
    model = meta.get("camera_model", "OPENCV")
    if model not in CAMERA_MODEL_TO_TYPE:
        known = ", ".join(sorted(CAMERA_MODEL_TO_TYPE))
        raise bad_input(path, f"unknown camera_model {model!r}", f"use one of {known}")
    for key in INTRINSICS:
        if key in meta and not _is_size(meta[key], key):
            raise bad_input(path, f"{key} is {meta[key]!r}", "give a finite, positive number")
    for number, frame in enumerate(frames):
        where = f"frame {number}"
        if not isinstance(frame, dict) or not isinstance(frame.get("file_path"), str):
            raise bad_input(path, f"{where} has no file_path", "add it, or remove the frame")
        where += f" ({frame['file_path']})"
        try:
            pose = np.array(frame.get("transform_matrix"), dtype=np.float64)
        except (TypeError, ValueError):
            pose = np.empty(0)
        if pose.shape != (4, 4) or not np.isfinite(pose).all():
            raise bad_input(path, f"transform_matrix of {where} is not a finite 4 x 4 matrix", "remove the frame")
        for key in INTRINSICS:
            if key not in meta and not _is_size(frame.get(key), key):
                hint = "; Blender's camera_angle_x is read by `blender-data`" if "camera_angle_x" in meta else ""
                raise bad_input(path, f"{where} has no valid {key}", f"give {key} for the file or each frame{hint}")
    for key in ("mask_path", "depth_file_path"):
        count = sum(key in frame for frame in frames)
        if count not in (0, len(frames)):
            raise bad_input(
                path, f"{key} is given for {count} of {len(frames)} frames", "give it for every frame or for none"
            )
    name, count = Counter(frame["file_path"] for frame in frames).most_common(1)[0]
    if count > 1:
        raise bad_input(path, f"{count} frames have file_path {name}", "remove all but one")
    return frames


def _is_size(value: Any, key: str) -> bool:
    if isinstance(value, bool):
        return False
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    if key in ("w", "h"):
        return 1 <= number <= MAX_SIZE
    return bool(np.isfinite(number)) and (key in ("cx", "cy") or number > 0)


def _check_points(path: Path, meta: dict[str, Any], data: Path) -> None:
    if "ply_file_path" in meta:
        ply = path.parent / meta["ply_file_path"]
        if not ply.is_file():
            raise bad_input(ply, f"no such point cloud, though {path.name} names it", f"restore it, or {RANDOM_START}")
        count = _ply_points(ply)
        if count < MIN_POINTS:
            raise bad_input(ply, f"{count} points, at least {MIN_POINTS} are needed", f"replace it, or {RANDOM_START}")
    elif (data / "colmap/sparse/0").exists():
        # nerfstudio would ask on the terminal whether to write a point cloud
        raise bad_input(
            path,
            "no ply_file_path, though colmap/sparse/0 has points",
            f"pass `colmap --data {data}` to use that model, or {RANDOM_START}",
        )
    # else nerfstudio itself says that there is no point cloud and that training starts from random points


def _ply_points(path: Path) -> int:
    """The number of vertices that the header of a PLY file announces."""
    with path.open("rb") as file:
        if file.readline(16).strip() != b"ply":
            raise bad_input(path, "not a PLY file", f"replace it, or {RANDOM_START}")
        for _ in range(1000):
            words = file.readline(4096).split()
            if words[:2] == [b"element", b"vertex"] and len(words) == 3 and words[2].isdigit():
                return int(words[2])
            if words == [b"end_header"]:
                break
    raise bad_input(path, "the PLY header announces no vertices", f"replace it, or {RANDOM_START}")


def _check_images(config: NerfstudioDataParserConfig, path: Path, frames: list[dict[str, Any]]) -> None:
    folder = path.parent
    names = [Path(frame["file_path"]) for frame in frames]
    factor = config.downscale_factor
    if factor is None:
        factor = _auto_factor(folder, names[0])
    if factor > 1:
        scaled = folder / f"images_{factor}"
        full_size = "pass `nerfstudio-data --downscale-factor 1` for full size"
        if not scaled.is_dir():
            raise bad_input(scaled, f"folder of images downscaled by {factor} is missing", full_size)
        name, count = Counter(name.name for name in names).most_common(1)[0]
        if count > 1:
            # nerfstudio drops folder names when it looks there
            raise bad_input(scaled, f"{count} images of different folders share the name {name}", full_size)
        paths = [scaled / name.name for name in names]
    else:
        paths = [folder / name for name in names]
    missing = missing_files(paths)
    if not missing:
        return
    alike = next((p for p in missing[0].parent.glob("*") if p.stem == missing[0].name), None)
    remedy = "restore them, or remove their frames"
    if alike:
        remedy = f"write file_path with its ending (there is {alike.name})"
    if len(missing) < len(paths):
        what = f"{len(missing)} of {len(paths)} images of {path.name} are missing on disk"
    else:
        what = f"none of the {len(paths)} images of {path.name} is on disk"
    raise bad_input(missing[0], what, remedy)


def _auto_factor(folder: Path, name: Path) -> int:
    """nerfstudio's choice: halve while the image is too large and the next smaller folder has it."""
    if not (folder / name).is_file():
        return 1  # nerfstudio would fail on it; reported as missing by the caller
    with open_image(folder / name) as image:
        largest = max(image.size)
    factor = 1
    while largest / factor > MAX_AUTO_RESOLUTION and (folder / f"images_{factor * 2}" / name.name).exists():
        factor *= 2
    return factor
