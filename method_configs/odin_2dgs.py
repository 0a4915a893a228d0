"""odin-2dgs: surfels (2D Gaussian splatting), trained by Odin."""

from __future__ import annotations

from odin_nerfstudio.glue.method import splatfacto_method
from odin_nerfstudio.glue.odin_2dgs_model import Odin2dgsModelConfig

odin_2dgs = splatfacto_method(
    "odin-2dgs",
    Odin2dgsModelConfig(),
    "2D Gaussian splatting: flat surfels with normals, for surfaces, on any device and on several (Odin).",
)
