"""The model's parameters as the runtime's tables of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.engine.optimizers import Optimizers
from torch import Tensor

from odin_nerfstudio.glue.learning_rates import LearningRates
from odin_nerfstudio.glue.odin_model import ROW_FIELDS, OdinSplatfactoModel
from odin_nerfstudio.glue.view_tests import ViewTests
from odin_nerfstudio.runtime.reads import MAX_LAG, PoseMotion, VisibilityReads
from odin_nerfstudio.runtime.statistics import DensificationStatistics
from odin_nerfstudio.runtime.store import DenseTerm, RowTable, ViewRow

PRIMITIVES, CAMERAS, GRIDS = "primitives", "cameras", "grids"

PAD_ROWS = 64
"""torch's elementwise kernels treat the tail of a tensor differently; at multiples of this there is no tail."""


def adam_of(optimizers: Optimizers, group: str) -> torch.optim.Adam:
    """A parameter group's optimizer.

    Raises:
        ValueError: it is no Adam, whose motion Odin can bound.
    """
    optimizer = optimizers.optimizers[group]
    if not isinstance(optimizer, torch.optim.Adam):
        raise ValueError(f"the optimizer of {group} is {type(optimizer).__name__}; Odin needs Adam (OdinAdamConfig)")
    return optimizer


def model_tables(
    model: OdinSplatfactoModel, optimizers: Optimizers, cameras: Cameras, start_step: int
) -> list[RowTable]:
    """Tables of primitives and, where they are trained, of camera poses and bilateral grids (rows are views)."""
    rates = LearningRates(optimizers, start_step)
    # Without spherical harmonics features_rest has no columns, and nothing to train.
    trained = {n: adam_of(optimizers, n) for n in ROW_FIELDS if model.gauss_params[n].numel() > 0}
    view_tests = ViewTests(model, cameras, MAX_LAG)
    poses = _pose_table(model, optimizers, rates) if model.config.camera_optimizer.mode != "off" else None

    def schedule(step: int) -> dict[str, float]:
        return {name: rates.at(name, step) for name in trained}

    tables = [
        RowTable(
            PRIMITIVES,
            model.gauss_params,  # type: ignore[arg-type]
            trained,
            VisibilityReads(
                model.gauss_params,  # type: ignore[arg-type]
                schedule,
                view_tests,
                betas=_common_betas(trained["means"], trained["scales"]),
                pose=_pose_motion(poses),
            ),
            schedule,
            padding=view_tests.padding,
            multiple=PAD_ROWS,
            active_columns=lambda step: {"features_rest": 3 * ((model.sh_degree_at(step) + 1) ** 2 - 1)},
            dense_terms=[_scale_regularization(model)] if model.config.use_scale_regularization else [],
            statistics=DensificationStatistics(
                model.strategy_state,
                absgrad=model.strategy.absgrad,
                until=lambda step: step < model.strategy.refine_stop_iter,
            ),
        )
    ]
    if poses is not None:
        tables.append(poses)
    if model.config.use_bilateral_grid:
        grids = model.bil_grids.grids
        term = DenseTerm("tv_loss", lambda _: True, _total_variation_gradient)
        tables.append(_view_table(GRIDS, "grids", grids, optimizers, "bilateral_grid", rates, term))
    return tables


def _common_betas(*optimizers: torch.optim.Adam) -> tuple[float, float]:
    """The decay rates that the optimizers share.

    Raises:
        ValueError: they differ; candidate sets are made for one pair.
    """
    betas = {tuple(optimizer.param_groups[0]["betas"]) for optimizer in optimizers}
    if len(betas) != 1:
        raise ValueError(f"means and scales need the same Adam betas, got {sorted(betas)}")
    return betas.pop()


def _pose_table(model: OdinSplatfactoModel, optimizers: Optimizers, rates: LearningRates) -> RowTable:
    term = DenseTerm("camera_opt_regularizer", lambda _: True, lambda *a: _pose_gradient(model, *a))
    pose = model.camera_optimizer.pose_adjustment
    return _view_table(CAMERAS, "pose_adjustment", pose, optimizers, "camera_opt", rates, term)


def _pose_motion(poses: RowTable | None) -> PoseMotion | None:
    if poses is None:
        return None
    return PoseMotion(poses, "pose_adjustment", _common_betas(*poses.optimizers.values()))


def _view_table(
    name: str,
    parameter_name: str,
    parameter: torch.nn.Parameter,
    optimizers: Optimizers,
    group: str,
    rates: LearningRates,
    term: DenseTerm,
) -> RowTable:
    return RowTable(
        name,
        {parameter_name: parameter},
        {parameter_name: adam_of(optimizers, group)},
        ViewRow(),
        schedule=lambda step: {parameter_name: rates.at(group, step)},
        dense_terms=[term],
        defer=False,
    )


def _scale_regularization(model: OdinSplatfactoModel) -> DenseTerm:
    """PhysGaussian's penalty as a gradient on all primitives at every tenth step."""

    def gradient(_step: int, total: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales = values["scales"].detach().clone().requires_grad_(True)
        (model.elongation(scales).sum() * (0.1 / total)).backward()
        return {"scales": _gradient_of(scales)}

    return DenseTerm("scale_reg", model.scale_regularization_due, gradient)


def _pose_gradient(model: OdinSplatfactoModel, _step: int, total: int, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Gradient of nerfstudio's ``camera_opt_regularizer``, the mean of weighted norms over all views."""
    config = model.config.camera_optimizer
    pose = values["pose_adjustment"].detach().clone().requires_grad_(True)
    translation = pose[:, :3].norm(dim=-1).sum() * config.trans_l2_penalty
    rotation = pose[:, 3:].norm(dim=-1).sum() * config.rot_l2_penalty
    ((translation + rotation) / total).backward()
    return {"pose_adjustment": _gradient_of(pose)}


def _total_variation_gradient(_step: int, total: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient of splatfacto's ``tv_loss``, ten times the mean total variation of all grids."""
    from nerfstudio.model_components.lib_bilagrid import total_variation_loss

    grids = values["grids"].detach().clone().requires_grad_(True)
    (10 * total_variation_loss(grids) * (len(grids) / total)).backward()
    return {"grids": _gradient_of(grids)}


def _gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
