"""nerfstudio's image dataset with loaders that read every usual pixel format."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset

from odin_nerfstudio.glue.images import load_image, load_mask
from odin_nerfstudio.glue.input_error import bad_input


class OdinDataset(InputDataset):
    """Images uint8 or float32 [H, W, 3 or 4], masks bool [H, W, 1].

    Args:
        dataparser_outputs: the views, after :func:`odin_nerfstudio.glue.checks.check_parsed`.
        scale_factor: factor on the image size. Images are scaled to exactly the size of the scaled camera.

    Raises:
        InputError: a mask colour without masks; on access, an image or mask that cannot be read.
    """

    def __init__(self, dataparser_outputs: DataparserOutputs, scale_factor: float = 1.0):
        super().__init__(dataparser_outputs, scale_factor)
        # kept apart: the data manager overwrites the cameras' sizes when it undistorts
        widths = self.cameras.width.flatten().tolist()
        heights = self.cameras.height.flatten().tolist()
        self._sizes = [(int(width), int(height)) for width, height in zip(widths, heights)]
        if self.mask_color is not None and dataparser_outputs.mask_filenames is None:
            first = dataparser_outputs.image_filenames[0] if dataparser_outputs.image_filenames else "the dataset"
            raise bad_input(
                first, "a mask colour is set, but the views have no masks", "add mask_path, or drop --mask-color"
            )

    def get_numpy_image(self, image_idx: int) -> npt.NDArray[np.uint8]:
        """The image, uint8 [H, W, 3 or 4]."""
        path = self._dataparser_outputs.image_filenames[image_idx]
        return load_image(path, self.scale_factor, self._sizes[image_idx])

    def get_mask(self, image_idx: int) -> torch.Tensor | None:
        """The mask, bool [H, W, 1], True where the pixel is used; None if the views have no masks."""
        if self._dataparser_outputs.mask_filenames is None:
            return None
        path = self._dataparser_outputs.mask_filenames[image_idx]
        return torch.from_numpy(load_mask(path, self.scale_factor, self._sizes[image_idx]))

    def get_data(self, image_idx: int, image_type: Literal["uint8", "float32"] = "float32") -> dict:
        """``image_idx``, ``image``, ``mask`` if there are masks, and what :meth:`get_metadata` adds.

        Raises:
            InputError: the image or its mask cannot be read, or their sizes differ.
            ValueError: ``image_type`` is neither ``uint8`` nor ``float32``.
        """
        if image_type not in ("uint8", "float32"):
            raise ValueError(f"image_type is {image_type!r}; use 'uint8' or 'float32'")
        image = self.get_image_float32(image_idx) if image_type == "float32" else self.get_image_uint8(image_idx)
        data: dict = {"image_idx": image_idx, "image": image}
        mask = self.get_mask(image_idx)
        if mask is not None:
            if mask.shape[:2] != image.shape[:2]:
                assert self._dataparser_outputs.mask_filenames is not None
                raise bad_input(
                    self._dataparser_outputs.mask_filenames[image_idx],
                    f"mask is {mask.shape[1]} x {mask.shape[0]}, its image {image.shape[1]} x {image.shape[0]}",
                    "export the masks in the size of the images",
                )
            data["mask"] = mask
            if self.mask_color is not None:
                data["image"] = _paint(image, mask, self.mask_color)
        data.update(self.get_metadata(data))
        return data


def _paint(image: torch.Tensor, mask: torch.Tensor, color: tuple[float, float, float]) -> torch.Tensor:
    """``image`` with ``color`` (0 to 1) where ``mask`` is False; an alpha channel becomes opaque there."""
    paint = torch.tensor([*color, 1.0][: image.shape[-1]])
    if image.dtype == torch.uint8:
        paint = (paint * 255).round().to(torch.uint8)
    return torch.where(mask, image, paint.to(image.dtype))
