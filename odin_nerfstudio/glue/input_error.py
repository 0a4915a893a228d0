"""The one error that bad input raises, and the log line for input that is accepted with a remark."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nerfstudio.utils.rich_utils import CONSOLE


class InputError(ValueError):
    """A capture that cannot be trained on. The message is one line: which file, what is wrong, the remedy."""


def bad_input(path: Path | str, what: str, remedy: str) -> InputError:
    """The error for ``path``; line breaks (also of a quoted cause) are folded, so the message stays one line."""
    return InputError(" ".join(f"{path}: {what}; {remedy}".split("\n")))


def raise_first(messages: Iterable[str | None], noun: str) -> None:
    """Raise the first message that is not None, with the number of the ``noun`` that are affected.

    Raises:
        InputError: if there is such a message.
    """
    faults = [message for message in messages if message is not None]
    if faults:
        more = f" ({len(faults)} {noun} are affected)" if len(faults) > 1 else ""
        raise InputError(faults[0] + more)


def remark(message: str) -> None:
    """Say once, on one line, what was done about input that is odd but usable."""
    CONSOLE.print(f"Input: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)
