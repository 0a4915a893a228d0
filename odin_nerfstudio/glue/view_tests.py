"""The training cameras as the runtime's visibility tests, and rows that they cannot see."""

from __future__ import annotations

import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from odin_nerfstudio.glue.cameras import world_to_camera
from odin_nerfstudio.glue.odin_model import NEAR_PLANE
from odin_nerfstudio.glue.splat_protocol import DistributedSplats
from odin_nerfstudio.runtime.candidates import ViewTest

BEHIND = 10.0
"""Padding rows lie this far behind the camera: behind the near plane, wherever the pose is refined to."""


class ViewTests:
    """Visibility tests of all training views, at the resolution and the pose of a step."""

    def __init__(self, model: DistributedSplats, cameras: Cameras, max_lag: int) -> None:
        """
        Args:
            model: says at which resolution a step is rendered, and where the camera optimizer has moved a view.
            cameras: all training views ``[V]``, undistorted, on the CPU.
            max_lag: the largest number of updates that a row can lack.
        """
        self._model, self._cameras, self._max_lag = model, cameras, max_lag
        self._known: dict[tuple[int, int], ViewTest] = {}

    def __call__(self, step: int, view: int) -> ViewTest:
        """The test of a view as this rank's copy of the state has it."""
        moving = self._model.camera_optimizer.config.mode != "off"
        key = (view, self._model.downscale_at(step))
        if not moving and key in self._known:
            return self._known[key]
        camera = self._cameras[view : view + 1]
        camera.rescale_output_resolution(1 / key[1])
        camera.metadata = {"cam_idx": view}
        with torch.no_grad():
            pose = self._model.camera_optimizer.apply_to_camera(camera) if moving else camera.camera_to_worlds
        test = ViewTest.of(
            world_to_camera(pose.cpu()),
            camera.get_intrinsics_matrices(),
            int(camera.width.item()),
            int(camera.height.item()),
            near=NEAR_PLANE,
            max_lag=self._max_lag,
        )
        if not moving:
            self._known[key] = test
        return test

    def padding(self, view: int) -> dict[str, Tensor]:
        """One row of every parameter of the primitives that the view's camera cannot see."""
        pose = self._cameras.camera_to_worlds[view]
        rows = {name: torch.zeros(p.shape[1:]) for name, p in self._model.gauss_params.items()}
        behind = pose[:3, 3] + BEHIND * pose[:3, 2]  # nerfstudio's cameras look along -z
        return {**rows, "means": behind, "quats": torch.tensor([1.0, 0.0, 0.0, 0.0])}
