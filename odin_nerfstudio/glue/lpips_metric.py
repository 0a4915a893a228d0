"""LPIPS where its weights can be had; where not, its shift-tolerant relative if that is installed, or nothing.

LPIPS needs AlexNet's weights, which no package on PyPI carries: they are downloaded, once. The package stlpips-pytorch
(extra ``perceptual``) carries the weights of ST-LPIPS (Ghildyal and Liu, "Shift-tolerant Perceptual Similarity Metric",
2022), another metric of the same kind. It goes by the name ``st_lpips``, for its values are not those of LPIPS.
"""

from __future__ import annotations

import importlib.util
import socket
from urllib.error import URLError

import torch
from nerfstudio.utils.rich_utils import CONSOLE

DOWNLOAD_TIMEOUT_S = 20.0


class OptionalLpips:
    """LPIPS that is built when it is first asked for.

    Not a module on purpose: its frozen weights belong to torchvision and torchmetrics, not into checkpoints.
    """

    def __init__(self) -> None:
        self._metric: torch.nn.Module | None = None
        self._substitute: torch.nn.Module | None = None
        self._unavailable = False

    def __call__(self, truth: torch.Tensor, rendered: torch.Tensor) -> torch.Tensor:
        """The metric of two images ``[1, 3, H, W]`` in [0, 1], or NaN where the weights cannot be had."""
        if self._metric is None and not self._unavailable:
            self._build(truth.device)
        if self._metric is None:
            return torch.tensor(float("nan"))
        return self._metric(truth, rendered)

    def substitute(self, truth: torch.Tensor, rendered: torch.Tensor) -> float | None:
        """ST-LPIPS of two images ``[H, W, 3]`` in [0, 1]; ``None`` where LPIPS can be had or the package is missing."""
        if not self._unavailable or importlib.util.find_spec("stlpips_pytorch") is None:
            return None
        if self._substitute is None:
            from stlpips_pytorch import stlpips  # pyright: ignore[reportMissingImports]

            self._substitute = stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False).to(truth.device)
        assert self._substitute is not None
        one, other = (image.permute(2, 0, 1)[None] for image in (truth, rendered))
        with torch.no_grad():
            return float(self._substitute(one, other, normalize=True))

    def _build(self, device: torch.device) -> None:
        from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)  # a silent network must not hold up an evaluation
        try:
            self._metric = LearnedPerceptualImagePatchSimilarity(normalize=True).to(device)
        except (URLError, OSError) as error:
            self._unavailable = True
            CONSOLE.log(
                f"LPIPS is left out of the metrics: its AlexNet weights could not be downloaded ({error}). "
                "Run once with internet access, or put them into torch's hub folder; "
                "or install odin-nerfstudio[perceptual] for the metric st_lpips.",
                markup=False,
            )
        finally:
            socket.setdefaulttimeout(timeout)
