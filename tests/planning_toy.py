"""Small observations for the planning tests."""

from __future__ import annotations

import numpy as np
from scipy import sparse

from odin_nerfstudio.planning.tracks import Tracks


def tracks_of(seen: np.ndarray) -> Tracks:
    """Tracks of a dense incidence. (V, P) bool"""
    views, points = seen.shape
    return Tracks(
        sparse.csr_matrix(seen.astype(bool)), [f"{v}.png" for v in range(views)], np.zeros((points, 3), np.float32),
        "tracks", np.zeros((views, 3)),
    )  # fmt: skip
