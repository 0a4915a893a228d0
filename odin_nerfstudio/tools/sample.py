"""``odin-sample``: posed captures of procedural scenes, to try the trainer on without downloading anything."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union

import tyro

#: Raised when the same arguments come to mean another capture.
GENERATOR_VERSION = 1
#: Names the arguments that a capture was made with.
MARKER = "sample.json"
_MIN_SIZE, _MAX_SIZE, _MAX_VIEWS = 16, 8192, 99_999


@dataclass(frozen=True)
class _Sample:
    scene: ClassVar[str]
    default_points: ClassVar[Callable[[int], int]]

    output: Path
    """Folder to write. It must be empty, missing, or a capture of this command."""
    views: int = 96
    """Number of images."""
    size: str = "320x240"
    """WIDTHxHEIGHT of the images in pixels."""
    points: int | None = None
    """Most 3D points of the model. Default: 160 for each view of the city, 8000 for the object."""
    seed: int = 0
    """Another seed gives another city, another courtyard, other jitter and noise."""
    overwrite: bool = False
    """Replace a capture in the folder that this command made with other arguments."""

    def image_size(self) -> tuple[int, int]:
        """Width and height in pixels; a ValueError names a malformed ``size``."""
        match = re.fullmatch(r"(\d+)x(\d+)", self.size)
        if match is None:
            raise ValueError(f"--size {self.size!r} is not of the form WIDTHxHEIGHT, for example 320x240")
        width, height = int(match[1]), int(match[2])
        if not (_MIN_SIZE <= width <= _MAX_SIZE and _MIN_SIZE <= height <= _MAX_SIZE):
            raise ValueError(f"--size {self.size} is out of range: both sides from {_MIN_SIZE} to {_MAX_SIZE} pixels")
        return width, height

    def check(self) -> None:
        """Raise a ValueError that names the argument which cannot be met."""
        self.image_size()
        if not 2 <= self.views <= _MAX_VIEWS:
            raise ValueError(f"--views {self.views} is out of range: from 2 to {_MAX_VIEWS}")
        if self.points is not None and self.points < 1:
            raise ValueError(f"--points {self.points} is out of range: at least 1")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} is out of range: at least 0")

    def point_count(self) -> int:
        """Points asked for, or the scene's default."""
        return self.points if self.points is not None else type(self).default_points(self.views)

    def description(self) -> dict[str, Any]:
        """What determines the capture's bytes."""
        width, height = self.image_size()
        return {
            "generator": "odin-sample",
            "version": GENERATOR_VERSION,
            "scene": self.scene,
            "views": self.views,
            "size": f"{width}x{height}",
            "points": self.point_count(),
            "seed": self.seed,
        }


@dataclass(frozen=True)
class CitySample(_Sample):
    """An aerial survey of a city: most pairs of views share nothing. It grows with the number of views."""

    scene = "city"
    default_points = staticmethod(lambda views: 160 * views)


@dataclass(frozen=True)
class ObjectSample(_Sample):
    """A sculpture in a courtyard, orbited at three heights: most pairs of views share much."""

    scene = "object"
    default_points = staticmethod(lambda views: 8000)

    views: int = 60
    """Number of images."""


Sample = Union[  # noqa: UP007  (tyro reads the annotations of the members)
    Annotated[CitySample, tyro.conf.subcommand("city", prefix_name=False)],
    Annotated[ObjectSample, tyro.conf.subcommand("object", prefix_name=False)],
]


def generate(sample: CitySample | ObjectSample) -> bool:
    """Write the capture ``sample`` asks for.

    The capture is written beside its place and moved there when complete, so that the folder never holds half of one.

    Returns:
        False if the folder already holds this very capture.

    Raises:
        ValueError: An argument cannot be met, or the folder holds something else.
    """
    sample.check()
    output = sample.output.expanduser().absolute()
    if not _may_write(output, sample):
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    try:
        partial.mkdir()
        _write(partial, sample)
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists():
            if output.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(output)
    return True


def _may_write(output: Path, sample: _Sample) -> bool:
    """Whether the capture has to be written; a ValueError if something else is in its place."""
    if not output.exists():
        return True
    if not output.is_dir():
        raise ValueError(f"--output {output} is a file; name a folder")
    if not any(output.iterdir()):
        return True
    marker = output / MARKER
    try:
        made = json.loads(marker.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        made = None
    if not isinstance(made, dict) or made.get("generator") != "odin-sample":
        raise ValueError(f"--output {output} is not empty and no capture of odin-sample; name another folder")
    if sample.overwrite:
        return True
    if made == sample.description():
        return False
    wanted = sample.description().items()
    differs = ", ".join(f"{key} {made.get(key)} instead of {value}" for key, value in wanted if made.get(key) != value)
    raise ValueError(f"--output {output} holds a capture with {differs}; add --overwrite to replace it")


def _write(folder: Path, sample: CitySample | ObjectSample) -> None:
    # Imported here, so that --help and wrong arguments answer at once.
    import numpy as np
    from PIL import Image

    from odin_nerfstudio.tools.sampling import capture, city, orbit, tracks
    from odin_nerfstudio.tools.sampling.render import Renderer

    width, height = sample.image_size()
    views, seed = sample.views, sample.seed
    rng = np.random.default_rng([seed, 0])
    if isinstance(sample, CitySample):
        cameras = city.survey(views, width, height, rng)
        mesh, reach = city.build(cameras, seed), city.MAX_RANGE
    else:
        cameras = orbit.orbit(views, width, height, rng)
        mesh, reach = orbit.build(seed), orbit.MAX_RANGE
    renderer = Renderer(mesh)
    wanted = sample.point_count()
    spare = tracks.candidate_count(wanted)
    (folder / "images").mkdir()

    def photograph(view: int) -> tracks.Candidates:
        image = renderer.image(cameras, view)
        path = folder / "images" / capture.image_name(view)
        Image.fromarray(image).save(path, quality=95, subsampling=0)
        share = spare * (view + 1) // views - spare * view // views
        return tracks.propose(renderer, cameras, view, image, share, np.random.default_rng([seed, 2, view]))

    with _Mapper() as mapper:
        parts = list(mapper("Casting images", photograph, views))
        candidates = tracks.Candidates(
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.normals for part in parts]),
            np.concatenate([part.colours for part in parts]),
        )
        model = tracks.build_tracks(
            renderer, cameras, candidates, wanted, reach, seed, lambda work, n: mapper("Matching points", work, n)
        )
    capture.write_model(folder / capture.MODEL_FOLDER, cameras, model)
    capture.write_transforms(folder, cameras, model)
    (folder / MARKER).write_text(json.dumps(sample.description(), indent=1) + "\n", encoding="utf-8")


class _Mapper:
    """Maps work over views on all cores, in order, with a progress bar."""

    def __enter__(self) -> _Mapper:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._progress.stop()

    def __call__(self, title: str, work: Callable[[int], Any], count: int) -> Iterator[Any]:
        task = self._progress.add_task(title, total=count)
        for result in self._pool.map(work, range(count)):
            self._progress.advance(task)
            yield result


def main(args: list[str] | None = None) -> None:
    """Entry point of ``odin-sample``."""
    sample = tyro.cli(Sample, prog="odin-sample", description=__doc__, args=args)  # pyright: ignore[reportArgumentType, reportCallIssue]
    # A terminated run unwinds as an interrupted one does, so that it leaves no half capture behind.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit("odin-sample: terminated"))
    try:
        written = generate(sample)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"odin-sample: {error}")
    finally:
        signal.signal(signal.SIGTERM, previous)
    if written:
        print(f"Wrote {sample.views} views to {sample.output}.")
        print(f"Train with: ns-train odin-splatfacto --data {sample.output}")
    else:
        print(f"{sample.output} is already there.")


if __name__ == "__main__":
    main()
