"""Training under torchrun: ``torchrun --nproc-per-node K -m odin_nerfstudio.train odin-splatfacto --data D``.

Takes the same arguments as ns-train. Without torchrun it is ns-train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tyro
from nerfstudio.configs.config_utils import convert_markup_to_ansi
from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion
from nerfstudio.scripts import train

from odin_nerfstudio.glue.launch import Place, end_with_parent, join_group, run_rank


def launch_as_rank(main_func: Callable, *, device_type: str, config: Any, **_: Any) -> None:
    """Takes the place of nerfstudio's launcher in a process that torchrun has already started as one rank."""
    place = Place.of_torchrun()
    if place is None:
        raise RuntimeError("launch_as_rank needs the environment of torchrun")
    run_rank(place, main_func, config)


def main() -> None:
    """Parses ns-train's arguments and trains."""
    place = Place.of_torchrun()
    if place is not None:
        end_with_parent()
    tyro.extras.set_accent_color("bright_yellow")
    config = tyro.cli(AnnotatedBaseConfigUnion, description=convert_markup_to_ansi(__doc__ or ""))
    if place is not None:
        join_group(place, config.machine.device_type)
        train.launch = launch_as_rank
    train.main(config)


if __name__ == "__main__":
    main()
