"""Tracks: which training view observed which 3D point.

They come from the COLMAP model where there is one, else from geometry. The source is logged and travels with the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import sparse

from odin_nerfstudio.planning import colmap
from odin_nerfstudio.planning.geometry import ViewGeometry, frustum_incidence, projected_incidence
from odin_nerfstudio.planning.matching import match_names

logger = logging.getLogger(__name__)

TRACKS = "tracks"
PROJECTED = "projected points"
FRUSTA = "sampled frusta"

MODEL_FOLDERS = ("colmap/sparse/0", "sparse/0", "sparse", "colmap/sparse")


@dataclass(frozen=True)
class Tracks:
    """Observations of P points by V views.

    Attributes:
        incidence: ``incidence[v, p]`` is true where view v observes point p; column indices ascend within a row.
            (V, P) CSR bool
        names: Image name of each view, in training order. V strings
        xyz: The points, in the frame that they came in. (P, 3) float32
        source: ``"tracks"`` (observed by SfM), ``"projected points"`` or ``"sampled frusta"`` (both geometry).
        centers: Camera centre of each view in the frame of ``xyz``, NaN where not known. (V, 3) float64
    """

    incidence: sparse.csr_matrix
    names: list[str]
    xyz: np.ndarray
    source: str
    centers: np.ndarray

    @property
    def views(self) -> int:
        """Number of views."""
        return len(self.names)

    @property
    def points(self) -> int:
        """Number of points, those that no training view observes included."""
        return len(self.xyz)


def find_model(data: Path) -> Path | None:
    """The COLMAP model that belongs to a capture, or None.

    Args:
        data: A capture folder, or the ``transforms.json`` in one. Looked at: ``colmap/sparse/0`` (as ns-process-data
            leaves it), ``sparse/0``, ``sparse``, ``colmap/sparse`` and the folder itself.
    """
    folder = Path(data)
    if folder.suffix == ".json" or folder.is_file():
        folder = folder.parent
    candidates = [folder / name for name in MODEL_FOLDERS] + [folder]
    return next((c for c in candidates if colmap.has_model(c)), None)


def tracks_for_dataset(
    image_names: Sequence[str],
    model_dir: Path | None,
    cameras: ViewGeometry | None = None,
    points: np.ndarray | None = None,
    *,
    seed: int = 0,
) -> Tracks:
    """Tracks of the training views: the model's own where there is one, else from geometry.

    Args:
        image_names: Names of the training views relative to the image folder (or paths), in training order.
        model_dir: Folder of a COLMAP model, or None.
        cameras: The views' cameras, for the geometric fallback.
        points: Seed points in the frame of ``cameras``, for the fallback. (P, 3)
        seed: Seeds the samples of the frustum fallback.

    Returns:
        Tracks with one row per name. Views that are missing in the model have an empty row.

    Raises:
        ValueError: A name is ambiguous, the model is broken, or there is neither a usable model nor cameras.
    """
    if not image_names:
        raise ValueError("image_names is empty: there are no training views to plan for")
    if cameras is not None and cameras.views != len(image_names):
        raise ValueError(f"cameras describe {cameras.views} views but image_names has {len(image_names)}")
    if model_dir is not None:
        tracks = _from_model(image_names, Path(model_dir))
        if tracks is not None:
            return tracks
    if cameras is None:
        where = f"the model in {model_dir} matches none of the views" if model_dir is not None else "no COLMAP model"
        raise ValueError(f"no tracks ({where}) and no cameras to derive co-visibility from; give either")
    names, centers = list(image_names), cameras.centers()
    if points is not None and len(points):
        logger.info("planning: no SfM tracks; co-visibility is estimated by projecting %d seed points", len(points))
        xyz = np.ascontiguousarray(points, dtype=np.float32)
        return Tracks(projected_incidence(cameras, xyz), names, xyz, PROJECTED, centers)
    logger.info("planning: no SfM tracks and no seed points; co-visibility is estimated from sampled frusta")
    incidence, xyz = frustum_incidence(cameras, seed=seed)
    return Tracks(incidence, names, xyz, FRUSTA, centers)


def _from_model(image_names: Sequence[str], model_dir: Path) -> Tracks | None:
    suffix = colmap.model_suffix(model_dir)
    images = colmap.read_images(model_dir, suffix)
    matched = match_names(image_names, images.names)
    missing = np.flatnonzero(matched < 0)
    if len(missing) == len(image_names):
        logger.warning(
            "planning: no view is in the COLMAP model %s (view %r, model image %r): its tracks are not used",
            model_dir, image_names[0], images.names[0] if images.names else "none",
        )  # fmt: skip
        return None
    if len(missing):
        logger.warning(
            "planning: %d of %d views are not in the COLMAP model %s (first: %r); they count as conflicting with all",
            len(missing), len(image_names), model_dir, image_names[missing[0]],
        )  # fmt: skip
    ids = np.where(matched >= 0, images.ids[matched], -1)
    model = colmap.read_tracks(model_dir, suffix, ids)
    centers = np.where(matched[:, None] >= 0, images.centers[matched], np.nan)
    incidence = incidence_matrix(model.indptr, model.indices, len(model.xyz))
    logger.info(
        "planning: SfM tracks of %d views from %s: %d points, %d observations",
        len(image_names) - len(missing), model_dir, len(model.xyz), incidence.nnz,
    )  # fmt: skip
    return Tracks(incidence, list(image_names), model.xyz, TRACKS, centers)


def incidence_matrix(indptr: np.ndarray, indices: np.ndarray, points: int) -> sparse.csr_matrix:
    """CSR bool matrix of a view-by-point pattern whose columns ascend within a row, without copying it."""
    shape = (len(indptr) - 1, points)
    matrix = sparse.csr_matrix((np.ones(len(indices), np.bool_), indices, indptr), shape=shape)
    matrix.has_sorted_indices = True
    matrix.has_canonical_format = True
    return matrix
