"""odin-splatfacto-aa: splatfacto's antialiased mode, trained by Odin."""

from __future__ import annotations

from odin_nerfstudio.glue.method import splatfacto_method
from odin_nerfstudio.glue.odin_model import OdinSplatfactoModelConfig

odin_splatfacto_aa = splatfacto_method(
    "odin-splatfacto-aa",
    OdinSplatfactoModelConfig(rasterize_mode="antialiased"),
    "odin-splatfacto antialiased, for images at other resolutions than the captured ones.",
)
