"""Tracks of a dataset's training views, for any dataset that nerfstudio reads. nerfstudio is imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from odin_nerfstudio.planning import colmap
from odin_nerfstudio.planning.tracks import Tracks, find_model, tracks_for_dataset


def detect_dataparser(data: Path) -> str:
    """Name of the nerfstudio dataparser that fits a dataset.

    Raises:
        ValueError: There is no such dataset, or nothing that can be recognised.
    """
    if not data.exists():
        raise ValueError(f"--data {data} does not exist")
    if data.suffix == ".json" or (data / "transforms.json").is_file():
        return "nerfstudio-data"
    if (data / "transforms_train.json").is_file():
        return "blender-data"
    if data.is_dir() and find_model(data) is not None:
        return "colmap"
    raise ValueError(
        f"--data {data} holds neither transforms.json nor a COLMAP model (sparse/0 or colmap/sparse/0); "
        "for another kind of dataset name its nerfstudio dataparser with --dataparser"
    )


def training_tracks(data: Path, dataparser: str | None = None, seed: int = 0) -> Tracks:
    """Tracks of the views that ns-train would train on, in its order.

    Args:
        data: Dataset folder or file.
        dataparser: Name of a nerfstudio dataparser, None to detect it.
        seed: Seeds the geometric fallback.

    Raises:
        ValueError: The dataset cannot be read.
    """
    name = dataparser or detect_dataparser(data)
    if name == "colmap":
        return _colmap_tracks(data)
    from odin_nerfstudio.glue.cameras import view_geometry

    outputs = _parse(name, data)
    cameras = view_geometry(outputs.cameras)
    points = outputs.metadata.get("points3D_xyz")
    names = [Path(f).as_posix() for f in outputs.image_filenames]
    return tracks_for_dataset(
        names, find_model(data), cameras, None if points is None else points.cpu().numpy(), seed=seed
    )


def _colmap_tracks(data: Path) -> Tracks:
    """Only nerfstudio's split is used here: its parser would need the images, and minutes for a large model."""
    from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig

    model = find_model(data)
    if model is None:
        raise ValueError(f"--data {data} holds no COLMAP model in sparse/0 or colmap/sparse/0")
    images = colmap.read_images(model, colmap.model_suffix(model))
    names = [images.names[i] for i in np.argsort(images.ids, kind="stable")]
    config = ColmapDataParserConfig(data=data)
    parser: Any = config.setup()
    paths = [config.data / config.images_path / name for name in names]
    return tracks_for_dataset([names[i] for i in parser._get_image_indices(paths, "train")], model)


def _parse(name: str, data: Path) -> Any:
    from nerfstudio.configs.dataparser_configs import all_dataparsers

    if name not in all_dataparsers:
        raise ValueError(f"--dataparser {name!r} is none of nerfstudio's: {', '.join(sorted(all_dataparsers))}")
    config: Any = all_dataparsers[name]
    config.data = data
    # Seed points matter only without tracks. Asking for them where the file has none makes nerfstudio ask questions.
    if hasattr(config, "load_3D_points"):
        config.load_3D_points = name != "nerfstudio-data" or _names_points(data)
    return config.setup().get_dataparser_outputs("train")


def _names_points(data: Path) -> bool:
    import json

    path = data if data.suffix == ".json" else data / "transforms.json"
    return "ply_file_path" in json.loads(path.read_text(encoding="utf-8"))
