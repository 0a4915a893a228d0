"""Dense Adam for the CPU with the bits of ``torch.optim.Adam``, for whole tensors and for any subset of their rows.

`OdinAdam` replaces ``torch.optim.Adam`` in a training loop; `publish_rows` is the same step for some rows of a tensor.
Both use the kernels of `adam_core` where these are exact, and torch's own operations elsewhere.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from odin_nerfstudio.runtime import adam_kernels as kernels
from odin_nerfstudio.runtime.adam_core import (
    Rates,
    StepNumbers,
    cpu_arithmetic,
    row_ids_of,
    step_rows,
    stock_rows,
    workspace_of,
)
from odin_nerfstudio.runtime.adam_device import (
    publish_on_device,
    publishes_on_device,
    step_on_device,
    steps_on_device,
)

logger = logging.getLogger(__name__)


def _fusable(*tensors: Tensor) -> bool:
    return all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def _table(x: Tensor) -> np.ndarray:
    """A contiguous CPU tensor as rows of its trailing dimensions, sharing memory. [N, C]."""
    flat = x.detach().numpy()
    return flat.reshape(x.shape[0], -1) if x.dim() > 1 else flat.reshape(-1, 1)


def publish_rows(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Tensor | None,
    rows: Tensor,
    *,
    step: float,
    lr: Rates,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    clear_grads: bool = False,
    threads: int = 1,
) -> int:
    """One Adam step of some rows, in place, with the bits that these rows get in a dense ``torch.optim.Adam.step``.

    Args:
        param, exp_avg, exp_avg_sq: Parameter and moments. [N, ...] each, contiguous.
        grads: Gradient. [N, ...] where rows is a mask; [K, ...], one row an id, where rows holds ids; None: zero, that
            is the step of primitives that no view saw.
        rows: Which rows. Mask [N] bool or uint8, or ids [K] int32 or int64, each at most once, in any order.
        step: Number of this step, counted from 1 (``state["step"]`` after the step).
        lr: Learning rate, or one a column of the flattened row.
        betas, eps: As in ``torch.optim.Adam``.
        clear_grads: Set the gradient rows used to zero.
        threads: Threads to spread the rows over. The result does not depend on it.

    Returns:
        The number of rows stepped.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or an id is out of range.
    """
    n = param.shape[0] if param.dim() else 0
    if exp_avg.shape != param.shape or exp_avg_sq.shape != param.shape or param.dim() == 0:
        raise ValueError(
            f"exp_avg, exp_avg_sq: shapes {tuple(exp_avg.shape)}, {tuple(exp_avg_sq.shape)} must equal"
            f" param's {tuple(param.shape)}, which must have rows"
        )
    masked = rows.dtype in (torch.bool, torch.uint8)
    if (
        rows.dim() != 1
        or (masked and rows.shape[0] != n)
        or (not masked and rows.dtype not in (torch.int32, torch.int64))
    ):
        raise ValueError(
            f"rows: {rows.dtype} {tuple(rows.shape)} is neither a bool or uint8 mask of {n} rows"
            " nor a vector of int32 or int64 ids"
        )
    if grads is not None and grads.shape != ((n if masked else rows.shape[0]), *param.shape[1:]):
        raise ValueError(
            f"grads: shape {tuple(grads.shape)} does not fit {rows.shape[0]} rows of {tuple(param.shape[1:])}"
        )
    columns = max(1, param[0].numel()) if n else 1
    scalars = StepNumbers.of(step, lr, betas, eps, columns)
    tensors = [param, exp_avg, exp_avg_sq, *([] if grads is None else [grads])]
    how = cpu_arithmetic() if _fusable(*tensors) and rows.device.type == "cpu" and betas[0] > 0.5 else None
    if how is None and publishes_on_device(param, exp_avg, exp_avg_sq, lr):
        return publish_on_device(param, exp_avg, exp_avg_sq, grads, rows, step, lr, betas, eps, clear_grads)
    if how is None:
        return _publish_stock(param, exp_avg, exp_avg_sq, grads, rows, masked, scalars, clear_grads)

    if masked:
        ids = np.empty(n, np.int32)
        ids = ids[: kernels.mask_to_ids(rows.contiguous().view(torch.uint8).numpy(), ids)]
    else:
        ids = np.ascontiguousarray(rows.numpy(), np.int32)
        if ids.size and (ids.min() < 0 or ids.max() >= n):
            raise ValueError(f"rows: ids {ids.min()} to {ids.max()} leave the range of {n} rows")
    if ids.size == 0:
        return 0
    gids = ids if masked else row_ids_of(ids.size, "arange")
    g = np.zeros((1, columns), np.float32) if grads is None else _table(grads)
    gids = row_ids_of(ids.size, "zeros") if grads is None else gids
    p, m, v = (_table(x) for x in (param, exp_avg, exp_avg_sq))
    step_rows(p, m, v, g, ids, gids, scalars, how, workspace_of(threads))
    increment_version((exp_avg, exp_avg_sq))  # kernels write behind torch's back
    if clear_grads and grads is not None:
        kernels.clear_rows(g, gids)
    return int(ids.size)


def _publish_stock(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Tensor | None,
    rows: Tensor,
    masked: bool,
    scalars: StepNumbers,
    clear_grads: bool,
) -> int:
    """`publish_rows` in torch's operations on gathered rows: other devices, dtypes and layouts."""
    with torch.no_grad():
        ids = rows.nonzero().flatten() if masked else rows.long()
        tables = [t.detach().reshape(t.shape[0], -1) for t in (param, exp_avg, exp_avg_sq)]
        p, m, v = (t[ids] for t in tables)
        g = torch.zeros_like(p) if grads is None else grads.detach().reshape(grads.shape[0], -1)
        if grads is not None and masked:
            g = g[ids]
        stock_rows(p, m, v, g, scalars)
        for target, value in zip((param, exp_avg, exp_avg_sq), (p, m, v)):
            target.detach()[ids] = value.reshape(-1, *target.shape[1:])
        if clear_grads and grads is not None:
            if masked:
                grads[ids] = 0
            else:
                grads.zero_()
    return int(ids.numel())


_STOCK_STEP = inspect.unwrap(torch.optim.Adam.step)
"""Adam's step without its hook and profiler wrappers, which `OdinAdam.step` already has."""


class OdinAdam(torch.optim.Adam):
    """``torch.optim.Adam`` whose step is fused for contiguous float32 parameters on the CPU; same bits, same state.

    The constructor, ``state`` (``step``, ``exp_avg``, ``exp_avg_sq``), ``state_dict`` and hooks are stock. Other
    parameters (devices, dtypes, layouts) and options (weight decay, amsgrad, maximize, capturable, differentiable,
    foreach=True, fused=True, ``betas[0] <= 0.5``, tensor-valued betas) go through the stock step, which is said once in
    the log.
    """

    _said: bool = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Perform one optimization step.

        Args:
            closure: Reevaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fused: list[tuple[Tensor, Tensor]] = []
        left: list[Tensor] = []
        for group in self.param_groups:
            plain = plain_options(group) and cpu_arithmetic() is not None
            for p in group["params"]:
                if p.grad is None:
                    continue
                if plain and p.numel() > 0 and _fusable(p) and p.grad.layout == torch.strided and self._fused(p, group):
                    fused.append((p, p.grad))
                elif usual_options(group) and steps_on_device(p, self.state[p]):
                    step_on_device(p, self.state[p], group)
                    fused.append((p, p.grad))
                else:
                    left.append(p)
        if left:
            if not OdinAdam._said:
                OdinAdam._said = True
                p = left[0]
                logger.info(
                    "Stock Adam steps %d of %d parameters, the first a %s %s tensor on %s: the fused step takes"
                    " contiguous float32 CPU tensors and default options.",
                    len(left), len(left) + len(fused), tuple(p.shape), p.dtype, p.device,
                )  # fmt: skip
            for p, _ in fused:
                p.grad = None
            try:
                _STOCK_STEP(self)
            finally:
                for p, grad in fused:
                    p.grad = grad
        return loss

    def _fused(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Step one parameter with the kernels; False, with nothing changed, if its state does not allow it."""
        assert p.grad is not None
        state = self.state[p]
        if len(state) == 0:  # stock layout
            count_dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            state["step"] = torch.tensor(0.0, dtype=count_dtype)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        m, v, count = state["exp_avg"], state["exp_avg_sq"], state["step"]
        if not _fusable(m, v) or m.shape != p.shape or v.shape != p.shape or p.grad.dtype != torch.float32:
            return False
        how = cpu_arithmetic()
        assert how is not None
        count += 1
        increment_version((m, v))  # kernels write behind torch's back
        q, m, v, g = (_table(x) for x in (p, m, v, p.grad.contiguous()))
        scalars = StepNumbers.of(count.item(), float(group["lr"]), group["betas"], group["eps"], q.shape[1])
        rows = row_ids_of(q.shape[0], "arange")
        step_rows(q, m, v, g, None, rows, scalars, how, workspace_of(torch.get_num_threads()))
        return True


def plain_options(group: dict[str, Any]) -> bool:
    """Whether a parameter group asks for nothing beyond plain Adam, as the CPU's kernels step it."""
    return usual_options(group) and group["betas"][0] > 0.5


def usual_options(group: dict[str, Any]) -> bool:
    """Whether a parameter group asks for nothing beyond plain Adam, whatever its decay rates."""
    unusual = ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused", "decoupled_weight_decay")
    betas = group["betas"]
    return (
        not any(group.get(name) for name in unusual)
        and group["weight_decay"] == 0
        and not any(isinstance(b, Tensor) for b in betas)
    )
