"""Tracks from COLMAP models and from geometry, against plain loops and pycolmap."""

from __future__ import annotations

import logging
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from odin_nerfstudio.planning import colmap
from odin_nerfstudio.planning.geometry import ViewGeometry
from odin_nerfstudio.planning.matching import match_names
from odin_nerfstudio.planning.tracks import find_model, tracks_for_dataset

IMAGES = {7: "a/1.png", 3: "a/2.png", 9: "b/1.png"}
# Per point: observing image ids; one image twice, one not registered, one point that only image 9 sees.
POINTS = [[7, 3], [3, 3, 9], [9], [7, 3, 9, 1000]]


def write_binary(folder: Path, points: list[list[int]] = POINTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cameras.bin").write_bytes(struct.pack("<Q", 0))
    with (folder / "images.bin").open("wb") as file:
        file.write(struct.pack("<Q", len(IMAGES)))
        for i, name in IMAGES.items():
            file.write(struct.pack("<I7dI", i, 0.5, 0.5, 0.5, 0.5, i, 2.0, 3.0, 1) + name.encode() + b"\0")
            file.write(struct.pack("<Q", 2) + bytes(48))
    with (folder / "points3D.bin").open("wb") as file:
        file.write(struct.pack("<Q", len(points)))
        for row, track in enumerate(points):
            file.write(struct.pack("<Q3d3BdQ", row * 5, row, 1.0, -row, 1, 2, 3, 0.5, len(track)))
            file.write(b"".join(struct.pack("<ii", i, 0) for i in track))


def write_text(folder: Path, points: list[list[int]] = POINTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cameras.txt").write_text("# none\n")
    lines = [f"{i} 0.5 0.5 0.5 0.5 {i} 2 3 1 {name}\n\n" for i, name in IMAGES.items()]
    (folder / "images.txt").write_text("# images\n" + "".join(lines))
    rows = [f"{r * 5} {r} 1 {-r} 1 2 3 0.5 " + " ".join(f"{i} 0" for i in t) for r, t in enumerate(points)]
    (folder / "points3D.txt").write_text("# points\n" + "\n".join(rows) + "\n")


@pytest.mark.parametrize("write", [write_binary, write_text])
def test_small_model_by_hand(tmp_path: Path, write) -> None:
    write(tmp_path / "sparse" / "0")
    names = ["b/1.png", "images/a/2.png", "unknown.png"]
    tracks = tracks_for_dataset(names, find_model(tmp_path))
    expected = np.array([[0, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(tracks.incidence.toarray(), expected)
    np.testing.assert_array_equal(tracks.xyz, [[r, 1, -r] for r in range(4)])
    # q = (1, 1, 1, 1) / 2 turns x to y, y to z, z to x: R^T t = (t_y, t_z, t_x).
    np.testing.assert_allclose(tracks.centers[0], [-2, -3, -9])
    assert np.isnan(tracks.centers[2]).all()
    assert (tracks.source, tracks.views, tracks.points) == ("tracks", 3, 4)


def test_agrees_with_pycolmap(captures: Path) -> None:
    pycolmap = pytest.importorskip("pycolmap")
    model = find_model(captures / "brighton_beach")
    assert model is not None
    reconstruction = pycolmap.Reconstruction(str(model))
    images = sorted(reconstruction.images.values(), key=lambda i: i.name)
    tracks = tracks_for_dataset([i.name for i in images], model)
    for row, image in enumerate(images):
        seen = [reconstruction.points3D[p.point3D_id].xyz for p in image.points2D if p.has_point3D()]
        mine = tracks.xyz[tracks.incidence[[row]].indices]
        np.testing.assert_allclose(np.unique(mine, axis=0), np.unique(np.array(seen, np.float32), axis=0), atol=1e-6)
        np.testing.assert_allclose(tracks.centers[row], image.projection_center(), atol=1e-9)


def test_two_formats_that_differ_warn_and_binary_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_binary(tmp_path)
    write_text(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert colmap.model_suffix(tmp_path) == ".bin"
    assert not caplog.records
    write_text(tmp_path, POINTS[:2])
    with caplog.at_level(logging.WARNING):
        assert colmap.model_suffix(tmp_path) == ".bin"
    assert "differ" in caplog.text


def test_mixed_formats_are_refused(tmp_path: Path) -> None:
    write_binary(tmp_path)
    (tmp_path / "points3D.bin").rename(tmp_path / "points3D.txt")
    assert find_model(tmp_path) is None
    with pytest.raises(ValueError, match="all .bin or all .txt"):
        tracks_for_dataset(["a/1.png"], tmp_path)


@pytest.mark.parametrize("name", ["images.bin", "points3D.bin"])
def test_every_cut_is_noticed(tmp_path: Path, name: str) -> None:
    write_binary(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for size in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{name} .*(cut|short)"):
            tracks_for_dataset(["a/1.png"], tmp_path)


def test_find_model_looks_where_processing_leaves_it(tmp_path: Path) -> None:
    for place in ("sparse", "sparse/0", "colmap/sparse/0"):
        write_binary(tmp_path / place)
        assert find_model(tmp_path) == tmp_path / place
        assert find_model(tmp_path / "transforms.json") == tmp_path / place
    shutil.rmtree(tmp_path / "colmap")
    shutil.rmtree(tmp_path / "sparse")
    assert find_model(tmp_path) is None


def test_names_match_by_path_then_file_name_then_stem() -> None:
    images = ["cam0/1.jpg", "cam1/1.jpg", "cam1/2.JPG"]
    views = ["data/images_2/cam1/1.jpg", "cam0\\1.jpg", "images_4/2.png", "3.jpg"]
    np.testing.assert_array_equal(match_names(views, images), [1, 0, 2, -1])


def test_ambiguous_names_are_refused() -> None:
    with pytest.raises(ValueError, match="could be any of 2 images"):
        match_names(["images_2/1.jpg"], ["cam0/1.jpg", "cam1/1.jpg"])
    with pytest.raises(ValueError, match="both match"):
        match_names(["1.png", "1.jpg"], ["1.jpg"])


def camera_row(count: int, step: float, depth_to_wall: float = 10.0) -> ViewGeometry:
    """Cameras side by side along x, ``step`` apart, looking along z; 90 degrees wide."""
    pose = np.tile(np.eye(4), (count, 1, 1))
    pose[:, 0, 3] = -step * np.arange(count)
    K = np.tile(np.array([[50.0, 0, 50], [0, 50, 50], [0, 0, 1]]), (count, 1, 1))
    size = np.full(count, 100)
    return ViewGeometry(pose, K, size, size)


def test_projection_drops_what_is_hidden() -> None:
    rng = np.random.default_rng(0)
    wall = np.column_stack([rng.uniform(-9, 9, 4000), rng.uniform(-9, 9, 4000), np.full(4000, 10.0)])
    screen = np.column_stack([rng.uniform(-1, 1, 4000), rng.uniform(-1, 1, 4000), np.full(4000, 2.0)])
    tracks = tracks_for_dataset(["0"], None, camera_row(1, 0.0), np.concatenate([wall, screen]))
    seen = tracks.incidence.toarray()[0]
    assert tracks.source == "projected points"
    assert seen[4000:].all()
    # The screen hides the middle of the wall, |x|, |y| < 5, but for the few cells that none of its points fell into;
    # cells at its edge may go either way.
    reach = np.abs(wall[:, :2]).max(axis=1)
    assert seen[:4000][reach < 4.5].mean() < 0.03
    assert seen[:4000][reach > 5.5].all()


def test_frusta_overlap_less_the_farther_apart() -> None:
    tracks = tracks_for_dataset([str(i) for i in range(6)], None, camera_row(6, 1.0), None)
    assert tracks.source == "sampled frusta"
    seen = tracks.incidence.toarray()
    shared = [int((seen[0] & seen[k]).sum()) for k in range(6)]
    assert shared == sorted(shared, reverse=True) and shared[1] > shared[5]


def test_model_of_other_images_falls_back_or_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_binary(tmp_path)
    with pytest.raises(ValueError, match="matches none of the views"):
        tracks_for_dataset(["x.png"], tmp_path)
    with caplog.at_level(logging.WARNING):
        tracks = tracks_for_dataset(["x.png"], tmp_path, camera_row(1, 1.0), np.array([[0.0, 0.0, 5.0]]))
    assert tracks.source == "projected points" and "not used" in caplog.text
