"""odin-sample: the capture's files agree with each other, with pycolmap and with nerfstudio's parsers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pycolmap
import pytest
import scipy.sparse
from PIL import Image

from odin_nerfstudio.tools.sample import CitySample, ObjectSample, generate, main


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "city"
    assert generate(CitySample(output=folder, views=100, size="80x60"))
    return folder


@pytest.fixture(scope="module")
def courtyard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "object"
    assert generate(ObjectSample(output=folder, views=24, size="80x60", points=2000))
    return folder


def _model(folder: Path) -> pycolmap.Reconstruction:
    return pycolmap.Reconstruction(folder / "colmap" / "sparse" / "0")


def _incidence(model: pycolmap.Reconstruction) -> scipy.sparse.csr_matrix:
    """[views, points] 1 where a view observed a point."""
    views, points = [], []
    for row, image in enumerate(sorted(model.images)):
        seen = [p.point3D_id for p in model.images[image].points2D if p.has_point3D()]
        views += [row] * len(seen)
        points += seen
    shape = (model.num_images(), max(model.points3D) + 1)
    return scipy.sparse.csr_matrix((np.ones(len(views)), (views, points)), shape=shape)


def _shares(folder: Path) -> np.ndarray:
    """For each ordered pair of views, the share of the second one's points that the first one observed."""
    seen = _incidence(_model(folder))
    common = (seen @ seen.T).toarray()
    shares = common / np.maximum(common.diagonal(), 1)
    return shares[~np.eye(len(shares), dtype=bool)]


@pytest.mark.parametrize("scene", ["city", "courtyard"])
def test_pycolmap_reads_the_model_and_agrees_on_the_errors(scene: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(scene)
    model = _model(folder)
    assert {image.name for image in model.images.values()} == {path.name for path in (folder / "images").iterdir()}
    for key in sorted(model.points3D)[::5]:
        point, residuals = model.points3D[key], []
        for element in point.track.elements:
            image = model.images[element.image_id]
            observation = image.points2D[element.point2D_idx]
            assert observation.point3D_id in model.points3D
            projected = image.project_point(point.xyz)
            assert projected is not None
            residuals.append(np.linalg.norm(projected - observation.xy))
        assert len(residuals) >= 3
        assert point.error == pytest.approx(np.mean(residuals), rel=1e-6)
        assert point.error < 1.5
    # Pixel noise of 0.3 per axis has a mean length of 0.376; positions fitted to it leave somewhat less.
    assert 0.25 < model.compute_mean_reprojection_error() < 0.376


@pytest.mark.parametrize("scene", ["city", "courtyard"])
def test_both_dataparsers_give_the_cameras_and_points_of_the_model(scene: str, request: pytest.FixtureRequest) -> None:
    from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    folder = request.getfixturevalue(scene)
    model = _model(folder)
    by_name = {image.name: image for image in model.images.values()}
    for config in (NerfstudioDataParserConfig(data=folder, load_3D_points=True), ColmapDataParserConfig(data=folder)):
        outputs = config.setup().get_dataparser_outputs(split="train")
        assert len(outputs.image_filenames) > 0.8 * len(by_name)
        transform = outputs.dataparser_transform.numpy().astype(np.float64)
        turn, shift = transform[:, :3], transform[:, 3]

        poses = outputs.cameras.camera_to_worlds.numpy().astype(np.float64)
        for path, pose in zip(outputs.image_filenames, poses):
            assert path.is_file()
            image = by_name[path.name]
            centre = turn.T @ (pose[:, 3] / outputs.dataparser_scale - shift)
            np.testing.assert_allclose(centre, image.projection_center(), atol=2e-4)
            world_to_camera = (turn.T @ pose[:, :3] * (1, -1, -1)).T
            np.testing.assert_allclose(world_to_camera, image.cam_from_world().rotation.matrix(), atol=1e-5)
        camera = model.cameras[1]
        assert outputs.cameras.fx[0].item() == pytest.approx(camera.focal_length_x)
        assert outputs.cameras.cx[0].item() == camera.principal_point_x == 40
        assert (outputs.cameras.width[0].item(), outputs.cameras.height[0].item()) == (80, 60)

        points = outputs.metadata["points3D_xyz"].numpy().astype(np.float64)
        points = (points / outputs.dataparser_scale - shift) @ turn
        expected = np.array([model.points3D[key].xyz for key in sorted(model.points3D)])
        np.testing.assert_allclose(points, expected, atol=5e-4)
        colours = np.array([model.points3D[key].color for key in sorted(model.points3D)])
        np.testing.assert_allclose(outputs.metadata["points3D_rgb"].numpy(), colours, atol=1)


def test_most_views_of_the_city_share_nothing(city: Path) -> None:
    shares = _shares(city)
    assert np.mean(shares == 0) > 0.55
    seen = _incidence(_model(city))
    assert np.median(np.diff(seen.indptr)) > 300


def test_most_views_of_the_object_share_much(courtyard: Path) -> None:
    shares = _shares(courtyard)
    assert np.mean(shares == 0) < 0.01
    assert np.mean(shares > 0.15) > 0.6


def test_images_show_the_points_where_the_model_has_them(courtyard: Path) -> None:
    model = _model(courtyard)
    shown, expected = [], []
    for image in model.images.values():
        pixels = np.asarray(Image.open(courtyard / "images" / image.name)).astype(float)
        for observation in image.points2D:
            x, y = np.minimum(observation.xy.astype(int), (79, 59))
            shown.append(pixels[y, x])
            expected.append(model.points3D[observation.point3D_id].color)
    # Corners are where colours change most, so a pixel's noise costs much; the images of the next view give 0.2.
    assert np.corrcoef(np.ravel(shown), np.ravel(expected).astype(float))[0, 1] > 0.7


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", [CitySample, ObjectSample])
def test_same_arguments_give_the_same_bytes(tmp_path: Path, kind: type[CitySample] | type[ObjectSample]) -> None:
    for name, seed in (("first", 3), ("second", 3), ("other", 4)):
        generate(kind(output=tmp_path / name, views=4, size="64x48", points=200, seed=seed))
    first, second, other = (_bytes(tmp_path / name) for name in ("first", "second", "other"))
    assert set(first) == {
        "sample.json", "transforms.json", "sparse_pc.ply", *(f"images/frame_{view:05d}.jpg" for view in range(1, 5)),
        *(f"colmap/sparse/0/{part}.bin" for part in ("cameras", "images", "points3D")),
    }  # fmt: skip
    assert first == second
    assert all(first[name] != other[name] for name in first if "cameras" not in name)


def test_command_is_idempotent_and_never_replaces_what_it_did_not_make(tmp_path: Path, capsys) -> None:
    target = tmp_path / "capture"
    arguments = ["city", "--output", str(target), "--views", "3", "--size", "48x32", "--points", "60"]
    main(arguments)
    assert "Wrote 3 views" in capsys.readouterr().out
    before = _bytes(target)
    main(arguments)
    assert "already there" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="seed 0 instead of 1; add --overwrite"):
        main([*arguments, "--seed", "1"])
    assert _bytes(target) == before
    main([*arguments, "--seed", "1", "--overwrite"])
    assert _bytes(target) != before
    assert [path.name for path in tmp_path.iterdir()] == ["capture"]

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("precious")
    with pytest.raises(SystemExit, match="not empty and no capture of odin-sample"):
        main(["city", "--output", str(mine), "--overwrite"])
    assert (mine / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"views": 1}, "--views 1 is out of range"),
        ({"size": "320*240"}, "--size '320\\*240' is not of the form"),
        ({"size": "4x4"}, "--size 4x4 is out of range"),
        ({"points": 0}, "--points 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_impossible_arguments_are_named(tmp_path: Path, changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(CitySample(output=tmp_path / "none", **changed))
    assert not list(tmp_path.iterdir())
