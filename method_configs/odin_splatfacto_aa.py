"""odin-splatfacto-aa: splatfacto antialiased, trained by Odin."""

from __future__ import annotations

from odin_nerfstudio.glue.aa_model import OdinAaModelConfig
from odin_nerfstudio.glue.method import splatfacto_method

odin_splatfacto_aa = splatfacto_method(
    "odin-splatfacto-aa",
    OdinAaModelConfig(),
    "odin-splatfacto antialiased, for images at other resolutions than the captured ones.",
)
