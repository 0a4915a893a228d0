"""Going on by itself after ``torchrun --max-restarts`` has started all ranks anew.

torchrun's agent stays the parent of every attempt. The first rank leaves a note in the run's folder that names the
agent; after a restart the note leads back to the folder, and training goes on from its last checkpoint to the step at
which the first attempt was to end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.glue.checkpoint import CheckpointError, find_checkpoint

if TYPE_CHECKING:
    from odin_nerfstudio.glue.odin_trainer import OdinTrainerConfig

NOTE = "torchrun.json"


def identity() -> dict[str, str | int]:
    """What all attempts of one torchrun job on this machine share, and no other job has."""
    return {"agent": os.getppid(), "run_id": os.environ.get("TORCHELASTIC_RUN_ID", "")}


def is_restart() -> bool:
    """Whether torchrun has started this job before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def leave_note(folder: Path, end_step: int) -> None:
    """Says in the run's folder whose it is and at which step it is to end. For the first rank under torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (NOTE + ".part")
    partial.write_text(json.dumps({**identity(), "end_step": end_step}))
    partial.replace(folder / NOTE)


def earlier_attempt(method_folder: Path) -> Path | None:
    """The folder that an earlier attempt of this job wrote to, if it got so far."""
    mine = identity()
    for note in sorted(method_folder.glob(f"*/{NOTE}"), key=lambda path: path.stat().st_mtime, reverse=True):
        if {k: v for k, v in json.loads(note.read_text()).items() if k in mine} == mine:
            return note.parent
    return None


def go_on(config: OdinTrainerConfig) -> None:
    """Points the options of a restarted job at its last checkpoint. Every rank must see the run's folder."""
    folder = config.get_base_dir()
    note = folder / NOTE
    if not note.is_file():
        return
    try:
        checkpoint = find_checkpoint(folder / "nerfstudio_models", None)
    except CheckpointError:
        CONSOLE.log(f"Restarted by torchrun before the first checkpoint of {folder}: starting anew")
        return
    finished = int(checkpoint.stem.removeprefix("step-"))
    config.load_dir, config.load_step, config.load_checkpoint = checkpoint.parent, finished, None
    config.max_num_iterations = max(0, json.loads(note.read_text())["end_step"] - finished - 1)
    CONSOLE.log(f"Restarted by torchrun: going on after step {finished} of {folder}")
