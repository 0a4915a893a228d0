"""Matching training views to a model's images by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np


def match_names(views: Sequence[str], images: Sequence[str]) -> np.ndarray:
    """Model image of each view.

    A view matches the image of the same name; else the one whose name ends the view's path (``data/images/a/b.png``
    and ``a/b.png``), the longest first; else the only one with the same file name; else the only one with the same stem
    (a downscaled copy may have another extension).

    Args:
        views: Image names or paths of the views.
        images: Names of the model's images, unique.

    Returns:
        Index into ``images``, -1 where none matches. (V,) int64

    Raises:
        ValueError: A view matches several images, or two views match one.
    """
    exact = {_posix(name): i for i, name in enumerate(images)}
    base: dict[str, list[int]] = defaultdict(list)
    stem: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(images):
        path = PurePosixPath(_posix(name))
        base[path.name].append(i)
        stem[path.stem].append(i)

    out = np.full(len(views), -1, np.int64)
    owner: dict[int, str] = {}
    for v, view in enumerate(views):
        path = PurePosixPath(_posix(view))
        parts = path.parts
        suffixes = ("/".join(parts[k:]) for k in range(len(parts)))
        found = next((exact[s] for s in suffixes if s in exact), None)
        if found is None:
            candidates = base.get(path.name) or stem.get(path.stem) or []
            if len(candidates) > 1:
                examples = ", ".join(repr(images[c]) for c in candidates[:3])
                raise ValueError(
                    f"view {view!r} could be any of {len(candidates)} images of the COLMAP model ({examples}); "
                    "give image names relative to the image folder, as the model has them"
                )
            found = candidates[0] if candidates else None
        if found is None:
            continue
        if found in owner:
            raise ValueError(
                f"views {owner[found]!r} and {view!r} both match image {images[found]!r} of the COLMAP model; "
                "give image names relative to the image folder, as the model has them"
            )
        owner[found] = view
        out[v] = found
    return out


def _posix(name: str) -> str:
    return str(name).replace("\\", "/")
