"""Ctrl-C and termination as requests instead of exceptions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class InterruptRequests:
    """While active, the first SIGINT or SIGTERM is only noted; a further SIGINT raises KeyboardInterrupt as usual.

    A launcher passes Ctrl-C on as SIGTERM, besides the SIGINT that the terminal sends to every process.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        """announce: called once, inside of the signal handler, when the first request comes."""
        self.requested = False
        self._announce = announce
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested = True
            self._announce()

    def __enter__(self) -> InterruptRequests:
        if threading.current_thread() is threading.main_thread():  # signals can be set nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
