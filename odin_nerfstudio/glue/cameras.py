"""nerfstudio's cameras in the conventions of the renderer and the planner."""

from __future__ import annotations

import torch
from nerfstudio.cameras.cameras import Cameras

from odin_nerfstudio.planning.geometry import ViewGeometry


def world_to_camera(camera_to_world: torch.Tensor) -> torch.Tensor:
    """World-to-camera matrices in gsplat's (OpenCV) axes.

    Args:
        camera_to_world: ``[C, 3, 4]`` poses in nerfstudio's (OpenGL) axes.

    Returns:
        ``[C, 4, 4]``, differentiable. Eager on purpose: the compiled original needs a C++ compiler and 20 s.
    """
    flip = camera_to_world.new_tensor([1.0, -1.0, -1.0])
    inverse_rotation = (camera_to_world[:, :3, :3] * flip).transpose(1, 2)
    translation = -torch.bmm(inverse_rotation, camera_to_world[:, :3, 3:4])
    last_row = camera_to_world.new_tensor([0.0, 0.0, 0.0, 1.0]).expand(len(camera_to_world), 1, 4)
    return torch.cat((torch.cat((inverse_rotation, translation), dim=2), last_row), dim=1)


def view_geometry(cameras: Cameras) -> ViewGeometry:
    """nerfstudio's cameras ``[V]`` as the planner's."""
    matrices = world_to_camera(cameras.camera_to_worlds).numpy(force=True)
    return ViewGeometry(
        world_to_camera=matrices,
        K=cameras.get_intrinsics_matrices().numpy(force=True),
        width=cameras.width.reshape(-1).numpy(force=True),
        height=cameras.height.reshape(-1).numpy(force=True),
    )
