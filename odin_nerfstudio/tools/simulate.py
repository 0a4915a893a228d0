"""``odin-simulate``: what a recorded run would gain on other devices and links, in every mode and order."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro


@dataclass
class SimulateCommand:
    """Simulate a recorded run on several devices: gain over a barrier, and what decides it.

    'odin-simulate record --load-config CONFIG' records a trained scene, as does training with --pipeline.odin.record.
    """

    trace: Path
    """Recording, or the folder that holds it."""
    ranks: int = 8
    """Devices."""
    views_per_step: int | None = None
    """Views per optimizer step over all devices. Default: one for each device."""
    link: list[str] = field(default_factory=lambda: ["pcie4"])
    """Links between the devices: nvlink, pcie4, 100gbe, none, or BANDWIDTH[,LATENCY] such as 25GB/s,10us; in nodes of 8
    devices: nvlink+ib, pcie4+100gbe."""
    placement: Literal["replicated", "sharded"] = "replicated"
    """Where primitives live, see --pipeline.odin.placement; sharded needs a recording of a checkpoint."""
    mode: list[Literal["barrier", "quality", "throughput"]] = field(
        default_factory=lambda: ["barrier", "quality", "throughput"]
    )
    """Modes. Barrier is always simulated too, since the others are compared to it."""
    order: list[Literal["rlg", "local", "random"]] | None = None
    """Orders of the views, see --pipeline.odin.order. Default: rlg and random; sharded also local, which is its own."""
    speed: float = 1.0
    """How many times as fast as recorded the devices compute; messages stay as large. Say 30 for a GPU after one CPU
    core."""
    overhead_speed: float | None = None
    """The same for publication, candidate sets and everything else beside rendering. Default: as --speed."""
    skew: float = 0.0
    """Spread of compute times beside that of the views: standard deviation of the logarithm of a factor per task."""
    epochs: float = 3.0
    """Length of the simulation, in epochs."""
    lookahead: int = 2
    """See --pipeline.odin.lookahead."""
    max_delay: int = 2
    """See --pipeline.odin.max-delay."""
    max_overlap: float = 0.5
    """See --pipeline.odin.max-overlap."""
    max_impact: float = 0.02
    """See --pipeline.odin.max-impact."""
    structural_every: int | None = None
    """Steps between structural steps, 0 for none. Default: as recorded."""
    reduce: Literal["auto", "always", "never"] = "auto"
    """Sum rows at their owners; auto decides as the runtime does."""
    turn_lanes: bool = False
    """See --pipeline.odin.turn-lanes."""
    linger: bool = True
    """Let ranks wait for whole steps where that is cheaper, as in training."""
    seed: int = 0
    """Seed of plans and of everything drawn."""
    json: Path | None = None
    """Write the numbers to this file."""
    plot: Path | None = None
    """Draw gains and hidden shares to this image."""

    def run(self) -> None:
        """Simulate and print.

        Raises:
            ValueError: An argument or the recording is no good.
        """
        from odin_nerfstudio.runtime.recording import load_recording
        from odin_nerfstudio.runtime.throughput import DelayLimits
        from odin_nerfstudio.simulation.cluster import Setup, compare
        from odin_nerfstudio.simulation.fabric import parse_fabric
        from odin_nerfstudio.simulation.results import draw, print_table, table_rows
        from odin_nerfstudio.simulation.scene import scene_of
        from odin_nerfstudio.simulation.sharded import compare_sharded
        from odin_nerfstudio.simulation.shards import sharded_scene_of

        recording = load_recording(self.trace)
        sharded = None
        if self.placement == "sharded":
            sharded = sharded_scene_of(recording).faster(self.speed, self.overhead_speed)
        scene = scene_of(recording).faster(self.speed, self.overhead_speed) if sharded is None else sharded.scene
        name = recording.text.get("scene", "") or self.trace.resolve().stem
        rows, assumptions = [], list(scene.assumptions)
        for text in self.link:
            setup = Setup(
                ranks=self.ranks, views_per_step=self.views_per_step, link=parse_fabric(text), epochs=self.epochs,
                seed=self.seed, skew=self.skew, lookahead=self.lookahead,
                limits=DelayLimits(self.max_delay, self.max_overlap, self.max_impact),
                structural_every=self.structural_every, reduce=self.reduce, linger=self.linger,
                turn_lanes=self.turn_lanes,
            )  # fmt: skip
            if sharded is None:
                outcomes = compare(scene, setup, self.mode, self.order or ["rlg", "random"])
            else:
                orders = self.order or ["local", "rlg", "random"]
                outcomes = compare_sharded(sharded, setup, self.mode, orders)
            rows += [{**row, "placement": self.placement} for row in table_rows(name, scene, setup, outcomes)]
            assumptions += [a for a in setup.assumptions() if a not in assumptions]
        print_table(f"{name}: {self.ranks} devices, {self.placement}", rows, assumptions)
        if self.json is not None:
            numbers = {"trace": str(self.trace), "rows": rows, "assumptions": assumptions}
            self.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        if self.plot is not None:
            draw(rows, self.plot, f"{name}: {self.ranks} devices, {self.placement}, simulated")


@dataclass
class RecordCommand:
    """Record what every view of a trained scene reads, writes and takes: each is rendered once, nothing is updated."""

    load_config: Path
    """config.yml of the run."""
    output: Path | None = None
    """Folder to write recording.npz to. Default: the run's folder."""
    repeats: int = 2
    """Times that a view is rendered; the shortest counts."""
    block: int | None = None
    """Primitives in a block of the recorded sets, 1 for exact ones. Default: exact unless the file would be large."""

    def run(self) -> None:
        """Record.

        Raises:
            ValueError: The run cannot be recorded.
        """
        from odin_nerfstudio.glue.record_views import record_checkpoint

        record_checkpoint(self.load_config, self.output or self.load_config.parent, self.repeats, self.block)


def main() -> None:
    """Entry point."""
    records = sys.argv[1:2] == ["record"]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        if records:
            tyro.cli(RecordCommand, prog="odin-simulate record", args=sys.argv[2:]).run()
        else:
            tyro.cli(SimulateCommand, prog="odin-simulate").run()
    except (ValueError, OSError) as error:
        sys.exit(f"odin-simulate: {error}")


if __name__ == "__main__":
    main()
