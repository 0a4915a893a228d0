"""Checkpoints that survive a kill at any moment and load with torch's safe loader."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

CHECKPOINT_NAME = re.compile(r"step-(\d{9})\.ckpt")


FULL_BYTES = 1 << 20
"""A disk with less room than this after a failed write is called full."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or found; the message names the file and the remedy."""


def to_plain(value: Any, where: str = "checkpoint") -> Any:
    """Copies nested containers, turning numpy scalars (nerfstudio's schedulers make them) into Python's.

    Raises:
        CheckpointError: something is neither a tensor, a container nor a plain value.
    """
    if isinstance(value, dict):
        return {to_plain(k, where): to_plain(v, f"{where}/{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)):
        return value
    raise CheckpointError(f"{where} holds a {type(value).__name__}; only tensors and plain values can be saved")


def write_checkpoint(state: dict[str, Any], path: Path, staging: Path) -> None:
    """Writes ``state`` so that ``path`` is always absent, old or complete.

    Args:
        state: nested dictionaries, lists, tensors and plain values.
        path: the final file.
        staging: a folder on the same file system, outside of the checkpoint folder, whose readers expect nothing
            but checkpoints in it.

    Raises:
        CheckpointError: the disk is full or not writable. Earlier checkpoints are untouched.
    """
    partial = staging / path.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(to_plain(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError, in changing words
        full = isinstance(error, RuntimeError) and shutil.disk_usage(path.parent).free < FULL_BYTES
        partial.unlink(missing_ok=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"could not write {path}: {os.strerror(errno.ENOSPC) if full else error}. "
            "Earlier checkpoints are untouched; free some space or choose another "
            "--output-dir, then resume with --load-dir."
        ) from error
    finally:
        if staging.is_dir() and not any(staging.iterdir()):
            staging.rmdir()


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(load_dir: Path, load_step: int | None) -> Path:
    """The checkpoint of ``load_step``, or the latest.

    Raises:
        CheckpointError: there is none.
    """
    folder = load_dir
    if not any(folder.glob("step-*.ckpt")) and (folder / "nerfstudio_models").is_dir():
        folder = folder / "nerfstudio_models"  # the run's folder was given instead of its checkpoint folder
    found = {int(m[1]): p for p in folder.glob("step-*.ckpt") if (m := CHECKPOINT_NAME.fullmatch(p.name))}
    if not found:
        raise CheckpointError(
            f"no checkpoint (step-*.ckpt) in {load_dir}; --load-dir takes the nerfstudio_models folder of a run"
        )
    if load_step is None:
        return found[max(found)]
    if load_step not in found:
        raise CheckpointError(f"no checkpoint of step {load_step} in {folder}; there are steps {sorted(found)}")
    return found[load_step]


def read_checkpoint(path: Path, mapped: bool = False) -> dict[str, Any]:
    """Reads a checkpoint, of this package or of splatfacto, with torch's safe loader.

    mapped: tensors stay in the file until they are looked at.

    Checkpoints that nerfstudio itself wrote hold numpy scalars; exactly these are allowed besides.

    Raises:
        CheckpointError: the file is missing, damaged or holds anything else.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    allowed: list[Any] = [np.dtype, *{type(np.dtype(t)) for t in ("f4", "f8", "i4", "i8")}]
    allowed.append(np.core.multiarray.scalar)  # type: ignore[attr-defined]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
