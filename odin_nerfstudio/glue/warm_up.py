"""Compiles the CPU kernels once, before ranks start: each would compile them for itself."""

from __future__ import annotations

from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio import rendering


def warm_up_kernels(model: Any = None) -> None:
    """Compiles or loads everything that a step on the CPU needs; a cold compilation of the rasterizer is announced.

    Args:
        model: config of the model; one that renders otherwise than by `rendering.rasterization` has a
        ``warm_up(announce)``.
    """
    from odin_nerfstudio.rendering.losses import photometric_loss
    from odin_nerfstudio.runtime.warm_up import warm_up

    getattr(model, "warm_up", rendering.warm_up)(CONSOLE.log)
    image = torch.rand(16, 16, 3, generator=torch.Generator().manual_seed(0))
    photometric_loss(image.clone().requires_grad_(), image, 0.2).backward()
    warm_up()
