"""Own threads for kernels that release the interpreter lock.

Numba's parallel layers abort when two Python threads render at once (training and the viewer) or when a forked child
renders, and compete with torch's OpenMP threads. Plain Python threads do neither. Work is cut so that its pieces
write disjoint memory, so results do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_lock = threading.Lock()
_chosen: int | None = None
_pool: ThreadPoolExecutor | None = None
_pool_key: tuple[int, int] | None = None  # process and size that the pool was made for


def set_render_threads(count: int | None) -> None:
    """Number of threads that one call of the rasterizer may use; None: the default of `render_threads`."""
    global _chosen
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"count: the number of render threads must be a positive integer or None, not {count!r}")
    _chosen = count


def render_threads() -> int:
    """Threads in use: what `set_render_threads` said, else the usable cores, but not more than torch uses."""
    if _chosen is not None:
        return _chosen
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(usable, torch.get_num_threads()))


def _shared_pool(size: int) -> ThreadPoolExecutor:
    """The pool of helper threads; made anew in a forked child, which inherits the object but not its threads."""
    global _pool, _pool_key
    with _lock:
        key = (os.getpid(), size)
        if _pool is None or _pool_key != key:
            if _pool is not None and _pool_key is not None and _pool_key[0] == key[0]:
                _pool.shutdown(wait=False)
            _pool = ThreadPoolExecutor(size, thread_name_prefix="odin-render")
            _pool_key = key
        return _pool


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it during the fork


def run(task: Callable[[int], object], count: int) -> None:
    """Call ``task(k)`` for every k below `count`, in any order, on up to `render_threads` threads including this one.

    The first exception of a task is raised here, after all threads have stopped.
    """
    threads = min(render_threads(), count)
    if threads <= 1:
        for k in range(count):
            task(k)
        return
    ticket = itertools.count()

    def work() -> None:
        while (k := next(ticket)) < count:
            task(k)

    helpers: list[Future[None]] = []
    while len(helpers) < threads - 1:
        try:
            helpers.append(_shared_pool(threads - 1).submit(work))
        except RuntimeError:
            # Another caller resized the pool between the two calls; a pool that cannot be renewed means the
            # interpreter is shutting down, and this thread does all the work.
            if _pool is None or _pool._shutdown:
                break
    try:
        work()
    finally:
        for helper in helpers:
            if not helper.cancel():  # one that has not started has nothing left to do
                helper.exception()
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
