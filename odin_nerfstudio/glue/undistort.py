"""Undistorted cameras without looking at images.

nerfstudio rewrites a camera's intrinsics when it undistorts the image. A plan needs the final cameras of all views,
also of those that only other ranks load, so the intrinsics are computed first, once for each distinct camera.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datamanagers.full_images_datamanager import _undistort_image


def is_distorted(camera: Cameras) -> bool:
    """Whether an image of this single camera has to be resampled."""
    return camera.distortion_params is not None and bool(torch.any(camera.distortion_params != 0))


def undistort(camera: Cameras, data: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """nerfstudio's undistortion of one view.

    Args:
        camera: the camera as captured, shape ``()``.
        data: ``image [H, W, C]`` and perhaps ``mask [H, W, 1]``.

    Returns:
        The new 3x3 intrinsics and ``data`` with new images, whose size may differ.
    """
    assert camera.distortion_params is not None
    intrinsics, image, mask = _undistort_image(
        camera, camera.distortion_params.numpy(), data, data["image"].numpy(), camera.get_intrinsics_matrices().numpy()
    )
    data["image"] = torch.from_numpy(np.ascontiguousarray(image))
    if mask is not None:
        data["mask"] = mask
    return intrinsics, data


def undistorted_cameras(cameras: Cameras) -> Cameras:
    """The cameras after undistortion: same poses, new intrinsics and sizes."""
    result = copy.deepcopy(cameras)
    known: dict[tuple, tuple[np.ndarray, int, int]] = {}
    for index in range(len(cameras)):
        camera = cameras[index].reshape(())
        if not is_distorted(camera):
            continue
        width, height = int(camera.width.item()), int(camera.height.item())
        assert camera.distortion_params is not None
        key = (
            int(camera.camera_type.item()),
            width,
            height,
            *camera.get_intrinsics_matrices().flatten().tolist(),
            *camera.distortion_params.tolist(),
        )
        if key not in known:
            blank = {"image": torch.zeros(height, width, 3, dtype=torch.uint8)}
            intrinsics, data = undistort(camera, blank)
            known[key] = (intrinsics, data["image"].shape[1], data["image"].shape[0])
        intrinsics, new_width, new_height = known[key]
        result.fx[index] = float(intrinsics[0, 0])
        result.fy[index] = float(intrinsics[1, 1])
        result.cx[index] = float(intrinsics[0, 2])
        result.cy[index] = float(intrinsics[1, 2])
        result.width[index] = new_width
        result.height[index] = new_height
    return result
