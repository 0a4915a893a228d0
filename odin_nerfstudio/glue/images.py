"""Reading training images and masks of every usual pixel format.

nerfstudio decodes with ``numpy.array(PIL.Image)``: palette indices become grey values, 16-bit values wrap around,
CMYK is taken for RGBA and two-channel images fail an assertion. Here each format is converted to 8-bit RGB(A) or
refused by name. No image is ever rotated: neither nerfstudio nor COLMAP heeds the EXIF orientation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from odin_nerfstudio.glue.input_error import InputError, bad_input

FLOAT_SUFFIXES = (".exr", ".hdr", ".pfm")
CONVERTIBLE_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
TONE_MAP = "tone-map or rescale it to 8 or 16 bits per channel and save it as PNG"
EXIF_ORIENTATION = 0x0112
TAIL_BYTES = 65536
TIFF_BITS_PER_SAMPLE = 258
TIFF_PHOTOMETRIC = 262
DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image without decoding it, and close the file afterwards.

    Raises:
        InputError: the file is missing, empty, of no known or of a floating-point format, or has a pixel format
            that is not converted.
    """
    try:
        image = Image.open(path)
    except FileNotFoundError as error:
        raise bad_input(
            path, "no such file", "restore it, or remove its view from the COLMAP model or transforms.json"
        ) from error
    except UnidentifiedImageError as error:
        if path.stat().st_size == 0:
            raise bad_input(path, "the file is empty", "copy it again from its source") from error
        if path.suffix.lower() in FLOAT_SUFFIXES:
            raise bad_input(path, f"floating-point image ({path.suffix})", TONE_MAP) from error
        raise bad_input(path, "not an image that can be read", "convert it to PNG or JPEG") from error
    except Image.DecompressionBombError as error:
        raise bad_input(path, f"too many pixels ({error})", "downscale the images first") from error
    except DECODER_ERRORS as error:
        raise bad_input(path, f"cannot be opened ({error})", "copy it again from its source") from error
    with image:
        _refuse_unsupported(path, image)
        yield image


def image_orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8 (1: upright, or not given; 5 to 8: width and height are swapped on display)."""
    try:
        return int(image.getexif().get(EXIF_ORIENTATION, 1))
    except (*DECODER_ERRORS, TypeError):
        return 1  # damaged EXIF data gives no orientation; the pixels may still be sound


def load_image(path: Path, scale_factor: float = 1.0, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Read an image as 8-bit RGB, or RGBA where it has transparency.

    Grey values are repeated; palettes and CMYK are looked up or converted without colour profiles, like RGB files;
    16-bit values ``v`` become ``round(v * 255 / 65535)``.

    Args:
        path: the image file.
        scale_factor: factor on width and height; bilinear with antialiasing, rounded down as nerfstudio does.
        size: (width, height) [pixels] to scale to instead, if ``scale_factor`` is not 1.

    Returns:
        uint8 [H, W, 3 or 4].

    Raises:
        InputError: the file is missing, truncated, not an image, or of a format that is not converted.
    """
    with open_image(path) as image:
        rgb = _decode(path, image)
        if scale_factor != 1.0:
            scaled = size or (int(rgb.width * scale_factor), int(rgb.height * scale_factor))
            rgb = rgb.resize((max(scaled[0], 1), max(scaled[1], 1)), resample=Image.Resampling.BILINEAR)
        return np.array(rgb, dtype=np.uint8)


def load_mask(path: Path, scale_factor: float = 1.0, size: tuple[int, int] | None = None) -> npt.NDArray[np.bool_]:
    """Read a mask: True where the pixel is used in training.

    A pixel is used where its colour is not black (any channel non-zero, as in nerfstudio and COLMAP; palettes are
    looked up, not read as indices) and, if there is an alpha channel, not transparent. A mask of one colour whose
    alpha varies is drawn in the alpha channel: there alpha alone decides. JPEG is lossy and makes black inexact, so
    there the threshold is half the range.

    Args:
        path: the mask file.
        scale_factor: factor on width and height; nearest neighbour, rounded down as nerfstudio does.
        size: (width, height) [pixels] to scale to instead, if ``scale_factor`` is not 1.

    Returns:
        bool [H, W, 1].

    Raises:
        InputError: as :func:`load_image`.
    """
    with open_image(path) as image:
        threshold = 128 if image.format in ("JPEG", "MPO") else 1
        if image.mode.startswith("I"):
            # 16-bit labels: small values would round to zero in 8 bits
            used = np.asarray(_array(path, image), dtype=np.int64) > 0
        else:
            values = np.array(_decode(path, image))
            used = values[..., :3].max(axis=2) >= threshold
            if values.shape[2] == 4:
                alpha = values[..., 3]
                one_colour = not np.any(values[..., :3] != values[0, 0, :3])
                used = alpha > 0 if one_colour and np.any(alpha != alpha[0, 0]) else used & (alpha > 0)
    if scale_factor != 1.0:
        mask = Image.fromarray(used.astype(np.uint8))
        scaled = size or (int(mask.width * scale_factor), int(mask.height * scale_factor))
        mask = mask.resize((max(scaled[0], 1), max(scaled[1], 1)), resample=Image.Resampling.NEAREST)
        used = np.array(mask) > 0
    return used[..., None]


def _raw_mode(image: Image.Image) -> str:
    """The layout in the file, such as ``RGB;16B``; Pillow reports such an image as plain ``RGB``."""
    tiles = getattr(image, "tile", None)
    if not tiles:
        return image.mode
    arguments = tiles[0][3]
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else image.mode


def _is_16_bit_grey(image: Image.Image) -> bool:
    # Pillow before version 11 opens 16-bit grey PNGs as mode I, and every version does so with PGM
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _refuse_unsupported(path: Path, image: Image.Image) -> None:
    if image.mode in CONVERTIBLE_MODES or _is_16_bit_grey(image):
        return
    names = {"F": "floating-point image", "I": "32-bit integer image", "LAB": "CIELAB image"}
    name = names.get(image.mode, "pixel format is not supported")
    remedy = TONE_MAP if image.mode in ("F", "I") else "convert it to 8-bit RGB and save it as PNG"
    raise bad_input(path, f"{name} ({image.format}, mode {image.mode})", remedy)


def _array(path: Path, image: Image.Image) -> npt.NDArray[np.generic]:
    """Pixel values as Pillow decodes them."""
    try:
        return np.array(image)
    except DECODER_ERRORS as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: BaseException) -> InputError:
    return bad_input(path, f"truncated or damaged ({error})", "copy it again from its source, or remove its view")


def _decode(path: Path, image: Image.Image) -> Image.Image:
    """Convert to mode RGB or RGBA with 8 bits per channel."""
    if _is_16_bit_grey(image):
        return Image.fromarray(_grey_16_to_8(_array(path, image), image)).convert("RGB")
    raw_mode = _raw_mode(image)  # gone after loading
    try:
        image.load()
        if raw_mode.startswith(("RGB;16", "RGBA;16", "LA;16")):
            return Image.fromarray(_read_16_bit_colour(path))
        if image.mode == "La":
            return image.convert("LA").convert("RGBA")
        if "transparency" in image.info or image.mode in ("LA", "PA", "RGBa", "RGBA"):
            return image.convert("RGBA")
        return image.convert("RGB")
    except InputError:
        raise
    except DECODER_ERRORS as error:
        raise _broken(path, error) from error


def _grey_16_to_8(values: npt.NDArray[np.generic], image: Image.Image) -> npt.NDArray[np.uint8]:
    maximum = 65535
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(TIFF_BITS_PER_SAMPLE)
    if bits:
        maximum = 2 ** int(bits[0]) - 1  # 12-bit TIFF is unpacked to 16 bits, not scaled
    wide = np.clip(values.astype(np.int64), 0, maximum)
    if tags.get(TIFF_PHOTOMETRIC) == 0:
        wide = maximum - wide  # "white is zero"
    return ((wide * 255 + maximum // 2) // maximum).astype(np.uint8)


def _read_16_bit_colour(path: Path) -> npt.NDArray[np.uint8]:
    """[H, W, 3 or 4]; by OpenCV, since Pillow drops the low bytes of colour images."""
    import cv2

    # imdecode rather than imread: that one cannot open non-ASCII paths everywhere
    values = cv2.imdecode(np.fromfile(path, dtype=np.uint8), cv2.IMREAD_UNCHANGED)
    if values is None or values.dtype != np.uint16 or values.ndim != 3 or values.shape[2] not in (3, 4):
        raise bad_input(path, "16-bit image of an unusual layout", "convert it to 8-bit RGB and save it as PNG")
    order = [2, 1, 0, 3][: values.shape[2]]  # OpenCV has BGR(A)
    return ((values[..., order].astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)


def check_complete(path: Path, image: Image.Image) -> None:
    """Find truncated files, decoding only where the end of the file does not settle it.

    Raises:
        InputError: the file is truncated or damaged.
    """
    if _ends_well(path, image):
        return
    _array(path, image)


def _ends_well(path: Path, image: Image.Image) -> bool:
    """Whether the file is surely long enough; False means unknown."""
    size = path.stat().st_size
    tags = getattr(image, "tag_v2", None)
    if image.format == "TIFF" and tags is not None:
        # offsets and lengths of the strips, or of the tiles
        starts, lengths = (tags.get(273), tags.get(279)) if 273 in tags else (tags.get(324), tags.get(325))
        if not isinstance(starts, tuple) or not isinstance(lengths, tuple):
            return False
        return bool(starts) and max(s + n for s, n in zip(starts, lengths)) <= size
    if image.format not in ("JPEG", "MPO", "PNG"):
        return False
    with path.open("rb") as file:
        file.seek(max(size - TAIL_BYTES, 0))
        tail = file.read()
    if image.format == "PNG":
        return tail.endswith(b"IEND\xaeB`\x82")
    # an end marker after the last start of scan; not that of an embedded thumbnail, whose scan comes earlier
    return tail.rfind(b"\xff\xd9") > tail.rfind(b"\xff\xda")
