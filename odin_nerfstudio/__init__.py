"""Odin for nerfstudio: distributed training of Gaussian splats without global barriers."""

__version__ = "0.1.0"
