"""One Adam step of a table whose gradient is a sum of compact parts: publication's inner loop on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import adam_parts_kernels as kernels
from odin_nerfstudio.runtime.adam_core import StepNumbers, cpu_arithmetic

_THREAD_ROWS = 1 << 14
"""Fewest rows worth a thread."""


@dataclass(frozen=True)
class GradientPart:
    """Some rows' share of a gradient, to be added to what the parts before it gave."""

    ids: Tensor
    """Rows, ascending. [n] int32."""
    values: Tensor
    """Columns `offset` .. `offset + width - 1` belong to the first `width` columns of the parameter. [n, W] float32."""
    offset: int
    width: int


class LiveColumns:
    """Which leading columns of an Adam's moments hold anything: the others keep their bits under a zero gradient.

    With m = v = +0 and a zero gradient, the new m is ``+0 + w1 (+-0) = +0``, the new v is ``+0``, and p gets
    ``-step_size * 0 / (0 + eps) = -0``, and ``p + -0 = p`` for every p (eps > 0). In splat models these are the
    spherical-harmonics bands that are not switched on yet. The moments are looked through whenever they are other
    tensors than the last time or something wrote to them: after a resume, a structural step, anybody else's step.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._live = 0

    def of(self, exp_avg: Tensor, exp_avg_sq: Tensor, width: int) -> int:
        """Columns to step for a gradient in the first `width` columns. exp_avg, exp_avg_sq: [N, ...], contiguous.

        The caller steps these columns of the moments and writes to no others.
        """
        known = self._known
        if not known or known[0]() is not exp_avg or known[1]() is not exp_avg_sq or known[2:] != _writes(
            exp_avg, exp_avg_sq
        ):
            n = exp_avg.shape[0]
            m, v = (x.detach().numpy().reshape(n, -1).view(np.uint32) for x in (exp_avg, exp_avg_sq))
            self._live = int(kernels.live_columns(m, v))
            self._known = (weakref.ref(exp_avg), weakref.ref(exp_avg_sq), *_writes(exp_avg, exp_avg_sq))
        self._live = max(self._live, width)
        return self._live


def _writes(*tensors: Tensor) -> tuple[int, ...]:
    """torch's counts of in-place operations, and where the numbers lie."""
    return tuple(value for x in tensors for value in (x._version, x.data_ptr()))


_pools: dict[int, ThreadPoolExecutor] = {}


def steps_parts(*tensors: Tensor, betas: tuple[float, float]) -> bool:
    """Whether `step_parts` takes these tensors: contiguous float32 on the CPU, on a build whose rounding is known."""
    usual = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    how = cpu_arithmetic()
    return usual and betas[0] > 0.5 and how is not None and how.root is not None


def step_parts(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    parts: Sequence[GradientPart],
    mask: Tensor | None,
    *,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    threads: int = 1,
    live: LiveColumns | None = None,
) -> None:
    """One Adam step in place, with the bits of ``torch.optim.Adam`` on a dense gradient: zero plus the parts in order.

    Args:
        param, exp_avg, exp_avg_sq: Parameter and moments, as `steps_parts` wants them. [N, ...] each.
        parts: The gradient. Rows without a part get the step of a zero gradient.
        mask: Rows to step. [N] uint8; None: all.
        step: Number of this step, counted from 1.
        lr, betas, eps: As in ``torch.optim.Adam``.
        threads: Threads to spread the rows over. The result does not depend on it.
        live: What is known of the moments' columns, where inactive ones should be left out.

    Raises:
        ValueError: Ids of a part are not ascending, or leave the range of rows.
    """
    how = cpu_arithmetic()
    assert how is not None and how.root is not None
    n = param.shape[0]
    if n == 0 or param.numel() == 0:
        return
    tables = tuple(x.detach().numpy().reshape(n, -1) for x in (param, exp_avg, exp_avg_sq))
    numbers = StepNumbers.of(step, lr, betas, eps, 1).rounded()
    flags = np.empty(0, np.uint8) if mask is None else mask.numpy()
    given = [(p.ids.contiguous(), p.values.detach().contiguous(), p.offset, p.width) for p in parts if p.ids.shape[0]]
    for ids, _, _, _ in given:
        if int(ids[0]) < 0 or int(ids[-1]) >= n:
            raise ValueError(f"parts: ids {int(ids[0])} to {int(ids[-1])} leave the range of {n} rows")
    addresses = np.array(
        [(i.data_ptr(), v.data_ptr() + 4 * o, i.shape[0], v.shape[1], w) for i, v, o, w in given], np.int64
    ).reshape(-1, 5)

    columns = tables[0].shape[1]
    width = max((w for *_, w in given), default=0)
    # leaving columns out is an identity only where 0 / eps is a number
    if live is not None and eps > 0 and np.isfinite(numbers.a[0]):
        held = live.of(exp_avg, exp_avg_sq, width)
        # most rows as a whole pass memory as fast as their parts do
        most = mask is None or 2 * np.count_nonzero(flags) > n
        columns = columns if most and held else held
    scalars = np.array([*numbers.moments, *numbers.denominator, numbers.a[0]], np.float32)
    threads = max(1, min(threads, n // _THREAD_ROWS))
    cuts = [n * t // threads for t in range(threads + 1)]

    step_range: Any = kernels.step_range
    rounding = (how.fused_lerp, how.fused_square, how.root)

    def run(t: int) -> bool:
        at = np.array([np.searchsorted(ids.numpy(), cuts[t]) for ids, _, _, _ in given], np.int64)
        return step_range(*tables, columns, flags, addresses, at, scalars, *rounding, cuts[t], cuts[t + 1])

    if threads > 1 and threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="publish")
    others = [_pools[threads].submit(run, t) for t in range(1, threads)]
    done = [run(0), *(other.result() for other in others)]
    if not all(done):
        raise ValueError("parts: ids must ascend within each part")
