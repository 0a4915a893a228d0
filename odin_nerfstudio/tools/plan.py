"""``odin-plan``: ask before training what several devices will bring on a dataset."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from odin_nerfstudio.planning.gain import Gain
    from odin_nerfstudio.planning.placement import Wish
    from odin_nerfstudio.planning.schedule import Plan
    from odin_nerfstudio.planning.tracks import Tracks


@dataclass
class PlanCommand:
    """Predict how the views of a dataset conflict when several devices train on it, in RLG and in random order."""

    data: Path
    """Dataset that ns-train can read: a folder with transforms.json or a COLMAP model, or a .json file."""
    ranks: int = 8
    """Devices to plan for."""
    views_per_step: int | None = None
    """Views per optimizer step over all devices. Default: one for each device."""
    order: Literal["rlg", "local", "random"] = "rlg"
    """Order of the plan that is drawn, saved and judged, see --pipeline.odin.order; others are in the table, too."""
    seed: int = 0
    """Seed of the plan."""
    max_delay: int = 2
    """Conflicts are counted over this many steps and one more."""
    diversity: float = 0.2
    """Cost of overlap between the views of one step, as a multiple of a conflict between steps."""
    wait: float = 0.2
    """Share of time that barriers wait (15 to 30 % was seen on 2 to 8 devices); the expected gain rests on it. With
    --trace and --link it follows from these instead."""
    trace: Path | None = None
    """Recording of a training on this dataset (--pipeline.odin.record or 'odin-simulate record'): its real sets and
    times, instead of observed points, decide the expected gain."""
    link: str | None = None
    """With --trace, links between the devices instead of a given wait, see odin-simulate."""
    speed: float = 1.0
    """With --trace and --link, how many times as fast as recorded the devices compute."""
    device_memory_gb: float | None = None
    """Memory of a device in GB (10^9 bytes), for the advice on placement. Default: that of the CUDA device, or without
    one this machine's memory divided by the ranks."""
    primitives: int | None = None
    """Primitives to expect. Default: those of the recording or, without --trace, an estimate from the seed points."""
    sh_degree: int = 3
    """Degree of the spherical harmonics."""
    strategy: Literal["default", "mcmc"] = "default"
    """Densification strategy; the default one keeps statistics of each primitive."""
    splats: Literal["gaussians", "surfels"] = "gaussians"
    """What primitives are; surfels (odin-2dgs) send more where they are sharded."""
    dataparser: str | None = None
    """nerfstudio dataparser of the dataset, e.g. blender-data. Default: by what lies in the folder."""
    json: Path | None = None
    """Write the numbers to this file."""
    plot: Path | None = None
    """Draw conflicts, cameras and ranks to this image."""
    save: Path | None = None
    """Write the plan: .npz to load again, .json to read."""

    def run(self) -> None:
        """Plan and print.

        Raises:
            ValueError: An argument or the dataset is no good.
        """
        from odin_nerfstudio.planning import memory
        from odin_nerfstudio.planning.plan_file import save_plan
        from odin_nerfstudio.planning.plot import plot_report
        from odin_nerfstudio.planning.report import make_report
        from odin_nerfstudio.tools.plan_dataset import training_tracks

        # nerfstudio prints while it reads; standard output is for the table.
        with contextlib.redirect_stdout(sys.stderr):
            tracks = training_tracks(self.data, self.dataparser, self.seed)
        lanes = self.ranks if self.views_per_step is None else self.views_per_step
        report = make_report(
            tracks, ranks=self.ranks, views_per_step=lanes, order=self.order, seed=self.seed,
            max_delay=self.max_delay, diversity=self.diversity, gain_of=self._gain, wish=self._wish(),
        )  # fmt: skip
        title = (self.data.parent if self.data.suffix == ".json" else self.data).resolve().name
        _print_report(title, report.rows(), report.advice(), report.gain.assumptions)
        if report.placement is not None:
            print(f"{report.placement.advice()} {memory.RESTS_ON}")
        if self.json is not None:
            self.json.write_text(json.dumps(report.numbers(), indent=2) + "\n", encoding="utf-8")
        if self.plot is not None:
            plot_report(report, self.plot, title)
        if self.save is not None:
            save_plan(report.plan, self.save, epochs=None if self.save.suffix == ".npz" else 4)

    def _wish(self) -> Wish:
        """What is known of devices and model."""
        from odin_nerfstudio.planning.placement import Wish
        from odin_nerfstudio.runtime.recording import load_recording
        from odin_nerfstudio.tools.device_memory import device_memory

        size, source, cuda = device_memory(self.ranks)
        if self.device_memory_gb is not None:
            size, source = 1e9 * self.device_memory_gb, "--device-memory-gb"
        primitives, primitives_of, visible = self.primitives, "--primitives", None
        if self.trace is not None:
            recording = load_recording(self.trace)
            if primitives is None:
                primitives, primitives_of = recording.primitives, "of the recording"
            seen = [sets.visible for sets in recording.sets.values()]
            visible = sum(seen) / len(seen) / recording.primitives if seen and recording.primitives else None
        return Wish(size, source, primitives, primitives_of, self.sh_degree, self.strategy, cuda, self.splats, visible)

    def _gain(self, tracks: Tracks, plan: Plan) -> Gain:
        """What the plan gains over a barrier, simulated."""
        from odin_nerfstudio.runtime.recording import load_recording
        from odin_nerfstudio.simulation.expected import expected_gain, scene_of_tracks
        from odin_nerfstudio.simulation.network import parse_link
        from odin_nerfstudio.simulation.scene import scene_of

        if self.trace is None:
            if self.link is not None:
                raise ValueError("--link needs --trace: without a recording nothing is known of times and bytes")
            return expected_gain(plan, scene_of_tracks(tracks, plan.rlg), self.wait)
        scene = scene_of(load_recording(self.trace)).faster(self.speed)
        if scene.views != plan.views:
            raise ValueError(
                f"--trace {self.trace} is of {scene.views} views, --data {self.data} has {plan.views} for training: "
                "it is a recording of another dataset or split"
            )
        if self.link is not None:
            return expected_gain(plan, scene, None, parse_link(self.link))
        return expected_gain(plan, scene, self.wait)


def _print_report(title: str, rows: list[tuple[str, str]], advice: str, assumptions: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"Plan for {title}", show_header=False, title_justify="left")
    for label, value in rows:
        table.add_row(label, value)
    console.print(table)
    console.print("The expected gain is simulated, not measured. It assumes:")
    for phrase in assumptions:
        console.print(f"- {phrase}", soft_wrap=True)
    console.print(f"[bold]{advice}[/bold]")


def main() -> None:
    """Entry point."""
    command = tyro.cli(PlanCommand, prog="odin-plan")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("odin_nerfstudio").setLevel(logging.INFO)
    try:
        command.run()
    except (ValueError, OSError) as error:
        sys.exit(f"odin-plan: {error}")


if __name__ == "__main__":
    main()
