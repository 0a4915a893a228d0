"""Shared fixtures. One thread per process, so that tests do not compete for the machine's cores."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C and hands that on to its children, also to those that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("odin", derandomize=True, deadline=None)  # the same examples in every run of the suite
settings.load_profile("odin")


@pytest.fixture(scope="session")
def captures() -> Path:
    """Folder of small real captures: ``$ODIN_CAPTURES``, or ``shared/data`` beside the repository."""
    folder = Path(os.environ.get("ODIN_CAPTURES", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no captures at {folder}; set ODIN_CAPTURES to a folder of COLMAP captures to run this test")
    return folder
