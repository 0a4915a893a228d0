"""A model cut down to the primitives of one rank, and put together again for a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from nerfstudio.engine.optimizers import Optimizers
from torch import Tensor

from odin_nerfstudio.glue.cameras import view_geometry
from odin_nerfstudio.glue.checkpoint import CheckpointError
from odin_nerfstudio.glue.odin_pipeline import OdinPipeline
from odin_nerfstudio.planning.schedule import Plan
from odin_nerfstudio.planning.shards import ShardTree, assign, divide, parts_for

_TREE_POINTS = 1_000_000
"""About how many points the planes are made from; for all of a large model it would take minutes."""
_SAMPLE_POINTS, _SAMPLE_VIEWS = 20_000, 64
"""About how many points and views of each rank decide who gets which part."""
PARAMETER = "_model.gauss_params."
"""How a pipeline's state names a per-primitive parameter."""


def shard_tree(means: Tensor, plan: Plan, pipeline: OdinPipeline, ranks: int) -> ShardTree:
    """Shards of a model, each given to the rank whose views see most of it. means [N, 3]; the same on all ranks."""
    points = means.detach().cpu().numpy()
    points = points[:: max(1, len(points) // _TREE_POINTS)]
    parts = parts_for(ranks, len(points), plan.local)
    tree = divide(points, parts)
    if ranks == 1:
        return tree
    sample = points[:: max(1, len(points) // _SAMPLE_POINTS)]
    part = tree.owner(sample)
    geometry = view_geometry(pipeline.datamanager.train_dataset.cameras)
    affinity = np.zeros((parts, ranks))
    for rank in range(ranks):
        views = np.asarray(plan.views_of_rank(rank))
        for view in views[:: max(1, len(views) // _SAMPLE_VIEWS)]:
            matrix, K = geometry.world_to_camera[view], geometry.K[view]
            local = sample @ matrix[:3, :3].T + matrix[:3, 3]
            depth = np.maximum(local[:, 2], 1e-6)
            x = K[0, 0] * local[:, 0] / depth + K[0, 2]
            y = K[1, 1] * local[:, 1] / depth + K[1, 2]
            seen = (local[:, 2] > 0.01) & (x > 0) & (x < geometry.width[view]) & (y > 0) & (y < geometry.height[view])
            affinity[:, rank] += np.bincount(part[seen], minlength=parts)
    return tree.for_ranks(assign(affinity))


def rows_of(tree: ShardTree, means: Tensor, rank: int) -> Tensor:
    """Rows of a model that a rank owns, ascending. [n] int64."""
    return torch.from_numpy(np.flatnonzero(tree.owner(means.detach().cpu().numpy()) == rank))


def means_of(state: dict[str, Any]) -> Tensor:
    """Positions of a checkpoint's primitives. [N, 3].

    Raises:
        ValueError: It holds none, or in the layout before nerfstudio 1.0.
    """
    pipeline = state["pipeline"]
    key = next((k for k in pipeline if k.endswith("gauss_params.means")), None)
    if key is None:
        raise ValueError("there are no gauss_params in this checkpoint; go on with placement replicated first")
    return pipeline[key]


def cut_checkpoint(state: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    """A checkpoint with some rows of every per-primitive tensor. What it is cut from may be mapped from a file."""
    pipeline, total = state["pipeline"], means_of(state).shape[0]

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: cut(v) for k, v in value.items()}
        return value[ids] if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == total else value

    out = dict(state)
    out["pipeline"] = {k: v[ids] if "gauss_params." in k else v for k, v in pipeline.items()}
    groups = {k.rsplit(".", 1)[-1] for k in pipeline if "gauss_params." in k}
    out["optimizers"] = {k: cut(v) if k in groups else v for k, v in state["optimizers"].items()}
    if "odin" in state:
        out["odin"] = {**state["odin"], "model": cut(state["odin"]["model"])}
    return out


def cut_model(model: Any, ids: Tensor) -> None:
    """Leave a model that has just been built only some of its rows; parameters keep their identity."""
    for parameter in model.gauss_params.values():
        parameter.data = parameter.data[ids].clone()
        parameter.grad = None


def per_row_tensors(model: Any, optimizers: Optimizers) -> dict[str, Tensor]:
    """Everything of a checkpoint that has a row per primitive, by name: parameters, moments, statistics."""
    out: dict[str, Tensor] = {}
    for name, parameter in model.gauss_params.items():
        if parameter.numel() == 0:
            continue
        out[f"parameter.{name}"] = parameter.detach()
        if name in optimizers.optimizers:
            for key, value in optimizers.optimizers[name].state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    out[f"moment.{name}.{key}"] = value
    for key, value in model.strategy_state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            out[f"statistics.{key}"] = value
    return out


def put_whole(state: dict[str, Any], whole: Mapping[str, Tensor], total: int) -> None:
    """Put gathered tensors in the place of this rank's in a checkpoint's state."""
    for name, value in whole.items():
        kind, rest = name.split(".", 1)
        if kind == "parameter":
            state["pipeline"][PARAMETER + rest] = value
        elif kind == "moment":
            group, key = rest.rsplit(".", 1)
            held = cast(dict, state["optimizers"][group]["state"])
            state["optimizers"][group]["state"] = {k: {**v, key: value} for k, v in held.items()}
        else:
            state["odin"]["model"]["strategy"][rest] = value
    for key, value in state["pipeline"].items():
        if key.startswith(PARAMETER) and value.numel() == 0:  # no columns: nothing to gather
            state["pipeline"][key] = value.new_empty((total, *value.shape[1:]))


class OnDisk:
    """Makes tensors that live in files, for the time that a checkpoint is written from them."""

    def __init__(self, folder: Path) -> None:
        """folder: Where the files go; it must be writable, and have room for the whole state."""
        self._folder = folder
        self._files: list[Path] = []

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in a new file, whose room is reserved.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        path = self._folder / f"gathered.{name}"
        count = int(torch.Size(shape).numel())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files.append(path)
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, count * dtype.itemsize))
        except OSError as error:
            raise CheckpointError(
                f"could not gather the model in {self._folder}: {error}. Earlier checkpoints are untouched; free some "
                "space or choose another --output-dir, then resume with --load-dir."
            ) from error
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)

    def remove(self) -> None:
        """Remove the files; what still maps them keeps them until it is gone."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()
