"""Everything that has to be patched in nerfstudio 1.1.5 itself, in one place.

Each patch looks for what it replaces and says why it is needed. Whatever can be done by subclassing is done there
instead.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_lpips_download() -> Iterator[None]:
    """Keeps ``SplatfactoModel.populate_modules`` from building LPIPS.

    Reason: the constructor downloads weights, so that every command, training included, fails on a machine
    without internet. The model builds the metric itself when it first evaluates an image.
    """
    from torchmetrics.image import lpip

    original = lpip.LearnedPerceptualImagePatchSimilarity
    lpip.LearnedPerceptualImagePatchSimilarity = _NoLpips  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        lpip.LearnedPerceptualImagePatchSimilarity = original  # type: ignore[misc]


class _NoLpips(torch.nn.Module):
    """Stands in for LPIPS while splatfacto's constructor runs; has no parameters and is never called."""

    def __init__(self, **_: object) -> None:
        super().__init__()


def provide_ffmpeg() -> None:
    """Points mediapy, which writes the videos of ``ns-render``, at the ffmpeg inside the imageio-ffmpeg wheel.

    Reason: mediapy looks for an ``ffmpeg`` program only, and many machines have none. A program on the PATH wins.
    """
    if shutil.which("ffmpeg"):
        return
    import imageio_ffmpeg
    import mediapy

    if hasattr(mediapy, "set_ffmpeg"):
        mediapy.set_ffmpeg(imageio_ffmpeg.get_ffmpeg_exe())
