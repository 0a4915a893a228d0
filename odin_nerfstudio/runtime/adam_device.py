"""Dense Adam on a device in one kernel, with Adam's state as stock Adam keeps it there: the step count on the CPU.

``torch.optim.Adam(fused=True)`` wants the count on the device, which every reader of it would then wait for. The kernel
is torch's own. It rounds differently from the operations of the unfused step: values differ in their last digits, by
about 1e-7 of a moment and of a step's change. Not yet run on a GPU; the same kernel exists for the CPU, where it is
tested.
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


def step_on_device(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of stock Adam with plain options, in place; the state's count goes up by one."""
    assert p.grad is not None
    state["step"] += 1
    count = torch.full((), float(state["step"]), dtype=torch.float32, device=p.device)  # no copy: nothing to wait for
    beta1, beta2 = group["betas"]
    torch._fused_adam_(
        [p], [p.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [count],
        lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=0.0, eps=group["eps"],
        amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip
