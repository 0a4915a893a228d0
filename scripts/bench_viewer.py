"""What a viewer costs that nobody looks at: views per second of two jobs of two ranks, one with a viewer, one without.

    python scripts/bench_viewer.py [FOLDER] [--seconds 8] [--repeats 6] [--json FILE]

Both jobs train the same views from the start. They take turns: while one runs, the processes of the other are stopped.
Neighbouring turns are compared, so that what else the machine does falls out; their order changes every time. No
browser ever connects. Without FOLDER the sample city is used.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

RANKS = 2
SETTLING = 0.3
"""Seconds of a turn that are not counted: the other job's processes may still be stopping."""


@dataclass
class Options:
    """What to measure."""

    folder: Annotated[Path | None, tyro.conf.Positional] = None
    """A capture with a COLMAP model."""
    seconds: float = 8.0
    """Length of a turn."""
    repeats: int = 6
    """Turns of each job."""
    warm_up: int = 40
    """Steps before the first turn."""
    json: Path | None = None
    """Write all figures here."""


class Job:
    """Two ranks that train until they are ended; stopped whenever it is not their turn."""

    def __init__(self, scene: Path, folder: Path, vis: str) -> None:
        folder.mkdir()
        self._times, self._log = folder / "times.0", folder / "log"
        ports = []
        for _ in range(2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                ports.append(free.getsockname()[1])
        job = {"scene": str(scene), "outputs": str(folder), "vis": vis, "port": ports[0]}
        (folder / "job.json").write_text(json.dumps(job))
        self._processes = []
        for rank in range(RANKS):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[1], "OMP_NUM_THREADS": 1}
            with self._log.open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, str(Path(__file__).with_name("viewer_worker.py")), str(folder / "job.json")],
                        env={**os.environ, **{name: str(value) for name, value in places.items()}},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def times(self) -> list[float]:
        """When each step ended (monotonic clock, seconds)."""
        if any(process.poll() is not None for process in self._processes):
            raise RuntimeError(f"a rank has ended:\n{self._log.read_text()[-2000:]}")
        return [float(line) for line in self._times.read_text().split()] if self._times.exists() else []

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all ranks."""
        for process in self._processes:
            process.send_signal(number)

    def turn(self, seconds: float) -> float:
        """Runs for some seconds; steps per second."""
        begin = time.monotonic()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        end = time.monotonic()
        inside = [t for t in self.times() if begin + SETTLING < t <= end]
        if len(inside) < 3:
            raise RuntimeError(f"{len(inside)} steps in {seconds:g} s are too few to measure; take longer turns")
        return (len(inside) - 1) / (inside[-1] - inside[0])

    def end(self) -> None:
        """Ends all ranks."""
        for process in self._processes:
            process.kill()
            process.wait()


def measure(options: Options, scene: Path, folder: Path) -> dict[str, list[float]]:
    """Views per second in each turn, without and with a viewer."""
    rates: dict[str, list[float]] = {"without": [], "with": []}
    jobs: dict[str, Job] = {}
    try:
        for name, vis in (("without", "tensorboard"), ("with", "viewer+tensorboard")):
            job = jobs[name] = Job(scene, folder / name, vis)
            while len(job.times()) < options.warm_up:
                time.sleep(0.2)
            job.send(signal.SIGSTOP)
        for number in range(options.repeats):
            for name in sorted(jobs, reverse=number % 2 == 0):
                rates[name].append(RANKS * jobs[name].turn(options.seconds))
    finally:
        for job in jobs.values():
            job.end()
    return rates


def main(options: Options) -> None:
    """Measures, prints one line per job and the ratio."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        scene = options.folder
        if scene is None:
            scene = folder / "city"
            command = [Path(sys.executable).with_name("odin-sample"), "city", "--output", scene]
            subprocess.run([*command, "--views", "60", "--size", "256x192"], check=True, stdout=subprocess.DEVNULL)
        rates = measure(options, scene.resolve(), folder)
    ratios = sorted(b / a for a, b in zip(rates["without"], rates["with"]))
    figures: dict[str, Any] = {**rates, "ratios": ratios, "ratio": statistics.median(ratios)}
    for kind, found in rates.items():
        middle = statistics.median(found)
        print(f"{kind} a viewer: {middle:.2f} views per second ({min(found):.2f} to {max(found):.2f})")
    print(f"with / without: median {figures['ratio']:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), {len(ratios)} pairs")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
