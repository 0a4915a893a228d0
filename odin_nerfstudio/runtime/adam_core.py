"""One Adam step of any rows of a table on the CPU, with the bits of ``torch.optim.Adam``.

For these operations, torch's elementwise CPU kernels give each element a result that depends on its value only (not on
the size of the tensor, its alignment, its tail or the number of threads), so a subset of rows can have the bits of the
dense step. What the result *is* depends on the build and the processor: whether ``lerp`` and ``addcmul`` round once
(fused multiply-add) or twice, and whether ``sqrt`` is the IEEE one (MKL's is not). `cpu_arithmetic` finds out once per
process by comparing against ``torch.optim.Adam`` itself, and the fused kernels reproduce what it found.

Source: D. Kingma, J. Ba, Adam: A Method for Stochastic Optimization, 2015, as torch's single-tensor path computes it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import adam_kernels as kernels
from odin_nerfstudio.runtime.adam_roots import IEEE, root_recipe

Rates = float | Sequence[float] | np.ndarray
"""A learning rate, or one a column of the flattened row."""

logger = logging.getLogger(__name__)

_CHUNK = 1 << 14
"""Floats per chunk on one thread: five arrays of 64 KiB fit the second-level cache."""
_THREAD_CHUNK = 1 << 18
"""Floats per thread and round when several threads run: long enough to hide the hand-over between threads."""


@dataclass(frozen=True)
class Arithmetic:
    """How torch's CPU kernels round, on this build and processor."""

    fused_lerp: bool
    """``lerp_`` is ``fma(w, end - self, self)`` instead of two roundings."""
    fused_square: bool
    """``addcmul_(g, g, value=w)`` is ``fma(w g, g, self)`` instead of two roundings."""
    root: int | None
    """Recipe of ``sqrt`` (`adam_roots`); None: none is known, and torch's own has to be called."""

    @property
    def ieee_sqrt(self) -> bool:
        """``sqrt`` is correctly rounded."""
        return self.root == IEEE


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step, in double precision as stock Adam has them before its kernels round them to float32."""

    b1: float
    b2: float
    root_correction2: float
    eps: float
    a: np.ndarray
    """Minus the bias-corrected step size of every column. [C] float64."""

    @staticmethod
    def of(step: float, lr: Rates, betas: tuple[float, float], eps: float, columns: int) -> StepNumbers:
        b1, b2 = betas
        correction1 = 1 - b1**step
        correction2 = 1 - b2**step
        rates = np.atleast_1d(np.asarray(lr, np.float64))
        if rates.shape not in ((1,), (columns,)):
            raise ValueError(f"lr: shape {rates.shape}, rows have {columns} columns; pass one number or one a column")
        return StepNumbers(b1, b2, correction2**0.5, eps, np.broadcast_to(-(rates / correction1), (columns,)))

    def rounded(self) -> Rounded:
        f = np.float32
        a = self.a.astype(f)
        return Rounded(
            (f(1 - self.b1), f(self.b2), f(1 - self.b2)),
            (f(self.root_correction2), f(self.eps)),
            a,
            bool((a == a[0]).all()),
        )


@dataclass(frozen=True)
class Rounded:
    """The float32 arguments of the kernels."""

    moments: tuple[np.float32, np.float32, np.float32]
    """1 - b1, b2, 1 - b2."""
    denominator: tuple[np.float32, np.float32]
    """Root of the second bias correction, eps."""
    a: np.ndarray
    """Minus the step sizes. [C] float32."""
    uniform: bool
    """Whether all columns share one step size."""


class _Workspace:
    """Scratch of `threads` chunks; ids of all rows."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.chunk = _CHUNK if threads == 1 else _THREAD_CHUNK
        self.roots = torch.zeros(threads, self.chunk)
        self.roots_np = self.roots.numpy()
        self.moments_np = np.zeros((threads, self.chunk), np.float32)
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="adam") if threads > 1 else None

    def fit(self, columns: int) -> None:
        """Let a chunk hold at least one row."""
        if columns > self.chunk:
            self.chunk = columns
            self.roots = torch.zeros(self.threads, columns)
            self.roots_np = self.roots.numpy()
            self.moments_np = np.zeros((self.threads, columns), np.float32)

    def map(self, work: Callable[[int], Any], count: int) -> list[Any]:
        if self.pool is None or count == 1:
            return [work(t) for t in range(count)]
        return list(self.pool.map(work, range(count)))


class _PerThread(threading.local):
    """Scratch that concurrent callers must not share."""

    def __init__(self) -> None:
        self.workspaces: dict[int, _Workspace] = {}
        self.ids = {"arange": np.empty(0, np.int32), "zeros": np.empty(0, np.int32)}


_scratch = _PerThread()


def workspace_of(threads: int) -> _Workspace:
    if threads not in _scratch.workspaces:
        _scratch.workspaces[threads] = _Workspace(threads)
    return _scratch.workspaces[threads]


def row_ids_of(n: int, kind: str) -> np.ndarray:
    """Row numbers 0..n-1 ("arange") or n times row 0 ("zeros"), kept between calls. [n] int32."""
    if _scratch.ids[kind].shape[0] < n:
        _scratch.ids[kind] = np.arange(n, dtype=np.int32) if kind == "arange" else np.zeros(n, np.int32)
    return _scratch.ids[kind][:n]


def step_rows(
    p: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    ids: np.ndarray | None,
    gids: np.ndarray,
    s: StepNumbers,
    how: Arithmetic,
    workspace: _Workspace,
) -> None:
    """One Adam step of rows `ids` (None: all, and then g's rows are p's) of p, m, v. [N, C] float32, contiguous."""
    columns = p.shape[1]
    rows = gids.shape[0]
    workspace.fit(columns)
    per_chunk = workspace.chunk // columns
    m_bits, v_bits, g_bits = (x.view(np.uint32) for x in (m, v, g))
    seen = np.empty((workspace.threads, columns), np.uint32)
    numbers = s.rounded()
    dense = ids is None and numbers.uniform
    rounding = (how.fused_lerp, how.fused_square, how.ieee_sqrt)
    row_ids = row_ids_of(rows, "arange") if ids is None else ids
    # inactive columns are an identity only where 0 / eps is a number
    may_skip = numbers.denominator[1] > 0 and bool(np.isfinite(numbers.a).all())
    flat = [x.reshape(-1) for x in (p, m, v, g)] if dense else []

    def moments(t: int, start: int) -> tuple[int, int, int]:
        stop = min(start + per_chunk, rows)
        here, there = row_ids[start:stop], gids[start:stop]
        live = kernels.chunk_live_columns(m_bits, v_bits, g_bits, here, there, seen[t]) if may_skip else columns
        if live == columns and dense:
            cut = slice(start * columns, stop * columns)
            kernels.moments_flat(
                flat[1][cut], flat[2][cut], flat[3][cut], *numbers.moments, *rounding, workspace.roots_np[t]
            )
        elif live > 0:
            out = workspace.moments_np[t], workspace.roots_np[t]
            kernels.moments_rows(m, v, g, here, there, live, *numbers.moments, *rounding, *out)
        return start, stop, live

    def update(t: int, start: int, stop: int, live: int) -> None:
        if live == columns and dense:
            cut = slice(start * columns, stop * columns)
            kernels.update_flat(flat[0][cut], flat[1][cut], workspace.roots_np[t], numbers.a[0], *numbers.denominator)
        elif live > 0:
            given = workspace.moments_np[t], workspace.roots_np[t]
            kernels.update_rows(p, row_ids[start:stop], live, numbers.a, *numbers.denominator, *given)

    starts = iter(range(0, rows, per_chunk))
    while batch := list(itertools.islice(starts, workspace.threads)):
        done = workspace.map(lambda t, batch=batch: moments(t, batch[t]), len(batch))
        if not how.ieee_sqrt:
            if len(batch) == 1:
                start, stop, live = done[0]
                used = workspace.roots[0, : (stop - start) * live]
                torch.sqrt(used, out=used)
            else:  # one call, so that torch spreads it over its threads; unused tails are harmless
                torch.sqrt(workspace.roots, out=workspace.roots)
        workspace.map(lambda t, done=done: update(t, *done[t]), len(batch))


def stock_rows(p: Tensor, m: Tensor, v: Tensor, g: Tensor, s: StepNumbers) -> None:
    """The same step in torch's own operations, in place. p, m, v, g: [K, C], any device."""
    m.lerp_(g, 1 - s.b1)
    root = v.mul_(s.b2).addcmul_(g, g, value=1 - s.b2).sqrt()
    root.div_(s.root_correction2).add_(s.eps)
    if (s.a == s.a[0]).all():
        p.addcdiv_(m, root, value=float(s.a[0]))
    else:
        p.add_(m.mul(torch.tensor(s.a, dtype=p.dtype, device=p.device)).div_(root))


def _probe(how: Arithmetic, workspace: _Workspace) -> bool:
    """Whether kernels that round as `how` says equal ``torch.optim.Adam`` on numbers of very different sizes."""
    rng = np.random.default_rng(0)
    n, columns, betas, lr, eps = 2003, 3, (0.9, 0.999), 1.6e-4, 1e-15
    start = torch.from_numpy(rng.standard_normal((n, columns)).astype(np.float32))
    stock = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([stock], lr=lr, betas=betas, eps=eps, foreach=False)
    p = start.numpy()
    m, v = np.zeros_like(p), np.zeros_like(p)
    ids = row_ids_of(n, "arange")
    for step in range(1, 6):
        g = (rng.standard_normal((n, columns)) * np.exp(6 * rng.standard_normal((n, columns)))).astype(np.float32)
        stock.grad = torch.from_numpy(g.copy())
        optimizer.step()
        rows = None if step < 4 else ids  # both kinds of kernels, which also compiles them
        step_rows(p, m, v, g, rows, ids, StepNumbers.of(step, lr, betas, eps, columns), how, workspace)
    state = optimizer.state[stock]
    pairs = ((stock.detach(), p), (state["exp_avg"], m), (state["exp_avg_sq"], v))
    return all(np.array_equal(a.numpy().view(np.uint32), b.view(np.uint32)) for a, b in pairs)


@functools.lru_cache(maxsize=1)
def cpu_arithmetic() -> Arithmetic | None:
    """How this build's CPU kernels round, found by comparison with ``torch.optim.Adam``; None if nothing matches."""
    for lerp, square in itertools.product((True, False), repeat=2):
        how = Arithmetic(lerp, square, root_recipe())
        if _probe(how, _Workspace(1)):
            logger.debug("fused Adam reproduces torch.optim.Adam with %s", how)
            return how
    logger.warning(
        "No fused Adam kernel has the bits of torch.optim.Adam on this machine; its own code is used, more slowly."
    )
    return None
