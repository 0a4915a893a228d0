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
        if (
            not known
            or known[0]() is not exp_avg
            or known[1]() is not exp_avg_sq
            or known[2:] != _writes(exp_avg, exp_avg_sq)
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


@dataclass(frozen=True)
class AdamTarget:
    """A parameter to step, as `steps_parts` wants it, and the numbers of its step."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    """[N, ...] each."""
    parts: Sequence[GradientPart]
    """The gradient, to be summed in this order. Rows without a part get the step of a zero gradient."""
    step: float
    """Number of this step, counted from 1."""
    lr: float
    betas: tuple[float, float]
    eps: float
    live: LiveColumns | None = None
    """What is known of the moments' columns, where inactive ones should be left out."""


def step_parts(targets: Sequence[AdamTarget], ids: Tensor | None, threads: int = 1) -> None:
    """One Adam step in place, with the bits of ``torch.optim.Adam`` on dense gradients: zero plus the parts in order.

    Args:
        targets: Parameters with the same number of rows N.
        ids: Rows to step, ascending. [n] int32; None: all.
        threads: Threads to spread the rows over. The result does not depend on it.

    Raises:
        ValueError: Ids of a part are not ascending, or leave the range of rows.
    """
    how = cpu_arithmetic()
    assert how is not None and how.root is not None
    n = targets[0].param.shape[0] if targets else 0
    wanted = n if ids is None else ids.shape[0]
    if not wanted:
        return
    facts, numbers, parts, kept = [], [], [], []
    for target in targets:
        given = [p for p in target.parts if p.ids.shape[0]]
        first = len(parts)
        for part in given:
            at, values = part.ids.contiguous(), part.values.contiguous()
            if int(at[0]) < 0 or int(at[-1]) >= n:
                raise ValueError(f"parts: ids {int(at[0])} to {int(at[-1])} leave the range of {n} rows")
            kept.append((at, values))
            address = values.data_ptr() + 4 * part.offset
            parts.append((at.data_ptr(), address, at.shape[0], values.shape[1], part.width))
        rounded = StepNumbers.of(target.step, target.lr, target.betas, target.eps, 1).rounded()
        numbers.append((*rounded.moments, *rounded.denominator, rounded.a[0]))
        columns = live = target.param.numel() // n
        # leaving columns out is an identity only where 0 / eps is a number
        if target.live is not None and target.eps > 0 and np.isfinite(rounded.a[0]):
            width = max((p.width for p in given), default=0)
            held = target.live.of(target.exp_avg, target.exp_avg_sq, width)
            # most rows as a whole pass memory as fast as their parts do
            live = columns if 2 * wanted > n and held else held
        addresses = (x.data_ptr() for x in (target.param, target.exp_avg, target.exp_avg_sq))
        facts.append((*addresses, columns, live, first, len(parts)))
    rows = np.empty(0, np.int32) if ids is None else ids.numpy()
    threads = max(1, min(threads, wanted // _THREAD_ROWS))
    cuts = [wanted * t // threads for t in range(threads + 1)]
    step_targets: Any = kernels.step_targets
    tables = (np.array(facts, np.int64), np.array(numbers, np.float32), np.array(parts, np.int64).reshape(-1, 5))
    rounding = (how.fused_lerp, how.fused_square, how.root)

    def run(t: int) -> bool:
        end = cuts[t + 1]
        limit = n if end == wanted else end if ids is None else int(rows[end])
        return step_targets(*tables, n, *rounding, rows, cuts[t], end, limit)

    if threads > 1 and threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="publish")
    others = [_pools[threads].submit(run, t) for t in range(1, threads)]
    done = [run(0), *(other.result() for other in others)]
    del kept
    if not all(done):
        raise ValueError("parts: ids must ascend within each part")
