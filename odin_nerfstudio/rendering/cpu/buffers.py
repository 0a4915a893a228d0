"""Large arrays that are used again.

An array above the allocator's limit (32 MiB in glibc) comes from the operating system each time, page by page; for the
gradients of some hundred thousand primitives that costs a tenth of a step. So large buffers are kept, and given out
again once nothing refers to them any more.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

Array = np.ndarray[Any, Any]

_SMALL = 16 << 20  # bytes below which the allocator does well by itself
_KEPT = 12  # buffers
_ALIGN = 64  # bytes, a cache line

_lock = threading.Lock()
_buffers: list[Array] = []


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it during the fork


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """`numpy.empty`, from a kept buffer where it is large. Arrays and tensors on it may live as long as they like."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _SMALL:
        return np.empty(shape, dtype)
    with _lock:
        buffer = _take(size)
    start = -buffer.ctypes.data % _ALIGN
    return buffer[start : start + size].view(dtype).reshape(shape)


def _take(size: int) -> Array:
    free = [k for k in range(len(_buffers)) if _unused(k)]
    fitting = [k for k in free if size + _ALIGN <= _buffers[k].nbytes <= 2 * size]
    if fitting:
        return _buffers[min(fitting, key=lambda k: _buffers[k].nbytes)]
    for k in sorted(free[: max(0, len(_buffers) + 1 - _KEPT)], reverse=True):
        del _buffers[k]  # the oldest that nobody uses
    # Some room to spare, as the number of primitives differs from view to view.
    buffer = np.empty(size + size // 8 + _ALIGN, np.uint8)
    if len(_buffers) < _KEPT:
        _buffers.append(buffer)
    return buffer


def _unused(k: int) -> bool:
    """Whether only the list refers to a buffer: arrays on it, and tensors on those, hold a reference each."""
    return sys.getrefcount(_buffers[k]) == _REFERENCES_OF_UNUSED


def _count_references() -> int:
    """What `sys.getrefcount` says of an object that only a list refers to, in an expression as in `_unused`."""
    probe = [np.empty(0)]
    return sys.getrefcount(probe[0])


_REFERENCES_OF_UNUSED = _count_references()
