"""Runs ``ns-train`` and ``torchrun`` as a user does, and finds every process that belongs to such a job."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from training import BIN

MARK = "ODIN_TEST_JOB"
"""Environment variable by which a job's processes are found, whoever their parent is by then."""

ENDED_WITHIN = 15.0
"""The contract: seconds from a fault to the end of the job."""


def options(scene: Path, outputs: Path, views: int, **more: object) -> list[str]:
    """Arguments of a small run: it saves often, and densifies; two views per step halve all intervals.

    more: further options, with ``__`` for a dot and ``_`` for a dash.
    """
    usual: dict[str, object] = {
        "data": scene,
        "output_dir": outputs,
        "timestamp": "run",
        "vis": "tensorboard",
        "max_num_iterations": views,
        "steps_per_save": 20,
        "steps_per_eval_image": 10**9,
        "steps_per_eval_all_images": 10**9,
        "pipeline__model__num_downscales": 0,
        "pipeline__model__warmup_length": 80,
        "pipeline__model__refine_every": 40,
        "pipeline__model__sh_degree_interval": 100,
        "pipeline__model__densify_grad_thresh": 0.002,
        "pipeline__model__stop_split_at": 400,
        **more,
    }
    arguments = ["odin-splatfacto"]
    for name, value in usual.items():
        arguments += ["--" + name.replace("__", ".").replace("_", "-"), str(value)]
    return arguments


def ns_train(arguments: Sequence[str], devices: int = 2) -> list[str]:
    """nerfstudio's launcher with some devices."""
    return [str(BIN / "ns-train"), *arguments, "--machine.num-devices", str(devices)]


def torchrun(arguments: Sequence[str], *launcher: object) -> list[str]:
    """torchrun with its own options first."""
    return [str(BIN / "torchrun"), *map(str, launcher), "-m", "odin_nerfstudio.train", *arguments]


class Job:
    """A started command; use it in a ``with`` block, which leaves nothing of it behind."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        inside: Sequence[str] = (),
        without: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """Starts the command.

        Args:
            command: the program and its arguments.
            log: where its output goes.
            inside: a command that runs the rest of its arguments elsewhere, such as in a network namespace.
            without: environment variables to leave out.
            environment: those to add.
        """
        self.log = log
        self._mark = uuid.uuid4().hex
        settings = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1", **environment, MARK: self._mark}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*inside, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own, as a terminal gives it
                env={name: value for name, value in settings.items() if name not in without},
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            send(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def lines(self) -> str:
        """The output with the line breaks of the console's wrapping taken out."""
        return " ".join(self.output.split())

    def processes(self) -> dict[int, Mapping[str, str]]:
        """All living processes of the job, by process id in order of start, with their environments."""
        found: list[tuple[int, int, dict[str, str]]] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                text = (entry / "environ").read_bytes().decode(errors="replace")
                if f"{MARK}={self._mark}" in text:  # a zombie's environment is empty
                    started = int((entry / "stat").read_text().rpartition(")")[2].split()[19])
                    pairs = (line.partition("=") for line in text.split("\0"))
                    found.append((started, int(entry.name), {name: value for name, _, value in pairs}))
            except (OSError, ValueError):
                continue  # it has just ended
        return {pid: environment for _, pid, environment in sorted(found, key=lambda item: item[:2])}

    def ranks(self) -> list[int]:
        """Process ids of the job's ranks on this machine, in order."""
        processes = self.processes()
        of_torchrun = sorted((int(e["RANK"]), pid) for pid, e in processes.items() if "TORCHELASTIC_RUN_ID" in e)
        if of_torchrun:
            return [pid for _, pid in of_torchrun]
        return [pid for pid in processes if "spawn_main" in _command_line(pid)]

    def until(self, what: str, condition: Callable[[], object], seconds: float = 300) -> None:
        """Waits until something holds; fails if the job ends before."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"the job ended ({self.process.returncode}) before {what}:\n{self.output[-6000:]}")
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {seconds} s:\n{self.output[-6000:]}")
            time.sleep(0.02)

    def finish(self, seconds: float = 300) -> float:
        """Waits until every process of the job is gone; returns how long that took. [s]"""
        begin = time.monotonic()
        while self.process.poll() is None or self.processes():
            if time.monotonic() - begin > seconds:
                left = {pid: _command_line(pid) for pid in self.processes()}
                raise AssertionError(f"not ended within {seconds} s, left: {left}\n{self.output[-6000:]}")
            time.sleep(0.02)
        return time.monotonic() - begin

    def succeed(self) -> str:
        """Waits for a good end; returns the output."""
        self.finish()
        assert self.process.returncode == 0, self.output[-6000:]
        return self.output


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process, if it is still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def checkpoints(outputs: Path) -> list[Path]:
    """All checkpoints below a folder, oldest first."""
    return sorted(outputs.rglob("step-*.ckpt"))


def last_step(outputs: Path) -> int:
    """Step of the latest checkpoint; -1 without any."""
    found = checkpoints(outputs)
    return int(found[-1].stem.removeprefix("step-")) if found else -1


def loadable(outputs: Path) -> int:
    """Loads the latest checkpoint and returns its step."""
    path = checkpoints(outputs)[-1]
    state = torch.load(path, map_location="cpu")
    steps = state["optimizers"]["means"]["state"][0]["step"]
    assert int(steps) == state["step"] + 1, "the checkpoint's step is the last one that was finished"
    return state["step"]
