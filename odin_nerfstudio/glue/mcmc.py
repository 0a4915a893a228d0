"""gsplat's ``MCMCStrategy`` on any device: relocation and growth, equal on every rank.

"3D Gaussian Splatting as Markov Chain Monte Carlo" (Kheradmand et al. 2024). Dead primitives move onto live ones, which
are drawn in proportion to their opacity, and the population grows by 5 % up to a cap; opacities and scales change so
that the rendered image stays. Beside that the paper perturbs positions at every step, which is no structural step here
but part of each row's publication: see :class:`odin_nerfstudio.runtime.noise.PositionNoise`.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Draw:
    """Primitives that get copies."""

    sources: Tensor
    """One for each copy, with repeats. [m] int64."""
    rows: Tensor
    """The same without repeats, ascending. [u] int64."""
    sharing: Tensor
    """How many primitives share what each of them was: its copies and itself. [u] int64."""
    opacities: Tensor
    """Their opacities before. [u] float32."""

    @staticmethod
    def of(sources: Tensor, opacities: Tensor, whole: bool = True) -> Draw:
        """sources: [m] int64. opacities: of all primitives [N]; without `whole`, of what `rows` will be [u]."""
        rows, repeats = torch.unique(sources, return_counts=True)
        return Draw(sources, rows, repeats + 1, opacities[rows] if whole else opacities)

    def shared(self, log_scales: Tensor, least: float) -> tuple[Tensor, Tensor]:
        """What sources and copies have in common: logits of the opacity [u] and logarithms of the scales [u, 3].

        log_scales: Of `rows`. [u, 3]. least: Opacities are at least that.
        """
        opacities, scales = relocation(self.opacities, torch.exp(log_scales), self.sharing)
        opacities = opacities.clamp(least, 1.0 - torch.finfo(torch.float32).eps)
        return torch.logit(opacities), torch.log(scales)


def relocations(logits: Tensor, least: float) -> tuple[Tensor, Draw] | None:
    """Dead primitives, and those that each of them moves onto. logits: of all opacities. [N, 1] float32.

    least: A primitive of at most this opacity is dead.

    Returns:
        Dead rows, ascending [m] int64, and as many sources; None: none are dead, or all.
    """
    opacities = torch.sigmoid(logits.flatten())
    dead = opacities <= least
    targets, alive = dead.nonzero().flatten(), (~dead).nonzero().flatten()
    if len(targets) == 0 or len(alive) == 0:
        return None
    return targets, Draw.of(alive[_drawn(opacities[alive], len(targets))], opacities)


def growth(logits: Tensor, most: int) -> Draw | None:
    """Primitives of which copies are added: 5 % of all, up to a total of `most`. logits: [N, 1] float32."""
    count = logits.shape[0]
    added = max(0, min(most, int(1.05 * count)) - count)
    if added == 0:
        return None
    opacities = torch.sigmoid(logits.flatten())
    return Draw.of(_drawn(opacities, added), opacities)


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
            moved, added = self._refine(params, optimizers, state)
        if self.verbose:
            print(f"Step {step}: {moved} GSs relocated, {added} GSs added. Now having {len(params['means'])} GSs.")

    def _refine(
        self,
        params: torch.nn.ParameterDict,
        optimizers: dict[str, torch.optim.Optimizer],
        state: MutableMapping[str, Any],
    ) -> tuple[int, int]:
        """Relocates and grows; returns how many primitives moved and how many are new."""
        moved = self._relocate(params, optimizers, state)
        return moved, self._grow(params, optimizers, state)

    def _relocate(
        self, params: torch.nn.ParameterDict, optimizers: dict[str, torch.optim.Optimizer], state: MutableMapping
    ) -> int:
        drawn = relocations(params["opacities"].detach(), self.min_opacity)
        if drawn is None:
            return 0
        targets, draw = drawn
        self._share(params, draw)
        sources = draw.sources
        for name, parameter in params.items():
            parameter.data[targets] = parameter.data[sources]
            for key, value in optimizers[name].state[parameter].items():
                if key != "step":
                    value[draw.rows] = 0
        for value in state.values():
            if isinstance(value, Tensor):
                value[targets] = value[sources]
        return len(targets)

    def _grow(
        self, params: torch.nn.ParameterDict, optimizers: dict[str, torch.optim.Optimizer], state: MutableMapping
    ) -> int:
        draw = growth(params["opacities"].detach(), self.cap_max)
        if draw is None:
            return 0
        self._share(params, draw)
        sources, added = draw.sources, len(draw.sources)
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

    def _share(self, params: torch.nn.ParameterDict, draw: Draw) -> None:
        """Give the sources the opacity and scales that they will have in common with their copies."""
        logits, log_scales = draw.shared(params["scales"].detach()[draw.rows], self.min_opacity)
        params["opacities"].data[draw.rows] = logits[:, None]
        params["scales"].data[draw.rows] = log_scales


def _drawn(weights: Tensor, count: int) -> Tensor:
    """Indices drawn in proportion to weights, with replacement; on the CPU, so that all devices draw the same."""
    return _multinomial_sample(weights.cpu(), count, replacement=True).to(weights.device)
