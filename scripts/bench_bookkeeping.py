"""Measures what the runtime keeps and does beside rendering, up to 50 million primitives; nothing is rendered.

    OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 python scripts/bench_bookkeeping.py [--json FILE]

A square of terrain is covered evenly by primitives; every view looks straight down on a small share of it. Four things
are measured, each in a process of its own:

- kernels: single passes over positions, scales, versions and masks of all rows.
- replicated: one rank of eight. The real engine takes part in steps of eight lanes; contributions of the other seven
  are made up, four of them arrive in time, three after this rank's next task has started. The table has the six columns
  that bookkeeping looks at (positions and scales, with moments), so that 50 million rows fit into this machine.
- full: the same with all 59 columns, for the numbers of primitives that fit.
- owner: the owner of one of eight shards, with all 59 columns; its projections and what comes back are made up.

Every process says what it holds and refuses to start where that exceeds --limit-gb or the memory that is free.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from bench_quality import put_between_marks
from bookkeeping_worker import Job, run

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "bench_bookkeeping"


@dataclass
class Options:
    """What to measure and where to write."""

    rows: list[int] = field(default_factory=lambda: [1_000_000, 10_000_000, 50_000_000])
    """Primitives of the whole model."""
    kernels: list[int] = field(default_factory=lambda: [1_000_000, 10_000_000, 50_000_000])
    """Rows of single passes."""
    full: list[int] = field(default_factory=lambda: [1_000_000])
    """Primitives that one rank holds with all 59 columns."""
    ranks: int = 8
    """Ranks, each with one view per step."""
    share: float = 0.01
    """Share of the terrain that a view sees."""
    steps: int = 6
    """Steps measured, after two that warm up; medians count."""
    shuffled: list[int] = field(default_factory=lambda: [10_000_000])
    """The same with rows in no order. Otherwise they lie along a curve, as seed points do for the most part."""
    limit_gb: float = 12.0
    """No process takes more memory than that."""
    json: Path | None = None
    """Write all figures here."""
    docs: Path | None = REPOSITORY / "docs" / "scaling.md"
    """Put the table between the marks of this file."""


def jobs_of(options: Options) -> list[Job]:
    """What is measured, smallest first."""
    common: dict[str, Any] = {"ranks": options.ranks, "share": options.share, "steps": options.steps, "order": "place"}
    out = [Job("kernels", n, n, 6, **common) for n in options.kernels]
    out += [Job("replicated", n, n, 6, **common) for n in options.rows]
    shuffled: dict[str, Any] = common | {"order": "shuffled"}
    out += [Job("replicated", n, n, 6, **shuffled) for n in options.shuffled]
    out += [Job("replicated", n, n, 59, **common) for n in options.full]
    return out + [Job("owner", n // options.ranks, n, 59, **common) for n in options.rows]


def measured(job: Job, limit_gb: float) -> dict[str, Any]:
    """A job's figures, from a process of its own.

    Raises:
        RuntimeError: It needs more memory than it may have.
    """
    free = int(next(x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x).split()[1]) * 1024
    if job.expected_bytes() > min(1e9 * limit_gb, 0.8 * free):
        raise RuntimeError(
            f"{job} needs about {job.expected_bytes() / 1e9:.1f} GB; {free / 1e9:.1f} GB are free and the limit is"
            f" {limit_gb:g} GB: measure fewer --rows"
        )
    command = [sys.executable, __file__, "--one", json.dumps(asdict(job))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(figures: list[dict[str, Any]], options: Options) -> str:
    """All figures as Markdown."""
    out = [
        f"`python scripts/bench_bookkeeping.py`: {options.ranks} ranks, as many lanes, a view sees {options.share:.0%}."
        f" Milliseconds of one thread, medians of {options.steps} steps.",
        "",
        "| rank | rows held, columns, order | state, work [bytes per row held] | peak memory [GB] | candidates of a"
        " view: row by row, by blocks | boxes, each 8 steps | candidates, all lanes | gates, shadow | packing, staging"
        " | publication beside Adam | dense Adam |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in (f for f in figures if f["kind"] != "kernels"):
        names = ("each", "view", "boxes", "lanes", "gates", "pack", "publish", "adam")
        ms = {k: f"{1e3 * f[k]:,.1f}" for k in names}
        out.append(
            f"| {f['kind']} | {f['rows']:,}, {f['columns']}, {f['order']} | {f['state']:.0f}, {f['work']:.0f} |"
            f" {f['peak'] / 1e9:.1f} | {ms['each']}, {ms['view']} | {ms['boxes']} | {ms['lanes']} | {ms['gates']} |"
            f" {ms['pack']} | {ms['publish']} | {ms['adam']} |"
        )
    passes = ("each", "boxes", "view", "ids", "new mask", "add mask", "publishable rows", "fill versions")
    out += [
        "",
        "Single passes, milliseconds of processor time:",
        "",
        "| rows | candidates of a view row by row | boxes, each 8 steps | candidates by blocks | their ids | a new mask"
        " | adding a mask | finding publishable rows | versions of all |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in (f for f in figures if f["kind"] == "kernels"):
        out.append(f"| {f['rows']:,} | " + " | ".join(f"{1e3 * f[name]:,.1f}" for name in passes) + " |")
    return "\n".join(out)


def main() -> None:
    """Measures what the options ask for."""
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        print(json.dumps(run(Job(**json.loads(sys.argv[2])))))
        return
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    figures = []
    for job in jobs_of(options):
        begin = time.perf_counter()
        figures.append(measured(job, options.limit_gb))
        print(f"{time.perf_counter() - begin:.0f} s: {figures[-1]}", flush=True)
    print(table(figures, options))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))
    if options.docs is not None:
        put_between_marks(options.docs, table(figures, options), MARK)


if __name__ == "__main__":
    main()
