"""odin-splatfacto: splatfacto's settings, trained by Odin."""

from __future__ import annotations

from odin_nerfstudio.glue.method import splatfacto_method
from odin_nerfstudio.glue.odin_model import OdinSplatfactoModelConfig

odin_splatfacto = splatfacto_method(
    "odin-splatfacto",
    OdinSplatfactoModelConfig(),
    "Gaussian splatting on any device and on several, without global barriers (Odin).",
)
