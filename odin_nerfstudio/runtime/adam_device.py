"""Dense Adam on a device in one kernel, for whole tensors and for any rows of them.

The kernel is torch's own of ``torch.optim.Adam(fused=True)``; the state stays as stock Adam keeps it without that
option, with the step count on the CPU, where nobody has to wait for the device to read it. Whole tensors and gathered
rows go through this one kernel because ranks publish a step in different portions and must end with equal copies:
torch's unfused operations may round in another way. Against stock Adam values differ in their last digits, by about
1e-7 of a moment and of a step's change. Not yet run on a GPU; the same kernel exists for the CPU, where it is tested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def steps_on_device(p: Tensor, state: dict[str, Any]) -> bool:
    """Whether `step_on_device` takes a parameter with a gradient and state: float32 on CUDA, as stock Adam made it."""
    return p.device.type == "cuda" and fits(p, state)


def fits(p: Tensor, state: dict[str, Any]) -> bool:
    """Whether dtypes, shapes and layouts are what `step_on_device` takes."""
    if "exp_avg" not in state or state["step"].device.type != "cpu" or p.grad is None:
        return False
    tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
    return all(t.dtype == torch.float32 and t.is_contiguous() and t.shape == p.shape for t in tensors)


def publishes_on_device(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, lr: Any) -> bool:
    """Whether `publish_on_device` takes these: float32 on CUDA, one learning rate for all columns."""
    return param.device.type == "cuda" and rows_fit(param, exp_avg, exp_avg_sq, lr)


def rows_fit(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, lr: Any) -> bool:
    """Whether dtypes, layouts and the learning rate are what `publish_on_device` takes."""
    tensors = (param, exp_avg, exp_avg_sq)
    return isinstance(lr, (int, float)) and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def step_on_device(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of stock Adam with plain options, in place; the state's count goes up by one."""
    assert p.grad is not None
    state["step"] += 1
    m, v, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
    _step(p, p.grad, m, v, float(state["step"]), group["lr"], beta1, beta2, group["eps"])


def publish_on_device(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Tensor | None,
    rows: Tensor,
    step: float,
    lr: Any,
    betas: tuple[float, float],
    eps: float,
    clear_grads: bool,
) -> int:
    """`adam.publish_rows` on a device; arguments and result as there."""
    with torch.no_grad():
        masked = rows.dtype in (torch.bool, torch.uint8)
        ids = rows.nonzero().flatten() if masked else rows.long()
        tables = [t.detach() for t in (param, exp_avg, exp_avg_sq)]
        p, m, v = (t[ids] for t in tables)
        g = torch.zeros_like(p) if grads is None else grads[ids] if masked else grads.contiguous()
        _step(p, g, m, v, step, lr, *betas, eps)
        for table, values in zip(tables, (p, m, v)):
            table[ids] = values
        if clear_grads and grads is not None:
            grads[ids if masked else slice(None)] = 0
    return int(ids.shape[0])


def _step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: float, lr: float, beta1: float, beta2: float, eps: float
) -> None:
    count = torch.full((), step, dtype=torch.float32, device=p.device)  # made there: nothing to wait for
    torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
        [p], [g], [m], [v], [], [count],
        lr=float(lr), beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps,
        amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip
