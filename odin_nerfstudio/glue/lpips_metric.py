"""LPIPS where its weights can be had, and nothing where they cannot."""

from __future__ import annotations

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
        self._unavailable = False

    def __call__(self, truth: torch.Tensor, rendered: torch.Tensor) -> torch.Tensor:
        """The metric of two images ``[1, 3, H, W]`` in [0, 1], or NaN where the weights cannot be had."""
        if self._metric is None and not self._unavailable:
            self._build(truth.device)
        if self._metric is None:
            return torch.tensor(float("nan"))
        return self._metric(truth, rendered)

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
                "Run once with internet access, or put them into torch's hub folder."
            )
        finally:
            socket.setdefaulttimeout(timeout)
