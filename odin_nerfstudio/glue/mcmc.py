"""gsplat's ``MCMCStrategy`` on any device: relocation and growth, equal on every rank.

"3D Gaussian Splatting as Markov Chain Monte Carlo" (Kheradmand et al. 2024). Dead primitives move onto live ones, which
are drawn in proportion to their opacity, and the population grows by 5 % up to a cap; opacities and scales change so
that the rendered image stays. Beside that the paper perturbs positions at every step, which is no structural step here
but part of each row's publication: see :class:`odin_nerfstudio.runtime.noise.PositionNoise`.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import torch
from gsplat.strategy import MCMCStrategy
from gsplat.strategy.ops import _multinomial_sample, _update_param_with_optimizer
from torch import Tensor

MOST_COPIES = 51
"""A primitive counts as at most that many (gsplat's ``n_max``)."""


def relocation(opacities: Tensor, scales: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Opacity and scales of each of ``n`` equal primitives that together look like one: the paper's equation 9.

    What gsplat's ``compute_relocation`` has for CUDA only, in float64 (its float32 sums cancel for many copies), and
    with the double sum over binomials taken once: ``sum_{i=k..n} C(i-1, k-1) = C(n, k)``.

    Args:
        opacities: of the one primitive, in (0, 1). ``[m]``
        scales: standard deviations. ``[m, 3]``
        copies: n, clamped to 1..51. ``[m]``

    Returns:
        New opacities ``[m]`` and scales ``[m, 3]``, with the types given.
    """
    n = copies.long().clamp(1, MOST_COPIES)
    old = opacities.double().clamp(max=1 - torch.finfo(torch.float32).eps)
    new = 1 - (1 - old) ** (1 / n.double())
    table = [[float(math.comb(i, k)) for k in range(MOST_COPIES + 1)] for i in range(MOST_COPIES + 1)]
    binomials = torch.tensor(table, dtype=torch.float64, device=old.device)
    total, power = torch.zeros_like(new), torch.ones_like(new)
    for k in range(1, int(n.max()) + 1 if n.numel() else 1):
        power = power * new
        total = total + binomials[n, k] * power * ((-1) ** (k + 1) / math.sqrt(k))
    return new.to(opacities.dtype), ((old / total)[:, None] * scales.double()).to(scales.dtype)


class OdinMcmcStrategy(MCMCStrategy):
    """gsplat's strategy without its noise, with the map of parents that the runtime wants of every structural step."""

    def initialize_state(self) -> dict[str, Any]:
        """Empty: nothing is carried from step to step."""
        return {}

    def acts_at(self, step: int) -> bool:
        """Whether primitives are relocated and added after a step."""
        return self.refine_start_iter < step < self.refine_stop_iter and step % self.refine_every == 0

    def step_post_backward(  # type: ignore[override]
        self,
        params: torch.nn.ParameterDict,
        optimizers: dict[str, torch.optim.Optimizer],
        state: MutableMapping[str, Any],
        step: int,
        info: dict[str, Any],
        packed: bool = False,
    ) -> None:
        """Relocates and grows, where it is due. Draws from torch's and numpy's global CPU generators."""
        if not self.acts_at(step):
            return
        with torch.no_grad():
            moved = self._relocate(params, optimizers, state)
            added = self._grow(params, optimizers, state)
        if self.verbose:
            print(f"Step {step}: {moved} GSs relocated, {added} GSs added. Now having {len(params['means'])} GSs.")

    def _relocate(
        self, params: torch.nn.ParameterDict, optimizers: dict[str, torch.optim.Optimizer], state: MutableMapping
    ) -> int:
        opacities = torch.sigmoid(params["opacities"].flatten())
        dead = opacities <= self.min_opacity
        targets, alive = dead.nonzero().flatten(), (~dead).nonzero().flatten()
        if len(targets) == 0 or len(alive) == 0:
            return 0
        sources = alive[_drawn(opacities[alive], len(targets))]
        self._share(params, opacities, sources)
        for name, parameter in params.items():
            parameter.data[targets] = parameter.data[sources]
            for key, value in optimizers[name].state[parameter].items():
                if key != "step":
                    value[sources] = 0
        for value in state.values():
            if isinstance(value, Tensor):
                value[targets] = value[sources]
        return len(targets)

    def _grow(
        self, params: torch.nn.ParameterDict, optimizers: dict[str, torch.optim.Optimizer], state: MutableMapping
    ) -> int:
        count = len(params["means"])
        added = max(0, min(self.cap_max, int(1.05 * count)) - count)
        if added == 0:
            return 0
        opacities = torch.sigmoid(params["opacities"].flatten())
        sources = _drawn(opacities, added)
        self._share(params, opacities, sources)
        _update_param_with_optimizer(
            lambda _name, p: torch.nn.Parameter(torch.cat([p, p[sources]])),
            lambda _key, v: torch.cat([v, v.new_zeros((added, *v.shape[1:]))]),
            params,
            optimizers,
        )
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = torch.cat([value, value[sources]])
        return added

    def _share(self, params: torch.nn.ParameterDict, opacities: Tensor, sources: Tensor) -> None:
        """Give the sources the opacity and scales that they will have in common with their copies."""
        copies = torch.bincount(sources)[sources] + 1
        shared, scales = relocation(opacities[sources], torch.exp(params["scales"])[sources], copies)
        shared = shared.clamp(self.min_opacity, 1.0 - torch.finfo(torch.float32).eps)
        params["opacities"].data[sources] = torch.logit(shared).reshape(-1, *params["opacities"].shape[1:])
        params["scales"].data[sources] = torch.log(scales)


def _drawn(weights: Tensor, count: int) -> Tensor:
    """Indices drawn in proportion to weights, with replacement; on the CPU, so that all devices draw the same."""
    return _multinomial_sample(weights.cpu(), count, replacement=True).to(weights.device)
