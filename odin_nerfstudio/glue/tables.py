"""The model's parameters as the runtime's tables of rows."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.engine.optimizers import Optimizers
from torch import Tensor

from odin_nerfstudio.glue.learning_rates import LearningRates
from odin_nerfstudio.glue.splat_protocol import DistributedSplats, TrainingContext
from odin_nerfstudio.glue.view_tests import ViewTests
from odin_nerfstudio.runtime.reads import MAX_LAG, PoseMotion
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
    model: DistributedSplats, optimizers: Optimizers, cameras: Cameras, start_step: int, seed: int
) -> list[RowTable]:
    """Tables of primitives and, where they are trained, of camera poses and bilateral grids (rows are views).

    Args:
        cameras: all training views ``[V]``, undistorted, on the CPU.
        seed: of the run.

    Raises:
        ValueError: an optimizer is no Adam, or its betas do not fit.
    """
    rates = LearningRates(optimizers, start_step)
    parameters = cast(MutableMapping[str, Any], model.gauss_params)
    # Without spherical harmonics features_rest has no columns, and nothing to train.
    trained = {
        name: adam_of(optimizers, name)
        for name, parameter in parameters.items()
        if name in optimizers.optimizers and parameter.numel() > 0
    }

    def schedule(step: int) -> dict[str, float]:
        return {name: rates.at(name, step) for name in trained}

    poses = _pose_table(model, optimizers, rates) if model.camera_optimizer.config.mode != "off" else None
    view_tests = ViewTests(model, cameras, MAX_LAG)
    betas = {name: _betas(optimizer) for name, optimizer in trained.items()}
    pose = None if poses is None else PoseMotion(poses, "pose_adjustment", _betas(poses.optimizers["pose_adjustment"]))
    adams = {group: adam_of(optimizers, group) for group in optimizers.optimizers}
    context = TrainingContext(seed, schedule, rates.at, adams, cameras, view_tests, betas, pose)
    tables = [
        RowTable(
            PRIMITIVES,
            parameters,
            trained,
            model.reads(context),
            schedule,
            padding=view_tests.padding,
            multiple=PAD_ROWS,
            active_columns=model.active_columns,
            dense_terms=model.dense_terms(),
            statistics=model.statistics(),
            noise=model.row_noise(context),
        )
    ]
    if poses is not None:
        tables.append(poses)
    grids = getattr(model, "bil_grids", None)
    if grids is not None:
        term = DenseTerm("tv_loss", lambda _: True, _total_variation_gradient)
        tables.append(_view_table(GRIDS, "grids", grids.grids, optimizers, "bilateral_grid", rates, term))
    tables += model.further_tables(context)
    _check_complete(tables, adams)
    return tables


def _check_complete(tables: Sequence[RowTable], optimizers: Mapping[str, torch.optim.Adam]) -> None:
    """Every trained parameter is in a table: nobody would step the others.

    Raises:
        ValueError: some are not.
    """
    held = {id(p) for table in tables for p in table.parameters.values()}
    for group, optimizer in optimizers.items():
        if any(id(p) not in held for each in optimizer.param_groups for p in each["params"]):
            raise ValueError(
                f"parameters of the optimizer {group!r} are in no table of rows, so that nothing would train them;"
                " add them to the model's further_tables (docs/own_method.md)"
            )


def _betas(optimizer: torch.optim.Adam) -> tuple[float, float]:
    first, second = optimizer.param_groups[0]["betas"]
    return float(first), float(second)


def _pose_table(model: DistributedSplats, optimizers: Optimizers, rates: LearningRates) -> RowTable:
    term = DenseTerm("camera_opt_regularizer", lambda _: True, lambda *a: _pose_gradient(model, *a))
    pose = model.camera_optimizer.pose_adjustment
    return _view_table(CAMERAS, "pose_adjustment", pose, optimizers, "camera_opt", rates, term)


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


def _pose_gradient(model: DistributedSplats, _step: int, total: int, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Gradient of nerfstudio's ``camera_opt_regularizer``, the mean of weighted norms over all views."""
    config = model.camera_optimizer.config
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
