"""The data manager: views by the plan, only this rank's images, cameras as nerfstudio would undistort them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, FullImageDatamanagerConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from training import sample_scene

from odin_nerfstudio.glue.odin_datamanager import OdinDataManager, OdinDataManagerConfig
from odin_nerfstudio.glue.odin_options import OdinOptions
from odin_nerfstudio.glue.planning import plan_for, training_tracks


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_scene(tmp_path_factory.mktemp("scene"), views=20, size="64x48", points=300)


def manager(scene: Path, **options: Any) -> OdinDataManager:
    dataparser = NerfstudioDataParserConfig(load_3D_points=True)
    config = OdinDataManagerConfig(data=scene, dataparser=dataparser, cache_images_type="uint8", **options)
    return OdinDataManager(config)


def test_a_rank_serves_and_keeps_only_its_views(scene: Path) -> None:
    data = manager(scene)
    plan = plan_for(data, OdinOptions(), seed=1, ranks=2, views_per_step=2)
    mine, others = (set(plan.views_of_rank(rank).tolist()) for rank in (0, 1))
    assert mine | others == set(range(18)) and len(mine & others) < 2, "ranks split the views"
    data.follow(plan, sorted(mine))
    for step in range(20):
        view = plan.view(step, 0)
        camera, batch = data.train_view(view)
        assert view in mine and batch["image_idx"] == view
        assert batch["image"].dtype == torch.uint8 and batch["image"].shape == (48, 64, 3)
        assert torch.equal(camera.camera_to_worlds[0], data.train_dataset.cameras.camera_to_worlds[view])
    assert set(data._cache) <= mine
    assert data.cache_bytes(sorted(mine)) == len(mine) * 64 * 48 * 3


def test_where_lanes_turn_every_rank_serves_every_view(scene: Path) -> None:
    kept, turned = (
        plan_for(manager(scene), OdinOptions(turn_lanes=turn), seed=1, ranks=2, views_per_step=2)
        for turn in (False, True)
    )
    epoch = 9
    for step in range(4 * epoch):
        assert turned.views_of_step(step).tolist() == kept.views_of_step(step).tolist()
        assert turned.rank(step, 0) == step // epoch % 2 and kept.rank(step, 0) == 0
    assert turned.views_of_rank(0).tolist() == turned.views_of_rank(1).tolist() == list(range(18))


def test_prefetch_reads_in_the_background_and_once(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = manager(scene)
    reads: list[int] = []
    load = data._load_view
    monkeypatch.setattr(data, "_load_view", lambda split, index: (reads.append(index), load(split, index))[1])
    data.prefetch([3, 4, 3])
    deadline = time.monotonic() + 30
    while len(reads) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    data.view_data(3)["image"].shape  # noqa: B018  (the access is the point)
    data.prefetch([3])
    data.view_data(3)
    assert sorted(reads) == [3, 4]


def test_a_shallow_copy_protects_the_cache(scene: Path) -> None:
    data = manager(scene)
    data.view_data(0)["image"] = None
    assert data.view_data(0)["image"] is not None


def test_one_view_per_step_is_shuffled_in_either_order(scene: Path) -> None:
    data = manager(scene)
    for order in ("rlg", "random"):
        plan = plan_for(data, OdinOptions(order=order), seed=5)
        first, second = ([plan.view(18 * e + s, 0) for s in range(18)] for e in (0, 1))
        assert sorted(first) == sorted(second) == list(range(18))
        assert first != second and first != list(range(18))


def test_evaluation_sees_all_held_out_views(scene: Path) -> None:
    data = manager(scene)
    pairs = data.fixed_indices_eval_dataloader
    assert len(pairs) == len(data.eval_dataset) == 2
    assert pairs[0][1]["image"].shape == (48, 64, 3)


def test_tracks_of_the_model_beside_a_transforms_json_are_used(scene: Path, tmp_path: Path) -> None:
    assert training_tracks(manager(scene), seed=0).source == "tracks"
    bare = tmp_path / "bare"
    shutil.copytree(scene, bare)
    shutil.rmtree(bare / "colmap")
    assert training_tracks(manager(bare), seed=0).source == "projected points"


def test_distorted_cameras_equal_nerfstudios(scene: Path, tmp_path: Path) -> None:
    """Intrinsics are known before any image is read; images come out as nerfstudio's own data manager makes them."""
    distorted = tmp_path / "distorted"
    shutil.copytree(scene, distorted)
    shutil.rmtree(distorted / "colmap")
    transforms = json.loads((distorted / "transforms.json").read_text())
    transforms |= {"camera_model": "OPENCV", "k1": -0.12, "k2": 0.02, "p1": 0.001, "p2": -0.002}
    (distorted / "transforms.json").write_text(json.dumps(transforms))
    ours = manager(distorted)
    dataparser = NerfstudioDataParserConfig(load_3D_points=True)
    theirs = FullImageDatamanager(
        FullImageDatamanagerConfig(data=distorted, dataparser=dataparser, cache_images="gpu", cache_images_type="uint8")
    )
    images = theirs.cached_train  # the images' loading rewrites nerfstudio's cameras
    for name in ("fx", "fy", "cx", "cy", "width", "height"):
        assert torch.equal(getattr(ours.train_dataset.cameras, name), getattr(theirs.train_dataset.cameras, name)), name
    assert float(ours.train_dataset.cameras.fx[0]) != float(transforms["fl_x"])
    assert torch.equal(ours.view_data(2)["image"], images[2]["image"])


def test_image_of_another_size_than_its_camera_is_named(scene: Path, tmp_path: Path) -> None:
    from PIL import Image

    from odin_nerfstudio.glue.checks import InputError

    copy = tmp_path / "copy"
    shutil.copytree(scene, copy)
    path = sorted((copy / "images").iterdir())[3]
    Image.open(path).resize((60, 48)).save(path)
    with pytest.raises(InputError, match=path.name):
        manager(copy)
