"""Checkpoints: atomic, plain, and found again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from odin_nerfstudio.glue.checkpoint import (
    CheckpointError,
    find_checkpoint,
    read_checkpoint,
    to_plain,
    write_checkpoint,
)


def test_numpy_scalars_become_plain_and_other_objects_are_refused() -> None:
    plain = to_plain({"lr": np.float64(0.25), "steps": [np.int64(3)], "t": torch.ones(2)})
    assert type(plain["lr"]) is float and plain["lr"] == 0.25
    assert type(plain["steps"][0]) is int
    with pytest.raises(CheckpointError, match=r"checkpoint/a\[0\] holds a Path|checkpoint/a\[0\] holds a PosixPath"):
        to_plain({"a": [Path("x")]})


def test_written_checkpoint_loads_with_the_default_loader(tmp_path: Path) -> None:
    path = tmp_path / "models" / "step-000000007.ckpt"
    write_checkpoint({"step": 7, "lr": np.float64(1e-3), "w": torch.arange(3)}, path, tmp_path / "staging")
    loaded = torch.load(path)  # weights_only, the default
    assert loaded["step"] == 7 and loaded["lr"] == 1e-3 and loaded["w"].tolist() == [0, 1, 2]
    assert os.listdir(path.parent) == [path.name], "readers parse every name in this folder"
    assert not (tmp_path / "staging").exists()


def test_checkpoint_of_nerfstudio_with_numpy_scalars_is_read(tmp_path: Path) -> None:
    path = tmp_path / "step-000000001.ckpt"
    torch.save({"step": 1, "schedulers": {"means": {"_last_lr": [np.float64(0.5)]}}}, path)
    assert read_checkpoint(path)["schedulers"]["means"]["_last_lr"][0] == 0.5


def test_latest_and_named_steps_are_found_and_faults_name_the_remedy(tmp_path: Path) -> None:
    models = tmp_path / "nerfstudio_models"
    models.mkdir()
    with pytest.raises(CheckpointError, match="--load-dir takes the nerfstudio_models folder"):
        find_checkpoint(tmp_path, None)
    for step in (9, 100, 20):
        (models / f"step-{step:09d}.ckpt").touch()
    (models / "step-notes.txt").touch()
    assert find_checkpoint(models, None).name == "step-000000100.ckpt"
    assert find_checkpoint(tmp_path, 20).name == "step-000000020.ckpt", "the run's folder will do as well"
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 .* \[9, 20, 100\]"):
        find_checkpoint(models, 5)


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-000000001.ckpt"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(CheckpointError, match="step-000000001.ckpt cannot be read"):
        read_checkpoint(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    folder, staging = tmp_path / "models", tmp_path / "staging"
    old = folder / "step-000000001.ckpt"
    write_checkpoint({"step": 1}, old, staging)
    staging.mkdir()
    (staging / "step-000000002.ckpt").symlink_to("/dev/full")  # every write to it fails with ENOSPC
    with pytest.raises(CheckpointError, match="could not write .*step-000000002.ckpt.*Earlier checkpoints"):
        write_checkpoint({"step": 2, "w": torch.zeros(100_000)}, folder / "step-000000002.ckpt", staging)
    assert read_checkpoint(old)["step"] == 1
    assert [p.name for p in folder.iterdir()] == [old.name]


WRITER = """
import sys, torch
from pathlib import Path
from odin_nerfstudio.glue.checkpoint import write_checkpoint
folder = Path(sys.argv[1])
for step in range(1000000):
    path = folder / "models" / f"step-{step:09d}.ckpt"
    write_checkpoint({"step": step, "w": torch.full((400_000,), float(step))}, path, folder / "staging")
    for other in (folder / "models").glob("*.ckpt"):
        if other != path:
            other.unlink()
"""


def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for trial in range(4):
        folder = tmp_path / str(trial)
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)])
        deadline = time.monotonic() + 60
        while not list(folder.glob("models/*.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(float(generator.uniform(0.0, 0.1)))
        process.kill()
        process.wait()
        state = read_checkpoint(find_checkpoint(folder / "models", None))
        assert torch.all(state["w"] == state["step"])
