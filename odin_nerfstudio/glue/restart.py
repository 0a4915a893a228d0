"""Going on by itself after ``torchrun --max-restarts`` has started all ranks anew.

torchrun's agent stays the parent of every attempt. The first rank leaves a note in the run's folder that names the
agent; after a restart the note leads back to the folder, and training goes on from its last checkpoint to the step at
which the first attempt was to end.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.glue.checkpoint import CheckpointError, find_checkpoint

if TYPE_CHECKING:
    from odin_nerfstudio.glue.odin_trainer import OdinTrainerConfig

NOTE = "torchrun.json"


@dataclass(frozen=True)
class Progress:
    """How far a job has come: what rank 0 finds out and tells the others."""

    timestamp: str
    """Name of the run's folder."""
    finished: int = -1
    """Step of the last checkpoint; -1: there is none, or the job has just started."""
    end_step: int = -1
    """The step before which the first attempt was to end."""

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: str) -> Progress:
        return Progress(**json.loads(text))


def identity() -> dict[str, str | int]:
    """What all attempts of one torchrun job on this machine share, and no other job has."""
    agent = os.getppid()
    return {
        "host": socket.gethostname(),
        "agent": agent,
        "started": _start_time(agent),  # process ids come again, above all in containers
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID", ""),
    }


def _start_time(pid: int) -> int:
    """Clock ticks from the machine's start to the process's; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def is_restart() -> bool:
    """Whether torchrun has started this job before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def leave_note(folder: Path, end_step: int) -> None:
    """Says in the run's folder whose it is and at which step it is to end. For the first rank under torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (NOTE + ".part")
    partial.write_text(json.dumps({**identity(), "end_step": end_step}))
    partial.replace(folder / NOTE)


def progress_of_earlier_attempt(method_folder: Path) -> Progress | None:
    """What an earlier attempt of this job has left behind, if it got so far. For the first rank."""
    mine = identity()
    for note in sorted(method_folder.glob(f"*/{NOTE}"), key=lambda path: path.stat().st_mtime, reverse=True):
        content = json.loads(note.read_text())
        if {k: v for k, v in content.items() if k in mine} != mine:
            continue
        folder = note.parent
        try:
            checkpoint = find_checkpoint(folder / "nerfstudio_models", None)
        except CheckpointError:
            CONSOLE.log(f"Restarted by torchrun before the first checkpoint of {folder}: starting anew", markup=False)
            return Progress(folder.name)
        finished = int(checkpoint.stem.removeprefix("step-"))
        CONSOLE.log(f"Restarted by torchrun: going on after step {finished} of {folder}", markup=False)
        return Progress(folder.name, finished, content["end_step"])
    CONSOLE.log(f"Restarted by torchrun before the first step, in {method_folder}: starting anew", markup=False)
    return None


def go_on(config: OdinTrainerConfig, progress: Progress) -> None:
    """Points the options of a job at where it left off.

    Raises:
        SystemExit: this machine does not see the checkpoint that rank 0 goes on from.
    """
    config.timestamp = progress.timestamp
    if progress.finished < 0:
        return
    folder = config.get_base_dir() / "nerfstudio_models"
    try:
        find_checkpoint(folder, progress.finished)
    except CheckpointError as error:
        raise SystemExit(
            f"Error: {error}, from which rank 0 goes on after the restart; put --output-dir on storage that all "
            "machines share"
        ) from error
    config.load_dir, config.load_step, config.load_checkpoint = folder, progress.finished, None
    config.max_num_iterations = max(0, progress.end_step - progress.finished - 1)
