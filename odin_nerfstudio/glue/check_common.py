"""What the checks of COLMAP models and of transforms.json share."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from odin_nerfstudio.glue.input_error import bad_input

MAX_SIZE = 2**31 - 1
"""nerfstudio keeps image sizes in 32 bits."""
MIN_POINTS = 4
"""Initial scales come from each point's three nearest neighbours."""
THREADS = 8
"""Checks wait for the file system, so more threads than cores help."""


def missing_files(paths: Sequence[Path]) -> list[Path]:
    """Those of ``paths`` that are no files, in order."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [path for path, found in zip(paths, pool.map(Path.is_file, paths)) if not found]


def refuse_one_place(path: Path, centers: npt.NDArray[np.float64], center_method: str) -> None:
    """nerfstudio scales by the largest distance from the origin after centring; equal centres divide by zero.

    Args:
        path: the file to blame.
        centers: camera centres. [n, 3]
        center_method: the parser's option.

    Raises:
        InputError: all centres are equal within float32, or with ``none``, all are zero.
    """
    origin = 0.0 if center_method == "none" else centers.mean(axis=0)
    if np.abs(centers - origin).max() <= 1e-6 * np.abs(centers).max():
        raise bad_input(
            path,
            "all cameras stand at one place, so their poses cannot be scaled",
            "views from several places are needed to train; to go on, pass --auto-scale-poses False after the "
            "dataparser's name",
        )
