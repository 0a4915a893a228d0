"""odin-splatfacto-mcmc: splatfacto with gsplat's MCMC strategy, trained by Odin."""

from __future__ import annotations

from odin_nerfstudio.glue.mcmc_model import OdinMcmcModelConfig
from odin_nerfstudio.glue.method import splatfacto_method

odin_splatfacto_mcmc = splatfacto_method(
    "odin-splatfacto-mcmc",
    OdinMcmcModelConfig(),
    "odin-splatfacto with relocation and noise (3DGS-MCMC) in place of splitting and resets.",
)
