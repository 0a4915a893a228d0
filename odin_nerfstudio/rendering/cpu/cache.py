"""Where compiled kernels are kept between processes.

Numba's cache notices a change of the file that holds a kernel, but not of another file that is inlined into it, and it
fails where neither the package nor the home folder is writable. So the package names the folder itself: one per
content of the kernels' sources, in the first place that can be written to.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numba
from numba.core.registry import cpu_target

_HERE = Path(__file__).resolve().parent
KERNEL_SOURCES = ("simd", "layout", "harmonics", "projection", "gradients", "binning", "pixels", "reduction")
SURFEL_SOURCES = (
    *("simd", "layout", "harmonics", "projection", "pixels", "depth_normals"),
    *("surfel_layout", "surfel_projection", "surfel_pixels", "surfel_gradients"),
)


def _sources_digest(sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for name in sources:
        digest.update((_HERE / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _candidates() -> list[Path]:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return [Path(chosen)]
    user = os.environ.get("XDG_CACHE_HOME")
    home = Path(user) if user else Path("~/.cache").expanduser()
    return [_HERE / "__pycache__", home / "odin_nerfstudio", Path(tempfile.gettempdir()) / f"odin_nerfstudio-{_user()}"]


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@cache
def cache_folder(sources: tuple[str, ...] = KERNEL_SOURCES) -> tuple[Path, str]:
    """The folder of kernels made from these files, and a sentence about it where it is not the package's own (else
    empty).

    Raises RuntimeError where no place can be written to.
    """
    candidates = _candidates()
    for candidate in candidates:
        folder = candidate / f"kernels-{_sources_digest(sources)}"
        if _writable(folder):
            usual = candidate == candidates[0]
            return folder, "" if usual else f"{candidates[0]} is not writable; compiled kernels are kept in {folder}"
    raise RuntimeError(
        f"no folder for compiled kernels is writable (tried {', '.join(map(str, candidates))});"
        " set NUMBA_CACHE_DIR to one that is"
    )


@contextmanager
def kernel_cache(sources: tuple[str, ...] = KERNEL_SOURCES) -> Iterator[None]:
    """Within this context, kernels are defined to use `cache_folder`."""
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(cache_folder(sources)[0])  # type: ignore[attr-defined]
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


def _marker(sources: tuple[str, ...]) -> Path:
    """Exists once all kernels are cached for this processor (Numba keeps code per processor and its features)."""
    target = repr(cpu_target.target_context.codegen().magic_tuple())  # type: ignore[attr-defined]
    return cache_folder(sources)[0] / f"complete-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


def is_cached(sources: tuple[str, ...] = KERNEL_SOURCES) -> bool:
    """Whether all kernels have been compiled for this processor."""
    return _marker(sources).exists()


def mark_cached(sources: tuple[str, ...] = KERNEL_SOURCES) -> None:
    _marker(sources).touch()
