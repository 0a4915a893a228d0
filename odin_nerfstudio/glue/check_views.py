"""Checks of what a parser returned: cameras, image and mask files, points."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from PIL import Image

from odin_nerfstudio.glue.check_common import MIN_POINTS, THREADS
from odin_nerfstudio.glue.images import check_complete, image_orientation, open_image
from odin_nerfstudio.glue.input_error import InputError, bad_input, raise_first, remark


def check_views(outputs: DataparserOutputs, split: str, images: bool) -> DataparserOutputs:
    """Check cameras and files; returns ``outputs`` with the masks that were found.

    Raises:
        InputError: the first fault found.
    """
    count = len(outputs.image_filenames)
    if count == 0:
        if split == "train":
            raise bad_input("the training split", "no images", "pass --eval-mode all after the dataparser's name")
        remark(f"split {split} has no images, so nothing is evaluated; --eval-mode interval or all holds some out")
        return outputs
    _check_cameras(outputs)
    if not images:
        return outputs
    Image.preinit()  # once, before threads do it
    sizes = list(zip(outputs.cameras.width.flatten().tolist(), outputs.cameras.height.flatten().tolist()))
    with ThreadPoolExecutor(THREADS) as pool:
        raise_first(pool.map(_image_fault, outputs.image_filenames, sizes), "images")
        if outputs.mask_filenames is None:
            return outputs
        masks = list(pool.map(_find_mask, outputs.mask_filenames, outputs.image_filenames))
        raise_first(pool.map(_mask_fault, masks, outputs.image_filenames, sizes), "masks")
    return dataclasses.replace(outputs, mask_filenames=masks)


def check_points(outputs: DataparserOutputs) -> DataparserOutputs:
    """Drop non-finite points, with their rows in every ``points3D_*`` entry; no points at all are accepted.

    Raises:
        InputError: fewer than four points remain, or positions and colours differ in number.
    """
    metadata = outputs.metadata
    xyz = metadata.get("points3D_xyz")
    if xyz is None:
        return outputs
    count = xyz.shape[0]
    rgb = metadata.get("points3D_rgb")
    finite = torch.isfinite(xyz).all(dim=1)
    if rgb is not None and rgb.shape[0] not in (0, count):
        raise bad_input(
            "the point cloud", f"{count} positions but {rgb.shape[0]} colours", "write the point cloud again"
        )
    if rgb is not None and rgb.shape[0] == count:
        finite &= torch.isfinite(rgb).all(dim=1)
    rows = torch.nonzero(finite).flatten()
    left = len(rows)
    if left < MIN_POINTS:
        raise bad_input(
            "the point cloud",
            f"{left} points with finite coordinates (of {count}), at least {MIN_POINTS} are needed",
            "reconstruct again, or pass --load-3D-points False after the dataparser's name for random points",
        )
    changed = {**metadata, "points3D_rows": rows}
    if left < count:
        remark(f"{count - left} of {count} points are dropped, since their position or colour is not finite")
        for key, value in metadata.items():
            if key.startswith("points3D_") and isinstance(value, torch.Tensor) and value.shape[:1] == (count,):
                changed[key] = value[rows]
    return dataclasses.replace(outputs, metadata=changed)


def _check_cameras(outputs: DataparserOutputs) -> None:
    cameras = outputs.cameras
    count = len(outputs.image_filenames)
    fields = [cameras.camera_to_worlds, cameras.fx, cameras.fy, cameras.cx, cameras.cy]
    if cameras.distortion_params is not None:
        fields.append(cameras.distortion_params)
    finite = torch.stack([torch.isfinite(field.reshape(count, -1)).all(dim=1) for field in fields]).all(dim=0)
    valid = finite & (cameras.fx.reshape(count) > 0) & (cameras.fy.reshape(count) > 0)
    bad = torch.nonzero(~valid).flatten().tolist()
    if bad:
        more = f" ({len(bad)} views are affected)" if len(bad) > 1 else ""
        raise bad_input(
            outputs.image_filenames[bad[0]],
            f"its camera is not finite or has no positive focal length{more}",
            "correct or remove its pose and intrinsics in the COLMAP model or transforms.json",
        )


def _image_fault(path: Path, size: tuple[int, int]) -> str | None:
    try:
        with open_image(path) as image:
            if image.size != size:
                return str(_size_fault(path, image, size))
            check_complete(path, image)
    except InputError as error:
        return str(error)
    return None


def _size_fault(path: Path, image: Image.Image, size: tuple[int, int]) -> InputError:
    what = f"image is {image.width} x {image.height}, its camera {size[0]} x {size[1]}"
    if (image.height, image.width) == size:
        if image_orientation(image) >= 5:
            what += f"; EXIF orientation {image_orientation(image)} rotates it, and nerfstudio does not apply that"
            remedy = "rotate the pixels and clear the tag on all images: `mogrify -auto-orient`"
        else:
            remedy = "rotate the images by 90 degrees as they were when the model was made"
    elif max(abs(image.width - size[0]), abs(image.height - size[1])) <= 1:
        remedy = "if these are downscaled, pass `colmap --downscale-rounding-mode round` (or ceil), or scale them again"
    else:
        remedy = "use the images that the model was made from, or pass the fitting --downscale-factor"
    return bad_input(path, what, remedy)


def _find_mask(mask: Path, image: Path) -> Path:
    """nerfstudio looks for ``a.png``; COLMAP calls the mask of ``a.jpg`` ``a.jpg.png``."""
    if not mask.exists():
        colmap = mask.with_name(image.name + ".png")
        if colmap.exists():
            return colmap
    return mask


def _mask_fault(mask: Path, image: Path, size: tuple[int, int]) -> str | None:
    if not mask.exists():
        names = f"{mask.name} or {image.name}.png"
        return str(bad_input(mask, f"mask of {image.name} is missing", f"add it as {names}, or train without masks"))
    try:
        with open_image(mask) as opened:
            if opened.size != size:
                what = f"mask is {opened.width} x {opened.height}, its image {size[0]} x {size[1]}"
                return str(bad_input(mask, what, "export the masks in the size of the images"))
            check_complete(mask, opened)
    except InputError as error:
        return str(error)
    return None
