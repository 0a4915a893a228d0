"""The contract with real trainings on 1 to 4 ranks: E1, E2, E4, bit for bit, structural steps inside.

E1 quality equals barrier. E2 the number of ranks does not change the result. E4 resume is exact, also with another
number of ranks. (E3, equality with the plain loop, is in test_plain_loop.py; faults are in test_faults.py.)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import run_on_ranks
from training import differences, latest, sample_scene

pytestmark = pytest.mark.timeout(900)  # the fixture runs thirteen trainings

STEPS = 300
VIEWS_PER_STEP = 4
USUAL: dict[str, Any] = {
    "pipeline__odin__views_per_step": VIEWS_PER_STEP,
    "pipeline__odin__debug": True,
    "pipeline__model__num_downscales": 0,
}
PER_VIEW: dict[str, Any] = {
    **USUAL,
    "pipeline__odin__order": "random",
    "pipeline__model__camera_optimizer__mode": "SO3xR3",
    "pipeline__model__use_bilateral_grid": True,
    "pipeline__model__grid_shape": (4, 4, 2),
    "pipeline__model__use_scale_regularization": True,
    "pipeline__model__num_downscales": 1,
}
SHORT = 60


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The usual scene; one with fewer training views than lanes; one with a view that sees nothing."""
    folder = tmp_path_factory.mktemp("scenes")
    usual = sample_scene(folder / "usual", views=24, size="64x48", points=400)
    few, blind = folder / "few" / "object", folder / "blind" / "object"
    for scene in (few, blind):
        shutil.copytree(usual, scene)
        shutil.rmtree(scene / "colmap")  # the frames no longer fit the model
        transforms = json.loads((scene / "transforms.json").read_text())
        if scene is few:
            transforms["frames"] = transforms["frames"][::7]
        else:
            pose = transforms["frames"][3]["transform_matrix"]
            for row in pose[:3]:
                row[0], row[2] = -row[0], -row[2]  # turned by 180 degrees, away from the scene
                row[3] *= 3
        (scene / "transforms.json").write_text(json.dumps(transforms))
    return {"usual": usual, "few": few, "blind": blind}


@pytest.fixture(scope="module")
def results(scenes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs of all runs, by name."""
    root = tmp_path_factory.mktemp("runs")

    def job(name: str, scene: str, steps: int, **options: Any) -> tuple[Path, Path, int, dict[str, Any]]:
        return scenes[scene], root / name, steps, options

    barrier, quality = {"pipeline__odin__mode": "barrier"}, {"pipeline__odin__mode": "quality"}
    run_on_ranks(
        1,
        [
            job("1-barrier", "usual", STEPS, **USUAL, **barrier),
            job("1-per-view", "usual", SHORT, **PER_VIEW, **barrier),
            job("1-few", "few", SHORT, **USUAL, **quality),
            job("1-blind", "blind", SHORT, **USUAL, **quality),
        ],
    )
    run_on_ranks(
        2,
        [
            job("2-barrier", "usual", STEPS, **USUAL, **barrier),
            job("2-half", "usual", STEPS // 2, **USUAL, **quality),
            job("2-per-view", "usual", SHORT, **PER_VIEW, **quality),
            job("2-few", "few", SHORT, **USUAL, **quality),
            job("2-blind", "blind", SHORT, **USUAL, **quality),
        ],
    )
    half = next((root / "2-half").rglob("nerfstudio_models"))
    run_on_ranks(
        3,
        [
            job("3-quality", "usual", STEPS, **USUAL, **quality),
            job("3-resumed", "usual", STEPS - STEPS // 2, load_dir=half, **USUAL, **quality),
        ],
    )
    run_on_ranks(4, [job("4-quality", "usual", STEPS, **USUAL, **quality)])
    return {path.name: path for path in root.iterdir()}


def test_e1_e2_modes_and_numbers_of_ranks_give_the_same_bits(results: dict[str, Path]) -> None:
    reference = latest(results["1-barrier"])
    assert reference["step"] == STEPS - 1
    count = len(reference["pipeline"]["_model.gauss_params.means"])
    assert count > 800, "the run densifies"
    for name in ("2-barrier", "3-quality", "4-quality"):
        assert differences(reference, latest(results[name])) == [], name


def test_e2_camera_poses_bilateral_grids_and_regularizers(results: dict[str, Path]) -> None:
    one = latest(results["1-per-view"])
    assert float(one["pipeline"]["_model.camera_optimizer.pose_adjustment"].abs().max()) > 0
    assert float(one["pipeline"]["_model.bil_grids.grids"].std()) > 0
    assert differences(one, latest(results["2-per-view"])) == []


def test_e2_fewer_views_than_lanes_and_a_view_that_sees_nothing(results: dict[str, Path]) -> None:
    assert differences(latest(results["1-few"]), latest(results["2-few"])) == []
    assert differences(latest(results["1-blind"]), latest(results["2-blind"])) == []


def test_e4_resume_with_another_number_of_ranks_is_exact(results: dict[str, Path]) -> None:
    assert differences(latest(results["1-barrier"]), latest(results["3-resumed"])) == []
