"""Input checks, made before the first step: each fault is one line that names the file and the remedy."""

from __future__ import annotations

from nerfstudio.data.dataparsers.base_dataparser import DataParserConfig, DataparserOutputs
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

from odin_nerfstudio.glue.check_colmap import check_colmap
from odin_nerfstudio.glue.check_transforms import check_transforms
from odin_nerfstudio.glue.check_views import check_points, check_views
from odin_nerfstudio.glue.input_error import InputError, bad_input

__all__ = ["InputError", "check_before_parsing", "check_parsed"]


def check_before_parsing(dataparser_config: DataParserConfig, images: bool = True) -> None:
    """Check what nerfstudio's parser is about to read, so that it neither fails obscurely nor asks on the terminal.

    Args:
        dataparser_config: nerfstudio-data and colmap are checked in full, other parsers only for their data folder.
        images: whether images will be read; False for viewing, exporting or rendering a trained model.

    Raises:
        InputError: the first fault found.
    """
    if not dataparser_config.data.exists():
        raise bad_input(dataparser_config.data, "no such file or folder", "pass the capture's folder by --data")
    if isinstance(dataparser_config, ColmapDataParserConfig):
        check_colmap(dataparser_config, images)
    elif isinstance(dataparser_config, NerfstudioDataParserConfig):
        check_transforms(dataparser_config, images)


def check_parsed(outputs: DataparserOutputs, split: str, images: bool = True) -> DataparserOutputs:
    """Check a parsed split's cameras, image files, masks and (``train`` only) points.

    Only headers and, for truncation, the ends of image files are read; other formats than JPEG, PNG and TIFF, and
    files whose end looks wrong, are decoded.

    Args:
        outputs: what the parser returned; not modified.
        split: ``train``, ``val`` or ``test``.
        images: whether images will be read; False for viewing, exporting or rendering a trained model.

    Returns:
        ``outputs`` with masks found under COLMAP's naming (``a.jpg.png``) and without non-finite points. Every
        ``points3D_*`` entry of the metadata loses the same rows, and ``points3D_rows`` (int64 [P]) names the rows
        that were kept.

    Raises:
        InputError: the first fault found, with the number of images that share it.
    """
    outputs = check_views(outputs, split, images)
    return check_points(outputs) if split == "train" else outputs
