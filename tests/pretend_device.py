"""A device that is none: tensors that say that they are on it, and live in host memory.

What mixes them with tensors of the CPU, or takes them for such, fails as it would with a CUDA device. The device goes
by the name of torch's ``meta``, which nothing else here uses. No kernels of the device are needed: torch's operations
on the CPU stand for them, in every thread of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("meta")

_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
_MAY_MIX = {torch.Tensor.copy_, torch.Tensor.__getitem__}
"""Copies, and tensors of a device indexed by one of the CPU."""
_to = torch.Tensor.to


class Pretended(Tensor):
    """A tensor of the device."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.numpy or name in ("__array__", "data_ptr"):
            raise TypeError(f"{name}: can't convert a tensor of the device; use .cpu() first")
        if func is torch.Tensor.cpu:
            return host(args[0])
        if func is _to:
            return _moved(*args, **kwargs)
        if name not in ("__get__", "__set__"):
            _check(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return args[0] if result is args[0] else _put(result)


def _put(result: Any) -> Any:
    """What an operation gives, on the device; leaves stay leaves."""
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        return type(result)(_put(r) for r in result)  # type: ignore[call-arg]
    if not isinstance(result, Tensor) or isinstance(result, Pretended):
        return result
    if result.is_leaf and result.requires_grad:
        return result.detach().as_subclass(Pretended).requires_grad_()
    return result.as_subclass(Pretended)


def _check(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """As torch: all tensors on one device, but for numbers and what copies or indexes."""
    held = list(_tensors([*args, *kwargs.values()]))
    here = [t for t in held if not isinstance(t, Pretended) and t.dim()]
    copies = func is torch.Tensor.__setitem__ and not list(_tensors([args[1]]))  # places without indices
    if not here or copies:
        return
    if func not in _MAY_MIX or (func is torch.Tensor.__getitem__ and not isinstance(args[0], Pretended)):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {DEVICE} and cpu")


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def host(tensor: Tensor) -> Tensor:
    """A copy in host memory, differentiable."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor).clone()


def on_device(tensor: Tensor) -> Tensor:
    """A copy on the device, differentiable."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.clone().as_subclass(Pretended)


def _moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to``, to and from the device, too."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
    kwargs.pop("device", None)
    args = tuple(a for a in args if not isinstance(a, (torch.device, str)))
    there = isinstance(tensor, Pretended)
    if device is not None and (device == DEVICE) != there:
        tensor = host(tensor) if there else on_device(tensor)
    if dtype is None:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        moved = _to(tensor, *args, **kwargs)
        return moved.as_subclass(Pretended) if isinstance(tensor, Pretended) else moved


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device) != DEVICE:
            return make(*args, device=device, **kwargs)
        return make(*args, **kwargs).as_subclass(Pretended)

    return made


@contextmanager
def pretend_device() -> Iterator[torch.device]:
    """Has the device exist, in all threads."""
    before = {name: getattr(torch, name) for name in _FACTORIES}
    try:
        for name, make in before.items():
            setattr(torch, name, _factory(make))
        torch.Tensor.to = _moved  # type: ignore[method-assign, assignment]
        yield DEVICE
    finally:
        for name, make in before.items():
            setattr(torch, name, make)
        torch.Tensor.to = _to  # type: ignore[method-assign]
