"""Compiles the CPU kernels once, before ranks start: each would compile them for itself."""

from __future__ import annotations

from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.rendering import warm_up


def warm_up_kernels() -> None:
    """Compiles or loads everything that a step on the CPU needs; a cold compilation is announced."""
    warm_up(CONSOLE.log)
