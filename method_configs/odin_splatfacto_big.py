"""odin-splatfacto-big: splatfacto-big's settings, more primitives for higher quality, trained by Odin."""

from __future__ import annotations

from odin_nerfstudio.glue.method import splatfacto_method
from odin_nerfstudio.glue.odin_model import OdinSplatfactoModelConfig

odin_splatfacto_big = splatfacto_method(
    "odin-splatfacto-big",
    OdinSplatfactoModelConfig(cull_alpha_thresh=0.005, densify_grad_thresh=0.0005),
    "odin-splatfacto with more primitives, as splatfacto-big.",
    bilateral_grid_lr=5e-3,
)
