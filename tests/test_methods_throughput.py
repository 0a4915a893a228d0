"""Every method in throughput mode on 2 to 4 ranks: reads are bounded (E5), and nothing is lost or applied twice.

A `ReadChecker` keeps its own account on each rank and fails the training otherwise. Devices' states are compared, bit
for bit, at every structural step (``debug``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_on_ranks
from own_method import odin_glow
from training import latest, sample_scene

pytestmark = pytest.mark.timeout(600)

STEPS = 40
USUAL: dict[str, Any] = {
    "check": True,
    "pipeline__odin__mode": "throughput",
    "pipeline__odin__linger": False,  # as many late reads as there may be
    "pipeline__odin__views_per_step": 4,
    "pipeline__odin__debug": True,
    "pipeline__odin__max_overlap": 0.8,
    "pipeline__odin__max_impact": 0.5,
    "pipeline__model__num_downscales": 0,
    "pipeline__model__warmup_length": 5,
    "pipeline__model__refine_every": 10,
    "pipeline__model__use_scale_regularization": True,
}
MCMC: dict[str, Any] = {
    **USUAL,
    "method": "odin-splatfacto-mcmc",
    "pipeline__model__max_gs_num": 450,
    "pipeline__model__cull_alpha_thresh": 0.08,  # some are dead after so few steps
}
AA: dict[str, Any] = {**USUAL, "method": "odin-splatfacto-aa", "pipeline__model__smooth_3d": True}
SURFELS: dict[str, Any] = {
    **USUAL,
    "method": "odin-2dgs",
    "pipeline__model__densify_grad_thresh": 0.0004,
    "pipeline__model__normal_start_iter": 10,
    "pipeline__model__distortion_lambda": 0.01,
    "pipeline__model__distortion_start_iter": 10,
}
GLOW: dict[str, Any] = {**USUAL, "method": odin_glow.config}
RANKS = {"gaussians": 2, "glow": 2, "mcmc-half": 2, "mcmc-resumed": 3, "aa": 3, "surfels": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of all runs, and what each rank's checker wrote."""
    root = tmp_path_factory.mktemp("runs")
    scene = sample_scene(root, views=16, size="64x48", points=400)
    run_on_ranks(
        2,
        [
            (scene, root / "gaussians", STEPS, USUAL),
            (scene, root / "glow", STEPS // 2, GLOW),
            (scene, root / "mcmc-half", STEPS // 2, MCMC),
        ],
        root / "log-2",
    )
    resumed = {**MCMC, "load_dir": next((root / "mcmc-half").rglob("nerfstudio_models"))}
    run_on_ranks(
        3,
        [(scene, root / "mcmc-resumed", STEPS - STEPS // 2, resumed), (scene, root / "aa", STEPS, AA)],
        root / "log-3",
    )
    run_on_ranks(4, [(scene, root / "surfels", STEPS, SURFELS)], root / "log-4")
    return root


@pytest.mark.parametrize("name", RANKS)
def test_reads_are_bounded_and_nothing_is_lost(runs: Path, name: str) -> None:
    seen = [json.loads((runs / name / f"reads.{rank}.json").read_text()) for rank in range(RANKS[name])]
    state = latest(runs / name)
    assert state["step"] == (STEPS // 2 if name in ("glow", "mcmc-half") else STEPS) - 1
    count = len(state["pipeline"]["_model.gauss_params.means"])
    assert count == {"mcmc-half": 420, "mcmc-resumed": 450}.get(name, count) and count >= 400
    assert all(facts["structural_steps"] >= 1 for facts in seen)
    late = sum(facts["late_reads"] for facts in seen)
    assert late == 0 if name == "glow" else late > 0  # every view reads the network, which is never read late
    assert max(facts["worst_delay"] for facts in seen) <= 2
    # a row of one version has the same bits on every rank that read it, late or not: no row is read half-published
    for one in seen:
        for other in seen:
            common = one["bits"].keys() & other["bits"].keys()
            assert len(common) > 10 and all(one["bits"][key] == other["bits"][key] for key in common)
