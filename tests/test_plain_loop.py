"""E3: it is still the user's optimizer.

The runtime against a plain loop in one process: gradients accumulated over the lanes on the whole model, stock
``torch.optim.Adam``, gsplat's stock ``DefaultStrategy`` fed lane by lane. Parameters, moments and the strategy's
statistics are equal bit for bit, densification and opacity reset inside.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gsplat.strategy import DefaultStrategy
from training import sample_scene, small_config

from odin_nerfstudio.glue.odin_trainer import OdinTrainer
from odin_nerfstudio.glue.splats import ROW_FIELDS, OdinSplats
from odin_nerfstudio.runtime.keyed import keyed_randomness

STEPS, LANES = 60, 2
PAD = 64


SURFELS: dict[str, Any] = {
    "pipeline__model__densify_grad_thresh": 0.0004,
    "pipeline__model__normal_start_iter": 15,
    "pipeline__model__distortion_lambda": 0.01,
    "pipeline__model__distortion_start_iter": 15,
}


def prepared(method: str, scene: Path, outputs: Path) -> OdinTrainer:
    """A trainer that has not taken a step: two lanes on one rank."""
    options: dict[str, Any] = {"pipeline__odin__views_per_step": LANES, "pipeline__odin__scale_schedule": False}
    options |= {"method": method, **(SURFELS if method == "odin-2dgs" else {})}
    config = small_config(scene, outputs, STEPS, pipeline__model__warmup_length=20, **options)
    config.set_timestamp()
    trainer = OdinTrainer(config)
    trainer.setup()
    return trainer


def splats_of(trainer: OdinTrainer) -> OdinSplats:
    """The trainer's model."""
    return cast(OdinSplats, trainer.pipeline.splats)


def padded(parameters: torch.nn.ParameterDict, filler: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole model with rows that no camera sees, up to a multiple of 64.

    torch's elementwise kernels treat the tail of a tensor differently, so that without padding the last rows of the
    plain loop, not of the runtime, would depend on the number of rows.
    """
    rows = -len(parameters["means"]) % PAD
    return {
        f"gauss_params.{name}": torch.cat((value, filler[name].expand(rows, *value.shape[1:])))
        for name, value in parameters.items()
    }


def plain_loop(trainer: OdinTrainer) -> tuple[dict[str, torch.optim.Optimizer], dict[str, Any]]:
    """Trains the trainer's model without its runtime; returns optimizers and the strategy's state."""
    model, plan, data = splats_of(trainer), trainer.runner.plan, trainer.pipeline.datamanager
    parameters = model.gauss_params
    rates = {name: trainer.optimizers.optimizers[name].param_groups[0]["lr"] for name in ROW_FIELDS}
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: torch.optim.Adam([parameters[name]], lr=rates[name], eps=1e-15) for name in ROW_FIELDS
    }
    schedule = trainer.runner.engine.tables[0].schedule
    settings = vars(model.strategy)
    fields = {k: v for k, v in settings.items() if k in DefaultStrategy.__dataclass_fields__}
    strategy = DefaultStrategy(**fields)
    state = strategy.initialize_state(scene_scale=1.0)
    surgery = copy.copy(strategy)
    surgery._update_state = lambda *args, **kwargs: None  # type: ignore[method-assign]
    model.optimizers = optimizers
    for step in range(STEPS):
        model.step = step
        infos = []
        for lane in range(LANES):
            model.task = (trainer.pipeline.seed, step, lane)
            camera, batch = data.train_view(plan.view(step, lane))
            filler = trainer.runner.engine.tables[0].padding
            assert filler is not None
            rows = padded(parameters, filler(plan.view(step, lane)))
            outputs = torch.func.functional_call(model, rows, (camera,))
            (model.image_loss(outputs, batch) / LANES).backward()
            infos.append({**model.info, "n_cameras": LANES})
        for name, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = schedule(step)[name]
            optimizer.step()
            optimizer.zero_grad()
        count = len(parameters["means"])
        key = strategy.key_for_gradient
        for info in infos:
            seen = torch.zeros(info[key][:, :count].shape)
            if strategy.absgrad:
                seen.absgrad = info[key].absgrad[:, :count]  # type: ignore[attr-defined]
            else:
                seen.grad = info[key].grad[:, :count]
            strategy._update_state(
                parameters, state, {**info, key: seen, "radii": info["radii"][:, :count]}, packed=False
            )
        with keyed_randomness(trainer.pipeline.seed, step, torch.device("cpu")):
            surgery.step_post_backward(parameters, optimizers, state, step, {}, packed=False)
    return optimizers, state


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_scene(tmp_path_factory.mktemp("scene"), size="64x48", points=401)


@pytest.mark.parametrize("method", ["odin-splatfacto", "odin-splatfacto-aa", "odin-2dgs"])
def test_e3_the_runtime_equals_stock_adam_and_the_stock_strategy(scene: Path, tmp_path: Path, method: str) -> None:
    ours, plain = prepared(method, scene, tmp_path / "a"), prepared(method, scene, tmp_path / "b")
    start = len(splats_of(ours).means)
    ours.train()
    optimizers, state = plain_loop(plain)
    mine, theirs = splats_of(ours), splats_of(plain)
    assert len(theirs.means) > start, "the plain loop densifies"
    for name in ROW_FIELDS:
        assert torch.equal(mine.gauss_params[name], theirs.gauss_params[name]), name
        one = ours.optimizers.optimizers[name].state[mine.gauss_params[name]]
        other = optimizers[name].state[theirs.gauss_params[name]]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(one[key], other[key]), (name, key)
    for key in ("grad2d", "count", "radii"):
        assert torch.equal(mine.strategy_state[key], state[key]), key
