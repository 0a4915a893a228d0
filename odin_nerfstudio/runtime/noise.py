"""Noise on positions that depends on (seed, step, row) only, not on who publishes a row or together with which others.

The noise of "3D Gaussian Splatting as Markov Chain Monte Carlo" (Kheradmand et al. 2024), as gsplat's
``inject_noise_to_position`` has it: ``mean += lr noise_lr f(o) Sigma z`` with the primitive's covariance Sigma and
``f(o) = 1 / (1 + exp(100 (o - 0.005)))`` of its opacity o. z is drawn by a counter, not by a generator: word j of row i
at a step is the (9 i + j)-th output of SplitMix64 seeded by (seed, step), and a coordinate of z is the sum of twelve
16-bit uniform numbers, which has mean 0, variance 1, and never exceeds 6. What moves a row is thus known ahead
up to its covariance and opacity, which Adam's motion bound covers; candidate sets stay complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import noise_kernels as kernels
from odin_nerfstudio.runtime.adam_motion import MotionBound, adam_motion_bound
from odin_nerfstudio.runtime.keyed import derive_seed


@dataclass(eq=False)
class PositionNoise:
    """Adds noise to the positions of primitives at their publication, and says how far it can move them."""

    parameters: Mapping[str, Any] | torch.nn.ParameterDict
    """Live mapping with ``means`` [N, 3], ``scales`` [N, 3] (logarithms), ``quats`` [N, 4] and ``opacities`` [N, 1]
    (logits), float32."""
    schedule: Callable[[int], Mapping[str, float]]
    """Learning rates of a step, of ``means`` and ``opacities``."""
    noise_lr: float
    """Size of the noise in units of the learning rate of the means."""
    seed: int
    opacity_betas: tuple[float, float] = (0.9, 0.999)
    places: Callable[[], Tensor] | None = None
    """Row of the whole model of each row, where these are only some of it. [N] int32."""
    _known: dict[int, tuple[int, float, float]] = field(default_factory=dict, init=False)

    def _of_step(self, step: int) -> tuple[int, float, float]:
        """Key, scale of the noise and largest fall of a logit in a step's update."""
        known = self._known.get(step)
        if known is None:
            rates = self.schedule(max(0, step))
            fall = rates["opacities"] * adam_motion_bound(self.opacity_betas)
            known = derive_seed(self.seed, "noise", step), rates["means"] * self.noise_lr, fall
            if len(self._known) > 64:
                self._known.clear()
            self._known[step] = known
        return known

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        means, scales, quats, logits = (
            self.parameters[name].detach() for name in ("means", "scales", "quats", "opacities")
        )
        return means, scales, quats, logits

    def _rows(self, count: int, device: torch.device) -> Tensor:
        """What the numbers of rows are drawn for. [N] int32."""
        return torch.arange(count, dtype=torch.int32, device=device) if self.places is None else self.places()

    def _places(self) -> np.ndarray:
        """The same for the kernels, to which an empty array says that the rows are all of the model."""
        return np.empty(0, np.int32) if self.places is None else self.places().numpy()

    def add(self, step: int, mask: Tensor | None) -> None:
        """Add the noise of a step to rows that have just got its update. mask [N] uint8; None: all."""
        means, scales, quats, logits = self._tensors()
        key, scale, _ = self._of_step(step)
        if means.device.type == "cpu":
            some = np.empty(0, np.uint8) if mask is None else mask.numpy()
            arrays = (means.numpy(), scales.numpy(), quats.numpy(), logits.numpy(), self._places())
            kernels.add(*arrays, some, np.uint64(key), scale)
            return
        rows = self._rows(means.shape[0], means.device)
        moved = moved_means(means, scales, quats, logits, rows, key, scale)
        means.copy_(moved if mask is None else torch.where(mask[:, None] != 0, moved, means))

    def reach(self, step: int, versions: Tensor, least_lag: int, motion: MotionBound) -> Tensor:
        """Largest change of a coordinate by the noise of the updates that a row lacks.

        The noise of one step moves a row by at most ``scale f(o) s^2 |z|`` with its largest scale s: z is known, and o
        and s are at most as far from those of this copy as Adam can move them. Rounding is included.

        Args:
            step: Step of the task.
            versions: [N] int32. Row i lacks the updates of steps versions[i] .. step - 1.
            least_lag: Treat every row as lacking at least that many.
            motion: Bound of the growth of log scales, by lag; says which lags can occur.

        Returns:
            [N] float32.
        """
        means, scales, _, logits = self._tensors()
        longest = len(motion.means) - 1
        known = [self._of_step(s) for s in range(step - 1, step - 1 - longest, -1)]
        fade = np.concatenate([[0.0], np.cumsum([k[2] for k in known])]) * (1 + 1e-6) + 1e-5
        grow = motion.log_scales.astype(np.float64)
        if means.device.type == "cpu":
            out = np.empty(means.shape[0], np.float32)
            kernels.reach(
                means.numpy(), scales.numpy(), logits.numpy(), self._places(), versions.numpy(), step, least_lag,
                np.array([k[0] for k in known], np.uint64), np.array([k[1] for k in known]), grow, fade, out,
            )  # fmt: skip
            return torch.from_numpy(out)
        rows = self._rows(means.shape[0], means.device)
        return _reach(means, scales, logits, rows, versions, step, least_lag, known, grow, fade)


# The same in torch's operations, for other devices ---------------------------------------------------------------


def exp(x: Tensor) -> Tensor:
    """The kernels' exp, with their bits. float64."""
    x = x.clamp(-kernels.EXP_LIMIT, kernels.EXP_LIMIT)
    k = torch.floor(x * kernels.LOG2_E + 0.5)
    r = (x - k * kernels.LN2_HIGH) - k * kernels.LN2_LOW
    p = torch.full_like(r, kernels.FACTORIALS[0])
    for c in kernels.FACTORIALS[1:]:
        p = p * r + c
    return p * ((k.long() + 1023) << 52).view(torch.float64)


def variates(key: int, rows: Tensor) -> Tensor:
    """z of rows. rows [N] of any integer type -> [N, 3] float64: mean 0, variance 1, within 6."""
    index = rows.long()[:, None] * kernels.WORDS + torch.arange(1, kernels.WORDS + 1, device=rows.device)
    z = index * _signed(kernels.GOLDEN) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(kernels.MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(kernels.MIX_2)
    z = z ^ _shifted(z, 31)
    total = sum((_shifted(z, shift) & 0xFFFF for shift in (0, 16, 32, 48)), torch.zeros_like(z))
    return (total.reshape(-1, 3, 3).sum(2) + (6 - 6 * 65536)).double() / 65536.0


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1) if bits else z


def fading(logit: Tensor) -> Tensor:
    """How much of the noise a primitive of this opacity logit gets. float64."""
    opacity = 1.0 / (1.0 + exp(-logit))
    return 1.0 / (1.0 + exp(kernels.STEEPNESS * (opacity - kernels.THRESHOLD)))


def moved_means(
    means: Tensor, log_scales: Tensor, quats: Tensor, logits: Tensor, rows: Tensor, key: int, scale: float
) -> Tensor:
    """Positions after a step's noise: what `PositionNoise.add` leaves, with its bits. [N, 3]."""
    w, x, y, z = quats.double().unbind(1)
    n = 2.0 / (((w * w + x * x) + y * y) + z * z).clamp(min=1e-24)
    rotation = (
        (1.0 - n * (y * y + z * z), n * (x * y - w * z), n * (x * z + w * y)),
        (n * (x * y + w * z), 1.0 - n * (x * x + z * z), n * (y * z - w * x)),
        (n * (x * z - w * y), n * (y * z + w * x), 1.0 - n * (x * x + y * y)),
    )
    a = variates(key, rows).unbind(1)
    factor = scale * fading(logits[:, 0].double())
    t = [
        ((rotation[0][k] * a[0] + rotation[1][k] * a[1]) + rotation[2][k] * a[2])
        * exp(2.0 * log_scales[:, k].double())
        * factor
        for k in range(3)
    ]
    noise = torch.stack([(row[0] * t[0] + row[1] * t[1]) + row[2] * t[2] for row in rotation], 1)
    return torch.where(logits <= kernels.SILENT_LOGIT, (means.double() + noise).float(), means)


def _reach(
    means: Tensor,
    log_scales: Tensor,
    logits: Tensor,
    rows: Tensor,
    versions: Tensor,
    step: int,
    least_lag: int,
    known: list[tuple[int, float, float]],
    grow: np.ndarray,
    fade: np.ndarray,
) -> Tensor:
    lag = torch.clamp(step - versions.long(), min=least_lag).clamp(0, len(known))
    lengths = torch.zeros(means.shape[0], dtype=torch.float64, device=means.device)
    for k in range(int(lag.max()) if lag.numel() else 0):
        key, scale, _ = known[k]
        length = variates(key, rows).norm(dim=1) * scale
        lengths += torch.where(lag > k, length, torch.zeros_like(length))
    logit = logits[:, 0].double() - torch.from_numpy(fade).to(means.device)[lag]
    largest = log_scales.double().amax(1) + torch.from_numpy(grow).to(means.device)[lag]
    moved = lengths * fading(logit) * exp(2.0 * largest)
    total = (moved + lag * 2.0**-23 * (means.double().abs().sum(1) + moved)) * (1.0 + 1e-6)
    return torch.where((lag > 0) & (logit <= kernels.SILENT_LOGIT), total, torch.zeros_like(total)).float()
