"""What limits the wait that throughput mode hides: simulated again with one thing changed at a time.

    python scripts/bench_limits.py RECORDING [RECORDING ...] [--link pcie4] [--json FILE]

Every change is compared with a barrier under the same change, in RLG order. ``rank load`` is the time that the slowest
rank's views take over the mean rank's: no mode hides that as long as ranks keep their views. ``lanes change ranks``
hands every lane to the next rank once an epoch, so that such differences even out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from bench_quality import put_between_marks
from bench_sync import REPOSITORY

from odin_nerfstudio.planning.schedule import Plan, make_plan
from odin_nerfstudio.runtime.recording import load_recording
from odin_nerfstudio.runtime.throughput import DelayLimits
from odin_nerfstudio.simulation.cluster import Setup, simulate
from odin_nerfstudio.simulation.network import parse_link
from odin_nerfstudio.simulation.scene import Scene, scene_of

NEVER = 1e9
"""A limit that nothing reaches."""
LIMITS: dict[str, DelayLimits] = {
    "max_overlap 0.1": DelayLimits(max_overlap=0.1),
    "max_overlap 0.3": DelayLimits(max_overlap=0.3),
    "default": DelayLimits(),
    "max_overlap 1": DelayLimits(max_overlap=1.0),
    "any impact": DelayLimits(max_impact=NEVER),
    "delay and look-ahead 4": DelayLimits(max_delay=4),
    "any harm": DelayLimits(max_overlap=NEVER, max_impact=NEVER),
    "any harm, delay and look-ahead 4": DelayLimits(max_overlap=NEVER, max_impact=NEVER, max_delay=4),
}
FREE = ("mark", "bound", "scan", "sweep", "defer")
"""Overheads that only finer gates have."""


@dataclass
class Options:
    """What to simulate."""

    recordings: Annotated[list[Path], tyro.conf.Positional]
    """Recordings, or folders that hold them; the table calls them by their folders' names."""
    ranks: int = 8
    """Devices."""
    link: str = "pcie4"
    """Between them, see odin-simulate."""
    speed: float = 10.0
    """How many times as fast as recorded the devices render."""
    overhead_speed: float = 100.0
    """How many times as fast they do everything else."""
    skew: float = 0.1
    """Spread of compute times beside that of the views."""
    steps: int = 50
    """Steps of each simulation."""
    json: Path | None = None
    """Keep all figures here; what is there already is not simulated again."""
    docs: Path | None = REPOSITORY / "docs" / "simulation.md"
    """Put the table between the marks of this file."""

    def run(self) -> None:
        rows: list[dict[str, Any]] = []
        if self.json is not None and self.json.exists():
            rows = json.loads(self.json.read_text())
        for path in self.recordings:
            name = path.name if path.is_dir() else path.parent.name
            if any(row["scene"] == name for row in rows):
                continue
            scene = scene_of(load_recording(path)).faster(self.speed, self.overhead_speed)
            rows.append({"scene": name, **self.variants(scene)})
            print(json.dumps(rows[-1]), flush=True)
            if self.json is not None:
                self.json.write_text(json.dumps(rows, indent=1))
        print(self.table(rows))
        if self.docs:
            put_between_marks(self.docs, self.table(rows), "limits")

    def variants(self, scene: Scene) -> dict[str, Any]:
        """Gain over a barrier and share of its wait that is hidden, by what was changed."""
        setup = Setup(
            ranks=self.ranks, link=parse_link(self.link), skew=self.skew, least_steps=self.steps, epochs=1e-9,
            structural_every=0, reduce="never", limits=DelayLimits(),
        )  # fmt: skip
        plan, balanced = self._plan(scene), self._plan(scene, cost=scene.seconds)
        turned = self._plan(scene, turn_every=max(1, scene.views // self.ranks))
        out: dict[str, Any] = {}

        def add(name: str, scene: Scene, plan: Plan, setup: Setup, base: Any = None) -> Any:
            base = base or simulate(scene, plan, replace(setup, limits=DelayLimits()), "barrier")
            found = simulate(scene, plan, setup, "throughput")
            out[name] = [base.seconds / found.seconds, 1 - found.wait_per_task / base.wait_per_task]
            return base

        base = None
        for name, limits in LIMITS.items():
            far = replace(setup, limits=limits, lookahead=max(2, limits.max_delay))
            base = add(name, scene, plan, far, base)
        any_harm = replace(setup, limits=LIMITS["any harm"])
        other = add("views balanced by time", scene, balanced, setup)
        add("balanced, any harm", scene, balanced, any_harm, other)
        other = add("lanes change ranks", scene, turned, setup)
        add("changing, any harm", scene, turned, any_harm, other)
        free = replace(scene.overheads, **dict.fromkeys(FREE, 0.0))
        add("parts cost nothing", replace(scene, overheads=free), plan, setup)
        add("no network", scene, plan, replace(setup, link=parse_link("none")))
        assert base is not None
        return {
            "waits": base.wait_share, "ceiling": 1 / (1 - base.wait_share), "variants": out,
            "rank_load": self._rank_load(scene, plan), "rank_load_balanced": self._rank_load(scene, balanced),
            "balanced_barrier": base.seconds / other.seconds,
        }  # fmt: skip

    def _plan(self, scene: Scene, **more: Any) -> Plan:
        return make_plan(scene.rlg, ranks=self.ranks, views_per_step=self.ranks, steps=self.steps, **more)

    def _rank_load(self, scene: Scene, plan: Plan) -> float:
        load = np.zeros(self.ranks)
        for step in range(self.steps):
            for lane in range(self.ranks):
                load[plan.rank(step, lane)] += scene.seconds[plan.view(step, lane)]
        return float(load.max() / load.mean())

    def table(self, rows: Sequence[dict[str, Any]]) -> str:
        """One line per scene, then means, as Markdown."""
        names = list(max((row["variants"] for row in rows), key=len))
        lines = [
            f"`python scripts/bench_limits.py ... --ranks {self.ranks} --link {self.link} --speed {self.speed:g} "
            f"--overhead-speed {self.overhead_speed:g} --skew {self.skew:g} --steps {self.steps}`",
            "",
            f"| scene | ceiling | rank load (balanced) | {' | '.join(names)} |",
            "| --- " * (3 + len(names)) + "|",
        ]
        for row in rows:
            found = [row["variants"].get(name) for name in names]
            cells = ["" if one is None else f"{one[0]:.2f}, {one[1]:.0%}" for one in found]
            load = f"{row['rank_load']:.2f} ({row['rank_load_balanced']:.2f})"
            lines.append(f"| {row['scene']} | {row['ceiling']:.2f} | {load} | {' | '.join(cells)} |")
        known = {name: [row["variants"][name] for row in rows if name in row["variants"]] for name in names}
        cells = [
            f"{statistics.mean(one[0] for one in of):.2f}, {statistics.mean(one[1] for one in of):.0%}"
            + (f" (of {len(of)})" if len(of) < len(rows) else "")
            for of in known.values()
        ]
        ceiling, loads = (statistics.mean(row[key] for row in rows) for key in ("ceiling", "rank_load"))
        balanced = statistics.mean(row["rank_load_balanced"] for row in rows)
        lines.append(f"| **mean** | {ceiling:.2f} | {loads:.2f} ({balanced:.2f}) | {' | '.join(cells)} |")
        return "\n".join(lines)


if __name__ == "__main__":
    tyro.cli(Options, description=__doc__).run()
