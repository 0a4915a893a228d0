"""Serves full images by the plan, and keeps only what this rank renders."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, FullImageDatamanagerConfig
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track

from odin_nerfstudio.glue.checks import check_before_parsing, check_parsed
from odin_nerfstudio.glue.odin_dataset import OdinDataset
from odin_nerfstudio.glue.undistort import is_distorted, undistort, undistorted_cameras
from odin_nerfstudio.planning.schedule import Plan

GPU_CACHE_SHARE = 0.25
"""Images are kept on the device while they take no more than this share of its free memory."""


@dataclass
class OdinDataManagerConfig(FullImageDatamanagerConfig):
    """splatfacto's data manager options."""

    _target: type = field(default_factory=lambda: OdinDataManager)
    cache_images: Literal["auto", "cpu", "gpu"] = "auto"  # type: ignore[assignment]
    """Where training images are kept. "auto": on the device while they fit easily, else on the host as uint8."""
    prefetch: int = 2
    """How many of the coming views are decoded ahead in the background."""


class OdinDataManager(FullImageDatamanager[OdinDataset]):
    """A data manager whose views come from a plan.

    Images are decoded when first needed and then kept; only views that were asked for (those of this rank) are.
    Cameras are undistorted for all views at once, since candidate sets of other ranks' tasks need them.
    """

    config: OdinDataManagerConfig  # type: ignore[assignment]

    def __init__(self, config: OdinDataManagerConfig, **kwargs: Any) -> None:
        self._captured: dict[str, Cameras] = {}
        self._cache: dict[int, dict[str, Any]] = {}
        self._pending: dict[int, Future] = {}
        self._lock = threading.Lock()
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="odin-images")
        self.plan: Plan | None = None
        if config.data is not None:
            config.dataparser.data = config.data
        self._reads_images = kwargs.get("test_mode", "val") != "inference"
        check_before_parsing(config.dataparser, images=self._reads_images)
        chosen, config.cache_images = config.cache_images, "cpu"  # the base class moves whole sets to the device
        super().__init__(config, **kwargs)
        config.cache_images = chosen
        self._cache_device = self._choose_cache_device()

    @cached_property
    def dataset_type(self) -> type[OdinDataset]:  # type: ignore[override]
        """The dataset class, which reads every kind of image file and mask."""
        return OdinDataset

    def create_train_dataset(self) -> OdinDataset:
        """Checks what the dataparser found, and reads the training split."""
        self.train_dataparser_outputs = check_parsed(self.train_dataparser_outputs, "train", self._reads_images)
        dataset = super().create_train_dataset()
        self._captured["train"], dataset.cameras = dataset.cameras, undistorted_cameras(dataset.cameras)
        self.train_cameras = dataset.cameras
        return dataset

    def create_eval_dataset(self) -> OdinDataset:
        """Checks and reads the held-out split."""
        outputs = self.dataparser.get_dataparser_outputs(split=self.test_split)
        outputs = check_parsed(outputs, self.test_split, self._reads_images)
        dataset = OdinDataset(dataparser_outputs=outputs, scale_factor=self.config.camera_res_scale_factor)
        self._captured["eval"], dataset.cameras = dataset.cameras, undistorted_cameras(dataset.cameras)
        return dataset

    def sample_train_cameras(self) -> list[int]:
        """Unused by training, which follows the plan; the base class wants a list of all views."""
        return list(range(len(self.train_dataset)))

    # Images ---------------------------------------------------------------------------------------------------

    def _load_view(self, split: Literal["train", "eval"], index: int) -> dict[str, Any]:
        """Decodes one view and undistorts it."""
        dataset = self.train_dataset if split == "train" else self.eval_dataset
        data = dataset.get_data(index, image_type=self.config.cache_images_type)
        camera = self._captured[split][index].reshape(())
        height, width = data["image"].shape[:2]
        if (width, height) != (camera.width.item(), camera.height.item()):
            raise ValueError(
                f"{dataset.image_filenames[index]} is {width}x{height}, but its camera is "
                f"{camera.width.item()}x{camera.height.item()}; undistort or resize the images like the model"
            )
        if is_distorted(camera):
            _, data = undistort(camera, data)
        return data

    def _load_images(self, split: Literal["train", "eval"], cache_images_device: str) -> list[dict[str, torch.Tensor]]:
        """All images of a split on the host; training itself loads single views as they come."""
        count = len(self.train_dataset if split == "train" else self.eval_dataset)
        return [
            self._load_view(split, index)
            for index in track(range(count), description=f"Reading {split} images", transient=True)
        ]

    def _choose_cache_device(self) -> torch.device:
        """Where decoded training images stay; says so once."""
        device = torch.device(self.device)
        if device.type == "cpu" or self.config.cache_images == "cpu":
            return torch.device("cpu")
        fits = self.cache_bytes() <= GPU_CACHE_SHARE * torch.cuda.mem_get_info(device)[0]
        return device if fits or self.config.cache_images == "gpu" else torch.device("cpu")

    def cache_bytes(self, views: list[int] | None = None) -> int:
        """Estimated bytes of the decoded images of the given training views (default: all)."""
        cameras = self.train_dataset.cameras
        pixels = (cameras.width * cameras.height).reshape(-1)
        if views is not None:
            pixels = pixels[views]
        return int(pixels.sum()) * 3 * (1 if self.config.cache_images_type == "uint8" else 4)

    def follow(self, plan: Plan, views: list[int]) -> None:
        """From now on serve views by this plan.

        Args:
            plan: which view each (step, lane) renders.
            views: the views that this rank renders; only they will be read and kept.
        """
        self.plan = plan
        CONSOLE.log(
            f"Images: this process keeps {len(views)} of {len(self.train_dataset)} training views, about "
            f"{self.cache_bytes(views) / 2**20:.0f} MB as {self.config.cache_images_type} on {self._cache_device}"
        )

    def prefetch(self, views: list[int]) -> None:
        """Starts decoding views that will be needed soon, in the background."""
        with self._lock:
            for view in views:
                if view not in self._cache and view not in self._pending:
                    self._pending[view] = self._loader.submit(self._load_view, "train", view)

    def view_data(self, view: int) -> dict[str, Any]:
        """The decoded data of a training view; a shallow copy that the caller may change."""
        with self._lock:
            pending = self._pending.pop(view, None)
        if view not in self._cache:
            data = pending.result() if pending is not None else self._load_view("train", view)
            data["image"] = data["image"].to(self._cache_device)
            self._cache[view] = data
        return self._cache[view].copy()

    def train_view(self, view: int) -> tuple[Cameras, dict[str, Any]]:
        """Camera ``[1]`` and data of a training view, on the model's device."""
        data = self.view_data(view)
        data["image"] = data["image"].to(self.device, non_blocking=True)
        camera = self.train_dataset.cameras[view : view + 1].to(self.device)
        camera.metadata = {**(camera.metadata or {}), "cam_idx": view}
        return camera, data

    def next_train(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """The view that the plan gives to this step's first lane."""
        if self.plan is None:
            raise RuntimeError("the data manager has no plan yet; call follow(plan, views) before training")
        self.prefetch([self.plan.view(step + ahead, 0) for ahead in range(1, self.config.prefetch + 1)])
        return self.train_view(self.plan.view(step, 0))

    def get_train_rays_per_batch(self) -> int:
        """Pixels of one training image (the largest), for the viewer's resolution control."""
        cameras = self.train_dataset.cameras
        return int((cameras.width * cameras.height).max())

    @property
    def fixed_indices_eval_dataloader(self) -> list[tuple[Cameras, dict]]:
        """(camera, data) of all held-out views."""
        cameras = self.eval_dataset.cameras.to(self.device)
        pairs = []
        for index, data in enumerate(self.cached_eval):
            pairs.append((cameras[index : index + 1], {**data, "image": data["image"].to(self.device)}))
        return pairs
