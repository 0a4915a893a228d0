"""Faulty captures are refused before the first step by one line; odd but valid ones are read rightly.

Every capture is a few tiny images with a hand-written COLMAP model or transforms.json, parsed by nerfstudio itself.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.blender_dataparser import BlenderDataParserConfig
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image

from odin_nerfstudio.glue.checks import InputError, check_before_parsing, check_parsed
from odin_nerfstudio.glue.odin_dataset import OdinDataset

Size = tuple[int, int]
CAMERA_IDS = {"PINHOLE": 1, "OPENCV_FISHEYE": 5, "FULL_OPENCV": 6}
PARAMETERS = {"PINHOLE": 4, "OPENCV_FISHEYE": 8, "FULL_OPENCV": 12}


@dataclass
class Capture:
    """What :func:`write_colmap` and :func:`write_transforms` put on disk."""

    names: list[str] = field(default_factory=lambda: [f"{i}.png" for i in range(4)])
    sizes: list[Size] = field(default_factory=lambda: [(8, 6)] * 4)
    points: list[tuple[float, float, float]] = field(default_factory=lambda: [(i, i % 2, 5.0) for i in range(6)])
    blind: int | None = None
    """A view that observes no point and looks away."""
    camera_models: list[str] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)


def save_images(folder: Path, capture: Capture) -> None:
    for i, (name, size) in enumerate(zip(capture.names, capture.sizes)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (10 * i, 20, 30)).save(folder / name)


def write_colmap(data: Path, capture: Capture, suffix: str = ".bin", place: str = "sparse/0") -> Path:
    """One camera per image, cameras in a row along x looking along z. Returns the model's folder."""
    folder = data / place
    folder.mkdir(parents=True, exist_ok=True)
    models = capture.camera_models or ["PINHOLE"] * len(capture.names)
    cameras = [
        (i + 1, model, *size, [9.0, 9.0, size[0] / 2, size[1] / 2, *[0.01] * 8][: PARAMETERS[model]])
        for i, (model, size) in enumerate(zip(models, capture.sizes))
    ]
    poses = [(*((0.0, 0.0, 1.0, 0.0) if i == capture.blind else (1.0, 0.0, 0.0, 0.0)), -float(i), 0.0, 0.0)
             for i in range(len(capture.names))]  # fmt: skip
    for i, turn in enumerate(capture.turns):
        poses[i] = (turn, *poses[i][1:])
    seen = [[] if i == capture.blind else list(range(len(capture.points))) for i in range(len(capture.names))]
    tracks = [[(i + 1, p) for i in range(len(capture.names)) if p in seen[i]] for p in range(len(capture.points))]
    if suffix == ".txt":
        lines = [f"{i} {m} {w} {h} {' '.join(map(str, parameters))}" for i, m, w, h, parameters in cameras]
        (folder / "cameras.txt").write_text("\n".join(["# cameras", *lines, ""]), encoding="utf-8")
        lines = []
        for i, (name, pose) in enumerate(zip(capture.names, poses)):
            lines += [f"{i + 1} {' '.join(map(str, pose))} {i + 1} {name}", " ".join(f"1.5 2.5 {p}" for p in seen[i])]
        (folder / "images.txt").write_text("\n".join(["# images", *lines, ""]), encoding="utf-8")
        lines = [
            f"{p} {' '.join(map(str, xyz))} {p} 2 3 0.5 " + " ".join(f"{i} {k}" for i, k in tracks[p])
            for p, xyz in enumerate(capture.points)
        ]
        (folder / "points3D.txt").write_text("\n".join(["# points", *lines, ""]), encoding="utf-8")
        return folder
    content = struct.pack("<Q", len(cameras))
    for i, model, w, h, parameters in cameras:
        content += struct.pack(f"<iiQQ{len(parameters)}d", i, CAMERA_IDS[model], w, h, *parameters)
    (folder / "cameras.bin").write_bytes(content)
    content = struct.pack("<Q", len(capture.names))
    for i, (name, pose) in enumerate(zip(capture.names, poses)):
        content += struct.pack("<i7di", i + 1, *pose, i + 1) + name.encode() + b"\0" + struct.pack("<Q", len(seen[i]))
        content += b"".join(struct.pack("<ddq", 1.5, 2.5, p) for p in seen[i])
    (folder / "images.bin").write_bytes(content)
    content = struct.pack("<Q", len(capture.points))
    for p, xyz in enumerate(capture.points):
        content += struct.pack("<QdddBBBdQ", p, *xyz, p, 2, 3, 0.5, len(tracks[p]))
        content += b"".join(struct.pack("<ii", *entry) for entry in tracks[p])
    (folder / "points3D.bin").write_bytes(content)
    return folder


def write_transforms(data: Path, capture: Capture, **top: Any) -> dict[str, Any]:
    """Frames with their own intrinsics, as read back from transforms.json."""
    frames = []
    for i, (name, (width, height)) in enumerate(zip(capture.names, capture.sizes)):
        pose = np.eye(4)
        pose[0, 3] = i
        intrinsics = {"fl_x": 9.0, "fl_y": 9.0, "cx": width / 2, "cy": height / 2, "w": width, "h": height}
        frames.append({"file_path": f"images/{name}", "transform_matrix": pose.tolist(), **intrinsics})
    meta: dict[str, Any] = {**top, "frames": frames}
    save_meta(data, meta)
    return meta


def save_meta(data: Path, meta: dict[str, Any]) -> None:
    data.mkdir(parents=True, exist_ok=True)
    (data / "transforms.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")


def colmap(data: Path, **options: Any) -> ColmapDataParserConfig:
    return ColmapDataParserConfig(data=data, **{"colmap_path": Path("sparse/0"), "eval_mode": "all", **options})


def transforms(data: Path, **options: Any) -> NerfstudioDataParserConfig:
    return NerfstudioDataParserConfig(data=data, **{"eval_mode": "all", **options})


def parse(config: Any, split: str = "train") -> DataparserOutputs:
    """As the data manager does."""
    check_before_parsing(config)
    return check_parsed(config.setup().get_dataparser_outputs(split), split)


def refusal(config: Any, split: str = "train") -> str:
    """The one line that refuses the capture."""
    with pytest.raises(InputError) as error:
        parse(config, split)
    assert "\n" not in str(error.value)
    return str(error.value)


def good(data: Path, capture: Capture | None = None, suffix: str = ".bin") -> Path:
    """A sound COLMAP capture; returns its model's folder."""
    capture = capture or Capture()
    save_images(data / "images", capture)
    return write_colmap(data, capture, suffix)


# COLMAP models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".bin", ".txt"])
def test_a_sound_model_passes_with_several_sizes_and_a_blind_view(tmp_path: Path, suffix: str) -> None:
    capture = Capture(sizes=[(8, 6), (6, 8), (10, 4), (8, 6)], blind=2)
    good(tmp_path, capture, suffix)
    outputs = parse(colmap(tmp_path))
    assert outputs.metadata["points3D_rows"].tolist() == list(range(6))
    dataset = OdinDataset(outputs)
    for i, (width, height) in enumerate(capture.sizes):
        data = dataset.get_data(i, image_type="uint8")
        assert data["image"].shape == (height, width, 3)
        assert data["image"][0, 0].tolist() == [10 * i, 20, 30]
        assert (dataset.cameras.width[i].item(), dataset.cameras.height[i].item()) == (width, height)
    half = OdinDataset(outputs, scale_factor=0.29)
    assert all(half[i]["image"].shape[:2] == (half.cameras.height[i], half.cameras.width[i]) for i in range(4))


def test_spaces_and_non_ascii_paths_end_to_end(tmp_path: Path) -> None:
    data = tmp_path / "mön ami – данные"
    capture = Capture(names=[f"cám 1/bild {i} ü.jpg" for i in range(4)])
    good(data, capture)
    for name in capture.names:
        mask = data / "masks à" / f"{name}.png"
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 6), 255).save(mask)
    outputs = parse(colmap(data, masks_path=Path("masks à")))
    assert [path.relative_to(data / "images").as_posix() for path in outputs.image_filenames] == capture.names
    assert OdinDataset(outputs)[3]["mask"].all()
    write_transforms(data, capture)
    assert len(parse(transforms(data)).image_filenames) == 4


def test_text_names_with_spaces_are_refused(tmp_path: Path) -> None:
    good(tmp_path, Capture(names=["a b.png", *[f"{i}.png" for i in range(3)]]), ".txt")
    message = refusal(colmap(tmp_path))
    assert "images.txt" in message and "'a b.png'" in message and "binary" in message


def test_model_elsewhere_names_the_option(tmp_path: Path) -> None:
    good(tmp_path)
    assert "`colmap --colmap-path sparse/0`" in refusal(colmap(tmp_path, colmap_path=Path("colmap/sparse/0")))
    assert f"`colmap --data {tmp_path} --colmap-path sparse/0`" in refusal(transforms(tmp_path))


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def truncate(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * keep)])

    return truncate


@pytest.mark.parametrize(
    ("fault", "file", "words"),
    [
        (remove("images.bin"), "sparse/0", "incomplete COLMAP model (only cameras.bin, points3D.bin)"),
        (remove("points3D.bin"), "sparse/0", "incomplete COLMAP model"),
        (cut("cameras.bin", 0.5), "cameras.bin", "damaged"),
        (cut("images.bin", 0.9), "images.bin", "truncated"),
        (cut("points3D.bin", 0.99), "points3D.bin", "truncated"),
        (cut("points3D.bin", 0), "points3D.bin", "truncated"),
        (lambda model: (model / "images.bin").write_bytes(bytes(8)), "images.bin", "no registered images"),
        (lambda model: (model / "points3D.bin").write_bytes(bytes(8)), "points3D.bin", "has no points"),
        (lambda model: (model / "cameras.txt").write_text(""), "cameras.txt", "remove the .txt files"),
    ],
    ids=lambda value: value.replace("/", " ") if isinstance(value, str) else "",
)
def test_missing_empty_and_damaged_models(tmp_path: Path, fault: Callable, file: str, words: str) -> None:
    fault(good(tmp_path))
    message = refusal(colmap(tmp_path))
    assert file in message and words in message


def test_damaged_text_models(tmp_path: Path) -> None:
    model = good(tmp_path, suffix=".txt")
    (model / "points3D.txt").write_text("1 0.0 0.0 1.0 3 3\n")
    assert "points3D.txt: line 1 is not a point" in refusal(colmap(tmp_path))
    (model / "images.txt").write_text("1 1 0 0 0 0 0 0 1 0.png\n1.5 2.5\n")
    assert "images.txt: line 2 is not a list" in refusal(colmap(tmp_path))
    (model / "images.txt").write_text("1 1 0 0 0\n")
    assert "images.txt: line 1 is not an image" in refusal(colmap(tmp_path))


@pytest.mark.parametrize("suffix", [".bin", ".txt"])
def test_fewer_than_four_points_unless_random(tmp_path: Path, suffix: str) -> None:
    good(tmp_path, Capture(points=[(0.0, 0.0, 5.0)] * 3), suffix)
    message = refusal(colmap(tmp_path))
    assert f"points3D{suffix}: 3 points" in message and "--load-3D-points False" in message
    assert "points3D_xyz" not in parse(colmap(tmp_path, load_3D_points=False)).metadata


def test_non_finite_points_are_dropped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [(0.0, 0.0, 5.0), (math.nan, 0, 5), (1.0, 0.0, 5.0), (0, math.inf, 5), (0, 1.0, 5), (1.0, 1.0, 5)]
    good(tmp_path, Capture(points=points))
    metadata = parse(colmap(tmp_path)).metadata
    assert "2 of 6 points are dropped" in capsys.readouterr().out
    assert metadata["points3D_rows"].tolist() == [0, 2, 4, 5]
    assert metadata["points3D_rgb"][:, 0].tolist() == [0, 2, 4, 5]
    assert all(len(metadata[key]) == 4 for key in metadata if key.startswith("points3D_"))
    assert torch.isfinite(metadata["points3D_xyz"]).all()


def test_too_few_finite_points(tmp_path: Path) -> None:
    good(tmp_path, Capture(points=[(math.nan, 0.0, 5.0)] * 3 + [(0.0, 0.0, 5.0)] * 3))
    message = refusal(colmap(tmp_path))
    assert "3 points with finite coordinates (of 6)" in message and "--load-3D-points False" in message
    parse(colmap(tmp_path), split="test")  # only training needs points


def test_non_finite_colours_are_dropped(tmp_path: Path) -> None:
    good(tmp_path)
    config = colmap(tmp_path)
    outputs = config.setup().get_dataparser_outputs("train")
    rgb = outputs.metadata["points3D_rgb"].float()
    rgb[3, 1] = math.nan
    outputs.metadata["points3D_rgb"] = rgb
    assert check_parsed(outputs, "train").metadata["points3D_rows"].tolist() == [0, 1, 2, 4, 5]
    assert len(outputs.metadata["points3D_xyz"]) == 6  # the argument is left as it was


def test_text_and_binary_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = Capture()
    good(tmp_path, capture, ".txt")
    write_colmap(tmp_path, capture, ".bin")
    parse(colmap(tmp_path))
    assert "differ" not in capsys.readouterr().out
    write_colmap(tmp_path, Capture(names=capture.names[:3], sizes=capture.sizes[:3], points=capture.points[:5]), ".bin")
    outputs = parse(colmap(tmp_path))
    said = capsys.readouterr().out
    assert "4 and 3 images, 6 and 5 points" in said and "images are read from the .txt" in said
    assert (len(outputs.image_filenames), len(outputs.metadata["points3D_xyz"])) == (4, 5)


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        (Capture(camera_models=["PINHOLE", "OPENCV_FISHEYE", "PINHOLE", "PINHOLE"]), "k4"),
        (Capture(camera_models=["FULL_OPENCV"] * 4), "FULL_OPENCV is not supported"),
        (Capture(turns=[math.nan]), "pose of image 0.png is not finite"),
        (Capture(turns=[0.0]), "pose of image 0.png is not finite"),
        (Capture(names=["0.png"] * 4), "4 images are named 0.png"),
    ],
)
def test_unusable_cameras_and_poses(tmp_path: Path, capture: Capture, words: str) -> None:
    good(tmp_path, capture)
    assert words in refusal(colmap(tmp_path))


def test_mixed_camera_models(tmp_path: Path) -> None:
    model = good(tmp_path, suffix=".txt")
    lines = (model / "cameras.txt").read_text().splitlines()
    lines[2] = "2 OPENCV_FISHEYE 8 6 9 9 4 3 0 0 0 0"
    (model / "cameras.txt").write_text("\n".join(lines))
    message = refusal(colmap(tmp_path))
    assert "PINHOLE and OPENCV_FISHEYE cameras" in message and "image_undistorter" in message


# Images -------------------------------------------------------------------------------------------------------


def test_missing_images(tmp_path: Path) -> None:
    good(tmp_path)
    (tmp_path / "images/2.png").unlink()
    message = refusal(colmap(tmp_path))
    assert "images/2.png: 1 of 4 registered images are missing" in message and "image_deleter" in message
    (tmp_path / "images").rename(tmp_path / "input")
    (tmp_path / "input/2.png").write_bytes((tmp_path / "input/1.png").read_bytes())
    assert "no such image folder" in refusal(colmap(tmp_path))
    (tmp_path / "images").mkdir()
    message = refusal(colmap(tmp_path))
    assert "none of the 4 registered images is on disk" in message and "--images-path input" in message


def test_viewing_needs_no_images(tmp_path: Path) -> None:
    write_colmap(tmp_path, Capture())
    config = colmap(tmp_path, downscale_factor=1)
    check_before_parsing(config, images=False)
    check_parsed(config.setup().get_dataparser_outputs("train"), "train", images=False)


@pytest.mark.parametrize("factor", [None, 2])
def test_missing_downscaled_folder_never_asks(tmp_path: Path, factor: int | None) -> None:
    size = (1800, 4) if factor is None else (8, 6)
    good(tmp_path, Capture(sizes=[size] * 4))
    message = refusal(colmap(tmp_path, downscale_factor=factor))
    assert "images_2" in message and "`colmap --downscale-factor 1`" in message
    assert "camera-res-scale-factor 0.5" in message
    save_images(tmp_path / "images_2", Capture(sizes=[(size[0] // 2, size[1] // 2)] * 4))
    assert parse(colmap(tmp_path, downscale_factor=factor)).image_filenames[0].parent.name == "images_2"


def test_downscaled_by_another_rounding(tmp_path: Path) -> None:
    good(tmp_path, Capture(sizes=[(9, 6)] * 4))
    save_images(tmp_path / "images_2", Capture(sizes=[(5, 3)] * 4))
    message = refusal(colmap(tmp_path, downscale_factor=2))
    assert "image is 5 x 3, its camera 4 x 3" in message and "--downscale-rounding-mode" in message
    assert "(4 images are affected)" in message
    parse(colmap(tmp_path, downscale_factor=2, downscale_rounding_mode="ceil"))


def test_exif_rotated_images(tmp_path: Path) -> None:
    capture = Capture(names=[f"{i}.jpg" for i in range(4)])
    good(tmp_path, capture)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 8)).save(tmp_path / "images/1.jpg", exif=exif)
    message = refusal(colmap(tmp_path))
    assert "1.jpg: image is 6 x 8, its camera 8 x 6; EXIF orientation 6" in message and "-auto-orient" in message
    Image.new("RGB", (8, 6)).save(tmp_path / "images/1.jpg", exif=exif)  # as COLMAP saw it: not rotated by anybody
    assert OdinDataset(parse(colmap(tmp_path)))[1]["image"].shape == (6, 8, 3)
    Image.new("RGB", (6, 8)).save(tmp_path / "images/1.jpg")
    assert "rotate the images by 90 degrees" in refusal(colmap(tmp_path))
    Image.new("RGB", (80, 60)).save(tmp_path / "images/1.jpg")
    assert "image is 80 x 60, its camera 8 x 6" in refusal(colmap(tmp_path))


def test_unreadable_images_are_found_before_training(tmp_path: Path) -> None:
    good(tmp_path)
    image = tmp_path / "images/1.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)).save(image)
    image.write_bytes(image.read_bytes()[:-40])
    assert "1.png: truncated" in refusal(colmap(tmp_path))
    image.write_bytes(b"")
    assert "1.png: the file is empty" in refusal(colmap(tmp_path))
    Image.new("F", (8, 6)).save(image, format="TIFF")
    assert "1.png: floating-point image" in refusal(colmap(tmp_path))


# Masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("naming", ["{stem}.png", "{name}.png"])
def test_masks_by_nerfstudio_and_colmap_naming(tmp_path: Path, naming: str) -> None:
    capture = Capture(names=[f"{i}.jpg" for i in range(4)])
    good(tmp_path, capture)
    (tmp_path / "masks").mkdir()
    for i, name in enumerate(capture.names):
        mask = Image.new("L", (8, 6), 0)
        mask.putpixel((i, 0), 255)
        mask.save(tmp_path / "masks" / naming.format(stem=Path(name).stem, name=name))
    config = colmap(tmp_path, masks_path=Path("masks"))
    dataset = OdinDataset(parse(config))
    for i in range(4):
        mask = dataset[i]["mask"]
        assert mask.shape == (6, 8, 1) and mask.dtype == torch.bool
        assert mask.nonzero().tolist() == [[0, i, 0]]
    last = tmp_path / "masks" / naming.format(stem="3", name="3.jpg")
    Image.new("L", (4, 3)).save(last)
    assert f"{last.name}: mask is 4 x 3, its image 8 x 6" in refusal(config)
    last.unlink()
    assert "3.png: mask of 3.jpg is missing" in refusal(config)


def test_masks_and_mask_colour_in_transforms(tmp_path: Path) -> None:
    save_images(tmp_path / "images", Capture())
    meta = write_transforms(tmp_path, Capture())
    save_images(tmp_path / "masks", Capture(sizes=[(8, 6)] * 4))
    Image.new("P", (8, 6), 0).save(tmp_path / "masks/0.png")
    for frame in meta["frames"]:
        frame["mask_path"] = frame["file_path"].replace("images", "masks")
    save_meta(tmp_path, meta)
    dataset = OdinDataset(parse(transforms(tmp_path, mask_color=(1.0, 0.0, 0.5))))
    assert dataset.get_data(0, "uint8")["image"][0, 0].tolist() == [255, 0, 128]
    assert dataset.get_data(0, "float32")["image"][0, 0].tolist() == [1.0, 0.0, 0.5]
    assert dataset.get_data(1, "uint8")["image"][0, 0].tolist() == [10, 20, 30]
    del meta["frames"][0]["mask_path"]
    save_meta(tmp_path, meta)
    assert "mask_path is given for 3 of 4 frames" in refusal(transforms(tmp_path))
    write_transforms(tmp_path, Capture())
    with pytest.raises(InputError, match="no masks"):
        OdinDataset(parse(transforms(tmp_path, mask_color=(1.0, 0.0, 0.5))))


def test_alpha_is_kept_or_laid_over_the_parser_s_colour(tmp_path: Path) -> None:
    good(tmp_path)
    Image.new("RGBA", (8, 6), (200, 100, 0, 0)).save(tmp_path / "images/0.png")
    outputs = parse(colmap(tmp_path))
    assert OdinDataset(outputs).get_data(0, "uint8")["image"][0, 0].tolist() == [200, 100, 0, 0]
    outputs.alpha_color = torch.tensor([1.0, 1.0, 1.0])
    assert OdinDataset(outputs).get_data(0, "uint8")["image"][0, 0].tolist() == [255, 255, 255]


# transforms.json ----------------------------------------------------------------------------------------------


def test_transforms_with_several_sizes(tmp_path: Path) -> None:
    capture = Capture(sizes=[(8, 6), (6, 8), (10, 4), (8, 6)])
    save_images(tmp_path / "images", capture)
    write_transforms(tmp_path, capture)
    dataset = OdinDataset(parse(transforms(tmp_path)))
    assert [tuple(dataset[i]["image"].shape) for i in range(4)] == [(h, w, 3) for w, h in capture.sizes]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda meta: meta.update(frames=[]), "no frames"),
        (lambda meta: meta["frames"][1].pop("file_path"), "frame 1 has no file_path"),
        (lambda meta: meta["frames"][1].update(transform_matrix=[[1, 0], [0, 1]]), "frame 1 (images/1.png)"),
        (lambda meta: meta["frames"][1]["transform_matrix"][0].__setitem__(3, math.nan), "not a finite 4 x 4 matrix"),
        (lambda meta: meta["frames"][2].pop("fl_x"), "frame 2 (images/2.png) has no valid fl_x"),
        (lambda meta: meta["frames"][2].update(fl_y=-1), "has no valid fl_y"),
        (lambda meta: meta.update(w=0), "w is 0"),
        (lambda meta: meta.update(w=80, h=60), "image is 8 x 6, its camera 80 x 60"),
        (lambda meta: meta.update(camera_model="THIN_PRISM"), "unknown camera_model 'THIN_PRISM'"),
        (lambda meta: meta["frames"][3].update(file_path="images/0.png"), "2 frames have file_path images/0.png"),
        (lambda meta: meta["frames"][0].update(file_path="images/0"), "ending (there is 0.png)"),
        (lambda meta: meta.update(ply_file_path="gone.ply"), "gone.ply: no such point cloud"),
        (lambda meta: [f["transform_matrix"][0].__setitem__(3, 0) for f in meta["frames"]], "--auto-scale-poses False"),
    ],
)
def test_faulty_transforms(tmp_path: Path, change: Callable, words: str) -> None:
    save_images(tmp_path / "images", Capture())
    meta = write_transforms(tmp_path, Capture())
    change(meta)
    save_meta(tmp_path, meta)
    assert words in refusal(transforms(tmp_path, load_3D_points=True))


def test_transforms_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(transforms(tmp_path / "nowhere"))
    assert "no such file or folder" in refusal(BlenderDataParserConfig(data=tmp_path / "nowhere"))
    assert "transforms.json: no such file" in refusal(transforms(tmp_path))
    (tmp_path / "transforms.json").write_text('{"frames": [')
    assert "transforms.json: not valid JSON" in refusal(transforms(tmp_path))
    (tmp_path / "transforms.json").write_text("[]")
    assert "no frames" in refusal(transforms(tmp_path))


def test_transforms_never_asks_for_a_point_cloud(tmp_path: Path) -> None:
    save_images(tmp_path / "images", Capture())
    write_transforms(tmp_path, Capture())
    write_colmap(tmp_path, Capture(), place="colmap/sparse/0")
    message = refusal(transforms(tmp_path, load_3D_points=True))
    assert "no ply_file_path" in message and "nerfstudio-data --load-3D-points False" in message


def test_point_cloud_of_transforms(tmp_path: Path) -> None:
    save_images(tmp_path / "images", Capture())
    write_transforms(tmp_path, Capture(), ply_file_path="points.ply")

    def save(points: list[str]) -> None:
        names = [f"property float {axis}" for axis in "xyz"] + [f"property uchar {c}" for c in ("red", "green", "blue")]
        header = ["ply", "format ascii 1.0", f"element vertex {len(points)}", *names, "end_header"]
        (tmp_path / "points.ply").write_text("\n".join([*header, *points, ""]))

    config = transforms(tmp_path, load_3D_points=True)
    save(["0 0 1 9 9 9"] * 3)
    assert "points.ply: 3 points, at least 4 are needed" in refusal(config)
    save(["0 0 1 9 9 9", "nan 0 1 8 8 8", "1 0 1 7 7 7", "0 1 1 6 6 6", "1 1 1 5 5 5"])
    metadata = parse(config).metadata
    assert metadata["points3D_rows"].tolist() == [0, 2, 3, 4]
    assert metadata["points3D_rgb"][:, 0].tolist() == [9, 7, 6, 5]
    (tmp_path / "points.ply").write_text("plyer")
    assert "points.ply: not a PLY file" in refusal(config)


def test_downscaled_transforms(tmp_path: Path) -> None:
    save_images(tmp_path / "images", Capture())
    write_transforms(tmp_path, Capture())
    message = refusal(transforms(tmp_path, downscale_factor=2))
    assert "images_2" in message and "`nerfstudio-data --downscale-factor 1`" in message
    save_images(tmp_path / "images_2", Capture(sizes=[(4, 3)] * 4))
    assert OdinDataset(parse(transforms(tmp_path, downscale_factor=2)))[0]["image"].shape == (3, 4, 3)
    twins = Capture(names=["a/0.png", "b/0.png", "c.png", "d.png"])
    save_images(tmp_path / "images", twins)
    write_transforms(tmp_path, twins)
    assert "2 images of different folders share the name 0.png" in refusal(transforms(tmp_path, downscale_factor=2))


def test_all_cameras_at_one_place(tmp_path: Path) -> None:
    one = Capture(names=["0.png"], sizes=[(8, 6)])
    good(tmp_path, one)
    message = refusal(colmap(tmp_path))
    assert "images.bin: all cameras stand at one place" in message and "--auto-scale-poses False" in message
    assert len(parse(colmap(tmp_path, auto_scale_poses=False)).image_filenames) == 1


def test_empty_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Capture(names=["0.png"], sizes=[(8, 6)])
    good(tmp_path, one)
    assert "--eval-mode all" in refusal(colmap(tmp_path, eval_mode="interval", auto_scale_poses=False))
    save_images(tmp_path / "images", Capture())
    write_transforms(tmp_path, Capture())
    check_before_parsing(transforms(tmp_path))
    parse(transforms(tmp_path, eval_mode="fraction"), split="val")
    assert "split val has no images" in capsys.readouterr().out
