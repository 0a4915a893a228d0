"""Pixel formats: what each becomes as a training image or mask, and which are refused by name."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from odin_nerfstudio.glue.images import check_complete, load_image, load_mask, open_image
from odin_nerfstudio.glue.input_error import InputError

WIDTH, HEIGHT = 6, 4


def save_png(path: Path, depth: int, color_type: int, pixels: np.ndarray, extra: bytes = b"") -> None:
    """A PNG of a kind that Pillow cannot write. ``pixels``: [H, W, C], big-endian where 16-bit."""
    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def plane(value: Any, dtype: npt.DTypeLike) -> np.ndarray:
    return np.broadcast_to(np.array(value, dtype=dtype), (HEIGHT, WIDTH, *np.shape(value))).copy()


def palette_image(transparency: int | bytes | None) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        image = Image.new("P", (WIDTH, HEIGHT), 1)
        image.putpalette([0, 0, 0, 200, 100, 50])
        options: dict[str, Any] = {} if transparency is None else {"transparency": transparency}
        image.save(path, **options)

    return save


def pillow(mode: str, value: int | tuple[int, ...], **options: Any) -> Callable[[Path], None]:
    return lambda path: Image.new(mode, (WIDTH, HEIGHT), value).save(path, **options)


def opencv(value: Any, dtype: npt.DTypeLike) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        path.write_bytes(cv2.imencode(path.suffix, plane(value, dtype))[1].tobytes())

    return save


# CMYK (10, 100, 200, 50): each channel is (255 - ink) * (255 - black) / 255
CMYK_RGB = (197, 125, 44)
CONVERTED = {
    "rgb.png": (pillow("RGB", (1, 2, 3)), (1, 2, 3)),
    "rgba.png": (pillow("RGBA", (1, 2, 3, 4)), (1, 2, 3, 4)),
    "rgb_colour_key.png": (pillow("RGB", (1, 2, 3), transparency=(1, 2, 3)), (1, 2, 3, 0)),
    "grey.png": (pillow("L", 77), (77, 77, 77)),
    "grey_alpha.png": (pillow("LA", (77, 5)), (77, 77, 77, 5)),
    "one_bit.png": (pillow("1", 1), (255, 255, 255)),
    "palette.png": (palette_image(None), (200, 100, 50)),
    "palette_clear.png": (palette_image(1), (200, 100, 50, 0)),
    "palette_half.png": (palette_image(bytes([255, 128])), (200, 100, 50, 128)),
    "cmyk.tif": (pillow("CMYK", (10, 100, 200, 50)), CMYK_RGB),
    "cmyk.jpg": (pillow("CMYK", (10, 100, 200, 50), quality=100, subsampling=0), CMYK_RGB),
    "grey16.png": (opencv(65535, np.uint16), (255, 255, 255)),
    "grey16_low.png": (opencv(129, np.uint16), (1, 1, 1)),  # 129 / 257 rounds up to 1
    "grey16.tif": (opencv(32768, np.uint16), (128, 128, 128)),
    "grey16.pgm": (opencv(32768, np.uint16), (128, 128, 128)),
    "rgb16.png": (opencv((65535, 255, 32768), np.uint16), (128, 1, 255)),  # OpenCV writes BGR
    "rgb16.tif": (opencv((65535, 255, 32768), np.uint16), (128, 1, 255)),
    "rgba16.png": (opencv((65535, 255, 32768, 257), np.uint16), (128, 1, 255, 1)),
    "grey_alpha16.png": (lambda path: save_png(path, 16, 4, plane((25700, 514), ">u2")), (100, 100, 100, 2)),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_formats_become_rgb_or_rgba(tmp_path: Path, name: str) -> None:
    save, expected = CONVERTED[name]
    save(tmp_path / name)
    image = load_image(tmp_path / name)
    assert image.dtype == np.uint8
    assert image.shape == (HEIGHT, WIDTH, len(expected))
    tolerance = 1 if name.endswith("jpg") else 0
    assert (np.abs(image.astype(int) - expected) <= tolerance).all(), image[0, 0]


def test_twelve_bit_tiff_uses_its_own_range(tmp_path: Path) -> None:
    path = tmp_path / "grey12.tif"
    packed = bytes([0xFF, 0xF8, 0x00] * 12)  # pixels 4095 and 2048, 12 bits each
    tags = [(256, 4, WIDTH), (257, 4, HEIGHT), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8)]
    tags += [(277, 3, 1), (278, 4, HEIGHT), (279, 4, len(packed))]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, kind, 1, v) for tag, kind, v in tags)
    path.write_bytes(b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + directory + b"\0\0\0\0")
    assert load_image(path)[0, :2, 0].tolist() == [255, 128]


@pytest.mark.parametrize(
    ("name", "save", "words"),
    [
        ("float.tif", opencv(1.0, np.float32), "floating-point"),
        ("float.hdr", opencv((1.0, 1.0, 1.0), np.float32), "floating-point"),
        ("float.exr", lambda path: path.write_bytes(b"\x76\x2f\x31\x01\x02\0\0\0"), "floating-point"),
        ("wide.tif", pillow("I", 70000), "32-bit integer"),
        ("lab.tif", pillow("LAB", (1, 2, 3)), "CIELAB"),
        ("empty.png", lambda path: path.write_bytes(b""), "empty"),
        ("notes.jpg", lambda path: path.write_bytes(b"not an image"), "not an image"),
        ("gone.png", lambda path: None, "no such file"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str, save: Callable, words: str) -> None:
    save(tmp_path / name)
    with pytest.raises(InputError, match=words) as error:
        load_image(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a16.png", "a.tif", "a.webp", "a.bmp"])
def test_truncated_files_are_found_without_decoding_whole_ones(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    whole, cut = tmp_path / name, tmp_path / f"cut_{name}"
    if name == "a16.png":
        whole.write_bytes(cv2.imencode(".png", noise.astype(np.uint16) * 257)[1].tobytes())
    else:
        Image.fromarray(noise).save(whole)
    content = whole.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    with open_image(whole) as image:
        check_complete(whole, image)
    assert load_image(whole).shape == (64, 96, 3)

    def check() -> None:
        with open_image(cut) as image:
            check_complete(cut, image)

    for read in (check, lambda: load_image(cut)):
        with pytest.raises(InputError, match=f"cut_{name}"):
            read()


def test_trailing_bytes_are_no_truncation(tmp_path: Path) -> None:
    path = tmp_path / "motion.jpg"
    Image.new("RGB", (WIDTH, HEIGHT), (9, 9, 9)).save(path)
    path.write_bytes(path.read_bytes() + b"\xff\xda" + bytes(100_000))
    with open_image(path) as image:
        check_complete(path, image)


def test_scaling_is_after_conversion_and_to_the_wanted_size(tmp_path: Path) -> None:
    save, expected = CONVERTED["palette_half.png"]
    save(tmp_path / "a.png")
    half = load_image(tmp_path / "a.png", 0.5)
    assert half.shape == (2, 3, 4)
    assert (np.abs(half.astype(int) - expected) <= 1).all()  # Pillow premultiplies by alpha and back
    assert load_image(tmp_path / "a.png", 0.5, size=(4, 3)).shape == (3, 4, 4)


def half_mask(mode: str, left: object, right: object) -> Image.Image:
    image = Image.new(mode, (WIDTH, HEIGHT), right)  # type: ignore[arg-type]
    image.paste(left, (0, 0, WIDTH // 2, HEIGHT))  # type: ignore[arg-type]
    return image


def palette_mask() -> Image.Image:
    image = half_mask("P", 0, 1)
    image.putpalette([255, 255, 255, 0, 0, 0])  # index 0 is white: the colour counts, not the index
    return image


@pytest.mark.parametrize(
    "image",
    [
        half_mask("1", 1, 0),
        half_mask("L", 1, 0),
        half_mask("L", 255, 0),
        half_mask("I;16", 1, 0),
        half_mask("RGB", (0, 0, 9), (0, 0, 0)),
        half_mask("LA", (255, 255), (0, 255)),
        half_mask("RGBA", (255, 255, 255, 255), (0, 0, 0, 255)),
        half_mask("RGBA", (0, 0, 0, 255), (0, 0, 0, 0)),  # drawn in the alpha channel
        half_mask("RGBA", (5, 5, 5, 255), (9, 9, 9, 0)),
        palette_mask(),
    ],
    ids=["1-bit", "0/1", "0/255", "16-bit", "rgb", "grey+alpha", "rgba", "alpha only", "both", "palette"],
)
def test_masks_of_every_kind(tmp_path: Path, image: Image.Image) -> None:
    path = tmp_path / "mask.png"
    image.save(path)
    mask = load_mask(path)
    assert mask.shape == (HEIGHT, WIDTH, 1)
    assert mask.dtype == np.bool_
    assert (mask[:, :, 0] == (np.arange(WIDTH) < WIDTH // 2)).all()
    assert load_mask(path, 0.5).shape == (2, 3, 1)


def test_jpeg_masks_ignore_compression_noise(tmp_path: Path) -> None:
    path = tmp_path / "mask.jpg"
    image = Image.new("L", (64, 64), 0)
    image.paste(255, (0, 0, 28, 64))  # not on a block border, so black is not exactly zero beside it
    image.save(path, quality=30)
    assert np.asarray(Image.open(path))[:, 28:].max() > 0
    assert (load_mask(path)[:, :, 0] == (np.arange(64) < 28)).all()
