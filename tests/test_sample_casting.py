"""odin-sample's ray casting on a scene small enough to know the answer."""

from __future__ import annotations

import numpy as np
import pytest

from odin_nerfstudio.tools.sampling import materials as m
from odin_nerfstudio.tools.sampling.cameras import Cameras, look_along
from odin_nerfstudio.tools.sampling.mesh import MeshBuilder, icosphere
from odin_nerfstudio.tools.sampling.render import Renderer
from odin_nerfstudio.tools.sampling.tracks import Candidates, build_tracks, find


@pytest.fixture(scope="module")
def scene() -> tuple[Renderer, Cameras]:
    """A red box 2 m high, 4 m wide and 1 m deep on dark ground, seen from the south at the height of its roof and
    from straight above."""
    builder = MeshBuilder()
    builder.rectangle(-50, -50, 50, 50, 0.0, m.TRUNK, builder.add_object())
    red = builder.add_object(height=9.0, colour=(0.7, 0.0, 0.0))
    builder.box((-2, 0, 0), (2, 1, 2), m.PAINT, m.PAINT, red)
    centres = np.array([[0.0, -10.0, 2.0], [0.0, 0.5, 20.0]])
    rotations = look_along(np.array([[0.0, 1.0, -0.1], [0.0, 1e-6, -1.0]]))
    return Renderer(builder.build()), Cameras(64, 48, 60.0, centres, rotations)


def test_points_behind_a_building_are_not_observed(scene: tuple[Renderer, Cameras]) -> None:
    renderer, cameras = scene
    # Ground before the box, its south wall, ground right behind it, ground far behind it, its north wall.
    positions = np.array([[0.0, -2, 0], [1, 0, 1], [0, 2, 0], [0, 9, 0], [1, 1, 1]] * 40)
    normals = np.array([[0.0, 0, 1], [0, -1, 0], [0, 0, 1], [0, 0, 1], [0, 1, 0]] * 40)
    candidates = Candidates(positions, normals, np.zeros((200, 3), np.uint8))
    from_south, _ = find(renderer, cameras, 0, candidates, 100.0, np.random.default_rng(0))
    from_above, pixels = find(renderer, cameras, 1, candidates, 100.0, np.random.default_rng(0))
    assert set(from_south % 5) == {0, 1}
    # From above the walls are seen edge on; the ground 9 m to the north lies outside the image.
    assert set(from_above % 5) == {0, 2}
    expected, _ = cameras.project(1, positions[from_above])
    assert np.abs(pixels - expected).std() < 0.4
    near, _ = find(renderer, cameras, 0, candidates, 9.0, np.random.default_rng(0))
    assert set(near % 5) == {0}


def test_image_shows_the_box_where_the_camera_projects_it(scene: tuple[Renderer, Cameras]) -> None:
    renderer, cameras = scene
    image = renderer.image(cameras, 0).astype(int)
    red = image[..., 0] > 3 * (image[..., 1] + 1)
    corners, _ = cameras.project(0, np.array([[-2.0, 0, 2], [2, 0, 0]]))
    (left, top), (right, bottom) = np.round(corners).astype(int)
    expected = np.zeros_like(red)
    expected[max(top, 0) : bottom, left:right] = True
    wrong = red != expected
    # One pixel of blend along the outline.
    wrong[[top - 1, top, bottom - 1, bottom]] = False
    wrong[:, [left - 1, left, right - 1, right]] = False
    assert expected.sum() > 100
    assert not wrong.any()


def test_triangulation_fits_the_measurements_better_than_the_true_points(scene: tuple[Renderer, Cameras]) -> None:
    renderer, _ = scene
    rng = np.random.default_rng(1)
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    centres = np.stack([12 * np.cos(turn), 12 * np.sin(turn), np.full(12, 9.0)], axis=1).astype(np.float64)
    cameras = Cameras(128, 96, 110.0, centres, look_along(-centres))
    positions = np.concatenate([rng.uniform(-4, -2.1, (300, 2)), np.zeros((300, 1))], axis=1)
    candidates = Candidates(positions, np.tile([0.0, 0, 1], (300, 1)), np.zeros((300, 3), np.uint8))
    tracks = build_tracks(renderer, cameras, candidates, 300, 100.0, 0, lambda work, n: map(work, range(n)))
    assert len(tracks.positions) == 300
    true = np.linalg.norm(
        np.concatenate(
            [
                cameras.project(view, positions)[0][tracks.points[tracks.views == view]]
                - tracks.pixels[tracks.views == view]
                for view in range(12)
            ]
        ),
        axis=1,
    )
    true = np.bincount(tracks.points, true) / np.bincount(tracks.points)
    assert tracks.errors.mean() < 0.95 * true.mean()
    # 0.3 pixels at 15 m are 4 cm across a single ray.
    assert 0.002 < np.linalg.norm(tracks.positions - positions, axis=1).mean() < 0.04


def test_icosphere_is_closed_and_round() -> None:
    vertices, triangles = icosphere(2)
    assert triangles.shape == (320, 3)
    np.testing.assert_allclose(np.linalg.norm(vertices, axis=1), 1)
    a, b, c = (vertices[triangles[:, k]] for k in range(3))
    volume = np.einsum("tc,tc->t", a, np.cross(b, c)).sum() / 6
    assert volume == pytest.approx(4 / 3 * np.pi, rel=0.05)
