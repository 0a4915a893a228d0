"""gsplat's ``DefaultStrategy`` on a shard, so that all ranks together do what one does to the whole model.

Decisions, duplication, pruning and resets look at rows one by one. Splitting draws its random numbers for all split
rows of the model at once, and torch's kernels may round the last elements of a tensor otherwise than the others; so it
is done over as many rows as the whole model splits, with this rank's rows in their places and dummies in the others.
That is ``split`` of gsplat 1.4.0 (gsplat/strategy/ops.py), with its arithmetic. What remains: ``sigmoid`` and ``exp``
of the thresholds run over a shard instead of over all rows, where a value within one rounding of a threshold, among the
last rows of the model, could be judged otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from gsplat.strategy import DefaultStrategy
from gsplat.strategy.ops import _update_param_with_optimizer, duplicate
from gsplat.utils import normalized_quat_to_rotmat
from torch import Tensor

from odin_nerfstudio.runtime.sharded.engine import ShardedEngine
from odin_nerfstudio.runtime.sharded.numbering import DUPLICATED, FIRST_HALF, SECOND_HALF, SEGMENT, Masks

Parameters = MutableMapping[str, Any] | torch.nn.ParameterDict


class ShardStrategy(DefaultStrategy):
    """A strategy's structural step on this rank's rows. Give it the stock strategy's settings, and an engine."""

    engine: ShardedEngine

    def _update_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the runtime keeps the statistics."""

    @torch.no_grad()
    def _grow_gs(
        self, params: Parameters, optimizers: Mapping[str, Any], state: MutableMapping[str, Any], step: int
    ) -> tuple[int, int]:
        grads = state["grad2d"] / state["count"].clamp_min(1)
        is_grad_high = grads > self.grow_grad2d
        largest = torch.exp(params["scales"]).max(dim=-1).values
        is_small = largest <= self.grow_scale3d * state["scene_scale"]
        is_dupli = is_grad_high & is_small
        is_split = is_grad_high & ~is_small
        if step < self.refine_scale2d_stop_iter:
            is_split |= state["radii"] > self.grow_scale2d
        n_dupli = int(is_dupli.sum())

        owner = self.engine.owner
        masks = Masks(1, owner.total)
        masks.set(0, owner.ids[is_split])
        masks.words = self.engine.exchange_of_shards.union(masks.words)
        n_split = masks.total(0)
        if n_dupli > 0:
            duplicate(params=params, optimizers=optimizers, state=state, mask=is_dupli)  # type: ignore[arg-type]
            state[SEGMENT][-n_dupli:] = DUPLICATED
        if n_split > 0:
            places = masks.ranks(0, owner.ids[is_split])
            is_split = torch.cat([is_split, is_dupli.new_zeros(n_dupli)])
            split_shard(params, optimizers, state, is_split, places, n_split, self.revised_opacity)
        return n_dupli, int(is_split.sum())


@torch.no_grad()
def split_shard(
    params: Parameters,
    optimizers: Mapping[str, Any],
    state: MutableMapping[str, Any],
    mask: Tensor,
    places: Tensor,
    total: int,
    revised_opacity: bool,
) -> None:
    """``gsplat.strategy.ops.split`` of some rows, of which the whole model splits more.

    Args:
        mask: This rank's rows that are split. [n] bool.
        places: Their places among all rows that are split. [m] int64.
        total: How many these are.
    """
    selected, rest = torch.where(mask)[0], torch.where(~mask)[0]
    count = selected.shape[0]

    def spread(values: Tensor, dummy: float) -> Tensor:
        out = values.new_full((total, *values.shape[1:]), dummy)
        out[places] = values
        return out

    all_scales = torch.exp(spread(params["scales"].detach()[selected], 0.0))
    quats = F.normalize(spread(params["quats"].detach()[selected], 1.0), dim=-1)
    drawn = torch.randn(2, total, 3, device=all_scales.device)
    samples = torch.einsum("nij,nj,bnj->bni", normalized_quat_to_rotmat(quats), all_scales, drawn)[:, places]
    scales = torch.log(all_scales / 1.6)[places]

    def parameter(name: str, p: Tensor) -> Tensor:
        repeats = [2] + [1] * (p.dim() - 1)
        if name == "means":
            halves = (p[selected] + samples).reshape(-1, 3)
        elif name == "scales":
            halves = scales.repeat(2, 1)
        elif name == "opacities" and revised_opacity:
            values = 1.0 - torch.sqrt(1.0 - torch.sigmoid(spread(p[selected], 0.0)))
            halves = torch.logit(values)[places].repeat(repeats)
        else:
            halves = p[selected].repeat(repeats)
        return torch.nn.Parameter(torch.cat([p[rest], halves]))

    def moment(_: str, v: Tensor) -> Tensor:
        return torch.cat([v[rest], v.new_zeros((2 * count, *v.shape[1:]))])

    _update_param_with_optimizer(parameter, moment, params, optimizers)  # type: ignore[arg-type]
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = torch.cat((value[rest], value[selected].repeat([2] + [1] * (value.dim() - 1))))
    if count:
        state[SEGMENT][-2 * count : -count] = FIRST_HALF
        state[SEGMENT][-count:] = SECOND_HALF
