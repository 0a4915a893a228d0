"""How far Adam can move a parameter: what makes candidate sets on a lagging copy complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_UNIT = 2.0**-24
"""Largest relative rounding error of float32."""


def adam_motion_bound(betas: tuple[float, float]) -> float:
    """Most that one Adam step moves any coordinate, in units of the learning rate; 7.27 for betas (0.9, 0.999).

    Claim: ``|delta_t| <= lr_t (1 - b1) / sqrt(1 - b2) / sqrt(1 - r)`` with ``r = b1^2 / b2 < 1``, at every step t >= 1,
    for any gradients, any eps >= 0 and any sequence of learning rates, bias corrections included. Several steps move a
    coordinate at most by the sum of their learning rates times this number.

    Proof. Without weight decay, over ages k = 0..t-1, ``m = (1 - b1) sum_k b1^k g_k`` and
    ``v = (1 - b2) sum_k b2^k g_k^2``. Write ``b1^k = sqrt(r^k) sqrt(b2^k)``; by Cauchy and Schwarz::

        |m| <= (1 - b1) sqrt(sum_k r^k) sqrt(sum_k b2^k g_k^2)
             = (1 - b1) / sqrt(1 - b2) sqrt((1 - r^t) / (1 - r)) sqrt(v)

    The step is ``lr m^ / (sqrt(v^) + eps)`` with ``m^ = m / (1 - b1^t)`` and ``v^ = v / (1 - b2^t)``; eps only shortens
    it, so::

        |delta| <= lr (1 - b1) / sqrt(1 - b2) / sqrt(1 - r) * C_t,    C_t = sqrt((1 - b2^t) (1 - r^t)) / (1 - b1^t)

    and C_t <= 1: with a = b2^t and c = r^t, ``sqrt(a c) = b1^t`` and, since ``a + c >= 2 sqrt(a c)``,
    ``(1 - a) (1 - c) = 1 - (a + c) + a c <= 1 - 2 sqrt(a c) + a c = (1 - sqrt(a c))^2``.

    The learning rate of a step enters once, as a factor, so it may change from step to step. If both moments of a row
    were set to zero together (densification, opacity reset) while t runs on, only s < t ages remain, and
    ``1 - r^s <= 1 - r^t``: the bound holds. It is the supremum, approached by gradients that grow by b2 / b1 per step.

    Rounding. float32 moments act like decay rates that are off by up to three units in the last place, which changes
    ``1 / (1 - r)`` by a factor below ``1 + 16 u / (1 - r)``, u = 2^-24; the returned number includes it. Where v
    underflows (v < 1e-35, |m| < 7.27 sqrt(v)) the step is below ``lr 1e-15 / eps``: within the bound for eps >= 1e-15.

    Args:
        betas: Decay rates of Adam.

    Returns:
        The bound over the learning rate.

    Raises:
        ValueError: ``b1^2 >= b2``, or nearly: gradients can then move a parameter without bound.
    """
    b1, b2 = betas
    if not (0 <= b1 < 1 and 0 < b2 < 1 and b1 * b1 / b2 < 1 - 1e-4):
        raise ValueError(
            f"betas: {betas} do not bound Adam's motion; candidate sets need 0 <= b1 < 1, 0 < b2 < 1, b1^2 < 0.9999 b2"
        )
    r = b1 * b1 / b2
    return (1 - b1) / math.sqrt(1 - b2) / math.sqrt(1 - r) * (1 + 16 * _UNIT / (1 - r))


@dataclass(frozen=True)
class MotionBound:
    """How far the positions and the log scales of a row can move during the updates that it lacks."""

    means: np.ndarray
    """Largest motion of one coordinate, by lag. Scene units. [L + 1] float32."""
    log_scales: np.ndarray
    """Largest growth of one log scale, by lag. [L + 1] float32."""

    @staticmethod
    def of(means_lrs: Sequence[float], scales_lrs: Sequence[float], betas: tuple[float, float]) -> MotionBound:
        """Bound for lags 0..L from the learning rates of the missing steps.

        Args:
            means_lrs, scales_lrs: Learning rates of steps s - 1, s - 2, .., s - L for candidates of step s. A row that
                lags by k lacks the first k of these.
            betas: Decay rates of Adam.

        Raises:
            ValueError: Sequences of different lengths, negative rates, or betas without a bound.
        """
        if len(means_lrs) != len(scales_lrs) or any(not lr >= 0 for lr in (*means_lrs, *scales_lrs)):
            raise ValueError(f"means_lrs, scales_lrs: {means_lrs}, {scales_lrs} must be non-negative and equally many")
        bound = adam_motion_bound(betas)
        means = bound * np.concatenate([[0.0], np.cumsum(np.asarray(means_lrs, np.float64))])
        scales = bound * np.concatenate([[0.0], np.cumsum(np.asarray(scales_lrs, np.float64))])
        # Each update rounds the parameter. Beyond +-32 it does not matter: such scales cover all or nothing.
        scales = scales + np.arange(len(scales)) * (32 * _UNIT)
        up = 1 + 4 * _UNIT
        return MotionBound((means * up).astype(np.float32), (scales * up).astype(np.float32))

    @staticmethod
    def steady(means_lr: float, scales_lr: float, betas: tuple[float, float], max_lag: int) -> MotionBound:
        """Bound for lags 0..max_lag where no missing step had a larger learning rate than these."""
        return MotionBound.of([means_lr] * max_lag, [scales_lr] * max_lag, betas)
