"""One Adam step of a table whose gradient is a sum of compact parts: publication's inner loop on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import adam_parts_kernels as kernels
from odin_nerfstudio.runtime.adam_core import Arithmetic, Rounded, StepNumbers, cpu_arithmetic

_CHUNK = 32704
"""Floats per chunk. Parameter, moments, gradient and roots of a chunk fit a second-level cache of 1 MiB, and torch does
not split the square root of fewer than 32768 floats over its threads."""
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


class _Scratch:
    """What one thread needs for a chunk."""

    def __init__(self, floats: int) -> None:
        self.floats = floats
        self.gradient = np.zeros(floats, np.float32)
        self.dirty = 0
        self.ids = np.empty(floats, np.int32)
        self.moments = np.empty(floats, np.float32)
        self.roots = torch.zeros(floats)
        self.roots_np = self.roots.numpy()


_local = threading.local()
_pools: dict[int, ThreadPoolExecutor] = {}


def _scratch(columns: int) -> _Scratch:
    held: _Scratch | None = getattr(_local, "scratch", None)
    if held is None or held.floats < columns:
        held = _local.scratch = _Scratch(max(_CHUNK, columns))
    return held


def steps_parts(*tensors: Tensor, betas: tuple[float, float]) -> bool:
    """Whether `step_parts` takes these tensors: contiguous float32 on the CPU, on a build whose rounding is known."""
    usual = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return usual and betas[0] > 0.5 and cpu_arithmetic() is not None


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
) -> None:
    """One Adam step in place, with the bits of ``torch.optim.Adam`` on a dense gradient: zero plus the parts in order.

    Args:
        param, exp_avg, exp_avg_sq: Parameter and moments, as `steps_parts` wants them. [N, ...] each.
        parts: The gradient. Rows without a part get the step of a zero gradient.
        mask: Rows to step. [N] uint8; None: all.
        step: Number of this step, counted from 1.
        lr, betas, eps: As in ``torch.optim.Adam``.
        threads: Threads to spread the rows over. The result does not depend on it.

    Raises:
        ValueError: Ids of a part are not ascending, or leave the range of rows.
    """
    how = cpu_arithmetic()
    assert how is not None
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

    threads = max(1, min(threads, n // _THREAD_ROWS))
    cuts = [n * t // threads for t in range(threads + 1)]

    def run(t: int) -> None:
        at = np.array([np.searchsorted(ids.numpy(), cuts[t]) for ids, _, _, _ in given], np.int64)
        _step_range(tables, flags, addresses, at, numbers, how, cuts[t], cuts[t + 1])

    if threads == 1:
        run(0)
        return
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="publish")
    others = [_pools[threads].submit(run, t) for t in range(1, threads)]
    run(0)
    for other in others:
        other.result()


def _step_range(
    tables: tuple[np.ndarray, ...],
    mask: np.ndarray,
    parts: np.ndarray,
    at: np.ndarray,
    numbers: Rounded,
    how: Arithmetic,
    begin: int,
    end: int,
) -> None:
    columns = tables[0].shape[1]
    advance: Any = kernels.advance
    s = _scratch(columns)
    state = np.array([0, 0, 0, 0, s.dirty], np.int64)
    s.dirty = 1  # whatever happens in between
    scalars = np.array([*numbers.moments, *numbers.denominator, numbers.a[0]], np.float32)
    fixed: tuple[Any, ...] = (*tables, mask, parts, at, state, scalars, how.fused_lerp, how.fused_square, how.ieee_sqrt)
    buffers: tuple[Any, ...] = (s.gradient, s.ids, s.moments, s.roots_np)
    per_chunk = s.floats // columns
    for start in range(begin, end, per_chunk):
        count = advance(*fixed, *buffers, start, min(start + per_chunk, end))
        if count == kernels.UNSORTED:
            raise ValueError("parts: ids must ascend within each part")
        if count and not how.ieee_sqrt:
            used = s.roots[:count]
            torch.sqrt(used, out=used)
    advance(*fixed, *buffers, end, end)
    s.dirty = int(state[4])
