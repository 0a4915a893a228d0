"""Checks of a COLMAP capture before nerfstudio's parser sees it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nerfstudio.data.dataparsers.colmap_dataparser import MAX_AUTO_RESOLUTION, ColmapDataParserConfig
from nerfstudio.data.utils import colmap_parsing_utils
from nerfstudio.process_data.colmap_utils import parse_colmap_camera_params

from odin_nerfstudio.glue.check_common import MAX_SIZE, MIN_POINTS, missing_files, refuse_one_place
from odin_nerfstudio.glue.colmap_files import (
    BINARY,
    DAMAGED,
    FILES,
    TEXT,
    RegisteredImage,
    centers,
    count_points,
    find_model,
    formats_complete,
    poses_finite,
    read_images,
)
from odin_nerfstudio.glue.images import open_image
from odin_nerfstudio.glue.input_error import bad_input, remark


@dataclass
class _Model:
    folder: Path
    images: list[RegisteredImage]


def check_colmap(config: ColmapDataParserConfig, images: bool = True) -> None:
    """Check the model and, if ``images``, that every registered image is on disk in the size that will be read.

    Raises:
        InputError: the first fault found.
    """
    model = _check_model(config)
    _check_cameras(model)
    if not images:
        return
    if config.masks_path is None and (config.data / "masks").is_dir():
        remark(f"{config.data / 'masks'} is not used; pass `colmap --masks-path masks` to use the masks in it")
    folder = _image_folder(config, model)
    _check_on_disk(config, model, folder)


def _check_model(config: ColmapDataParserConfig) -> _Model:
    folder = config.data / config.colmap_path
    complete = formats_complete(folder)
    wanted = FILES if config.load_3D_points else FILES[:2]
    if not config.load_3D_points and not complete:
        complete = [s for s in (TEXT, BINARY) if all((folder / f"{name}{s}").is_file() for name in wanted)]
    if not complete:
        raise _no_model(config, folder)
    for other in {TEXT, BINARY} - set(complete):
        # nerfstudio prefers text for cameras and images, but binary for points, and looks at one file to decide
        decisive = folder / (f"cameras{TEXT}" if other == TEXT else f"points3D{BINARY}")
        if decisive.exists():
            raise bad_input(
                decisive,
                f"part of a {other} model beside a complete {complete[0]} one; nerfstudio would mix the two",
                f"remove the {other} files, or add the missing ones",
            )
    used = TEXT if TEXT in complete else BINARY
    registered = read_images(folder / f"images{used}")
    points = 0
    points_used = BINARY if BINARY in complete else TEXT
    if config.load_3D_points:
        path = folder / f"points3D{points_used}"
        points = count_points(path)
        if points < MIN_POINTS:
            raise bad_input(
                path,
                f"{points} points, at least {MIN_POINTS} are needed" if points else "the sparse model has no points",
                "reconstruct again, or pass `colmap --load-3D-points False` to start from random points",
            )
    if len(complete) == 2:
        _compare_formats(folder, registered, points if config.load_3D_points else None)
    path = folder / f"images{used}"
    if not registered:
        raise bad_input(path, "no registered images", "reconstruct again, or choose another model by --colmap-path")
    for image, finite in zip(registered, poses_finite(registered)):
        if not finite:
            raise bad_input(path, f"the pose of image {image.name} is not finite", DAMAGED)
    name, count = Counter(image.name for image in registered).most_common(1)[0]
    if count > 1:
        raise bad_input(path, f"{count} images are named {name}", "remove all but one; views are told apart by name")
    if config.auto_scale_poses:
        refuse_one_place(path, centers(registered), config.center_method)
    return _Model(folder, registered)


def _no_model(config: ColmapDataParserConfig, folder: Path) -> Exception:
    other = find_model(config.data)
    if other is not None and other != config.colmap_path:
        return bad_input(folder, "no complete COLMAP model here", f"one was found: pass `colmap --colmap-path {other}`")
    present = sorted(path.name for path in folder.glob("*") if path.stem in FILES) if folder.is_dir() else []
    what = f"incomplete COLMAP model (only {', '.join(present)})" if present else "no COLMAP model here"
    remedy = "cameras, images and points3D are needed, all three .bin or all three .txt; "
    if (config.data / "transforms.json").exists():
        return bad_input(folder, what, remedy + "there is a transforms.json, so `nerfstudio-data --data` may be meant")
    return bad_input(folder, what, remedy + "pass `colmap --colmap-path` with the model's place below --data")


def _compare_formats(folder: Path, text_images: list[RegisteredImage], binary_points: int | None) -> None:
    """Say which of two models is used where they differ; called with both complete, so text gives the images."""
    binary_images = read_images(folder / f"images{BINARY}")
    differences = []
    if {image.name for image in text_images} != {image.name for image in binary_images}:
        differences.append(f"{len(text_images)} and {len(binary_images)} images")
    if binary_points is not None:
        text_points = count_points(folder / f"points3D{TEXT}")
        if text_points != binary_points:
            differences.append(f"{text_points} and {binary_points} points")
    if differences:
        remark(
            f"{folder} holds a text and a binary model that differ ({', '.join(differences)}): cameras and images "
            "are read from the .txt files, points from the .bin files; remove the stale ones"
        )


def _check_cameras(model: _Model) -> None:
    path = model.folder / f"cameras{TEXT}"
    reader = colmap_parsing_utils.read_cameras_text
    if not path.exists():
        path, reader = path.with_suffix(BINARY), colmap_parsing_utils.read_cameras_binary
    try:
        cameras = reader(path)
    except Exception as error:  # whatever a damaged file makes of the reader
        raise bad_input(path, f"damaged or of an unknown camera model ({error!r})", DAMAGED) from error
    undistort = "make pinhole images and a model of them with `colmap image_undistorter`"
    models: dict[str, str] = {}
    for camera_id in sorted({image.camera_id for image in model.images}):
        camera = cameras.get(camera_id)
        if camera is None:
            raise bad_input(path, f"camera {camera_id}, which an image names, is missing", DAMAGED)
        size = (camera.width, camera.height)
        if not (min(size) >= 1 and max(size) <= MAX_SIZE) or not np.isfinite(camera.params).all():
            raise bad_input(path, f"camera {camera_id} has no valid size or parameters", DAMAGED)
        try:
            parsed = parse_colmap_camera_params(camera)
        except IndexError as error:
            raise bad_input(path, f"camera {camera_id} lacks parameters of {camera.model}", DAMAGED) from error
        except (NotImplementedError, ValueError) as error:
            raise bad_input(path, f"camera model {camera.model} is not supported", undistort) from error
        if any(parsed.get(key) for key in ("k4", "k5", "k6")):
            raise bad_input(path, f"camera {camera_id} ({camera.model}) has terms k4 to k6, not supported", undistort)
        models.setdefault(parsed["camera_model"], camera.model)
    if len(models) > 1:
        raise bad_input(path, f"{' and '.join(models.values())} cameras in one model are not supported", undistort)


def _image_folder(config: ColmapDataParserConfig, model: _Model) -> Path:
    """The folder that nerfstudio will read, ``images`` or ``images_N``; never lets it ask on the terminal."""
    folder = config.data / config.images_path
    factor = config.downscale_factor
    if factor is None:
        # as in nerfstudio: by the size of the image with the lowest id
        first = folder / min(model.images, key=lambda image: image.image_id).name
        if not first.exists():
            return folder  # reported as missing by the caller
        with open_image(first) as image:
            largest = max(image.size)
        factor = 1
        while largest / factor > MAX_AUTO_RESOLUTION:
            factor *= 2
    if factor <= 1:
        return folder
    scaled = folder.parent / f"{folder.name}_{factor}"
    parents = {(scaled / image.name).parent for image in model.images}
    absent = sorted(parent for parent in parents if not parent.exists())
    if absent:
        why = "--downscale-factor" if config.downscale_factor else f"images wider or higher than {MAX_AUTO_RESOLUTION}"
        raise bad_input(
            absent[0],
            f"folder of images downscaled by {factor} is missing ({why})",
            f"pass `colmap --downscale-factor 1` for full size (and `--pipeline.datamanager.camera-res-scale-factor "
            f"{1 / factor:g}` before it to scale while reading), or fill the folder with images of 1/{factor} the size",
        )
    return scaled


def _check_on_disk(config: ColmapDataParserConfig, model: _Model, folder: Path) -> None:
    paths = [folder / image.name for image in model.images]
    missing = missing_files(paths)
    if not missing:
        return
    name = missing[0].relative_to(folder).as_posix()
    if len(missing) < len(paths):
        raise bad_input(
            missing[0],
            f"{len(missing)} of {len(paths)} registered images are missing on disk",
            "restore them, or delete them from the model (`colmap image_deleter`)",
        )
    elsewhere = [place for place in ("images", "input", "rgb", ".") if (config.data / place / name).is_file()]
    place = elsewhere[0] if elsewhere else "FOLDER"
    what = f"none of the {len(paths)} registered images is on disk" if folder.is_dir() else "no such image folder"
    raise bad_input(folder, f"{what} (first: {name})", f"pass their folder: `colmap --images-path {place}`")
