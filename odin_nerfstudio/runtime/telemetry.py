"""Where the time of a run goes: monotonic clocks around the actual blocking calls, per rank and step.

Words: *wait* is time in which this rank has a next task but may not start it (critical-path wait). *Barrier wait* is
what
the same task would have waited for the complete older steps on this run's own timeline; the difference is *hidden*. It
is an estimate, since a run that really waits shifts all later times: compare two runs for a measurement.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.gate import DelayedRead

now = time.monotonic


@dataclass(frozen=True)
class Span:
    """A stretch of time of this rank, for the trace."""

    name: str
    lane: str
    """Row of the trace within the rank: ``main`` or ``network``."""
    start: float
    end: float
    args: Mapping[str, str | int | float]


@dataclass
class StepRecord:
    """Seconds and bytes of one step on one rank."""

    step: int
    acquire: float = 0.0
    """Candidates, gates and shadows, without waits."""
    wait: dict[tuple[str, int], float] = field(default_factory=dict)
    """By (hazard, awaited rank); a wait for several ranks counts for the one that arrived last."""
    barrier_wait: float = 0.0
    compute: float = 0.0
    """From the start of a task to the end of its backward pass."""
    contribute: float = 0.0
    publish: float = 0.0
    sent: int = 0
    received: int = 0
    active_rows: int = 0
    candidate_rows: int = 0
    deferred_rows: int = 0
    tasks: int = 0
    delayed: list[DelayedRead] = field(default_factory=list)
    """Reads of rows with pending older updates that were admitted, by view."""

    @property
    def waited(self) -> float:
        """Critical-path wait. [s]"""
        return sum(self.wait.values())


class Telemetry:
    """Collects the records and, if asked to, the spans of a rank."""

    def __init__(self, rank: int, trace: bool = False) -> None:
        self.rank = rank
        self.trace = trace
        self.spans: list[Span] = []
        self.epoch = time.time() - now()
        """Add to a monotonic time to get seconds since 1970, which ranks share."""
        self._records: dict[int, StepRecord] = {}
        self.totals: dict[str, float] = defaultdict(float)
        self.waits: dict[tuple[str, int], float] = defaultdict(float)
        self.started = now()

    def record(self, step: int) -> StepRecord:
        """The record of a step, made at first use."""
        found = self._records.get(step)
        if found is None:
            found = self._records[step] = StepRecord(step)
        return found

    @contextmanager
    def timed(self, step: int, what: str, **args: str | int | float) -> Iterator[None]:
        """Add the time of a block to a record's field of that name."""
        begin = now()
        try:
            yield
        finally:
            end = now()
            record = self.record(step)
            setattr(record, what, getattr(record, what) + end - begin)
            self.span(what, begin, end, "main", step=step, **args)

    def span(self, name: str, start: float, end: float, lane: str = "main", **args: str | int | float) -> None:
        """Add a stretch to the trace."""
        if self.trace:
            self.spans.append(Span(name, lane, start, end, args))

    def waited(self, step: int, hazard: str, peer: int, start: float, end: float) -> None:
        """Count a wait of a task of `step`."""
        record = self.record(step)
        key = (hazard, peer)
        record.wait[key] = record.wait.get(key, 0.0) + end - start
        self.span("wait", start, end, step=step, hazard=hazard, peer=peer)

    def structural(self, step: int, start: float, end: float) -> None:
        """Count the surgery of a structural step, after its drain."""
        self.totals["structural"] += end - start
        self.span("structural", start, end, step=step)

    def finish(self, step: int) -> StepRecord | None:
        """Close a step's record, add it to the totals and hand it out; None if nothing was recorded."""
        record = self._records.pop(step, None)
        if record is None:
            return None
        for name in _FIELDS:
            self.totals[name] += getattr(record, name)
        self.totals["steps"] += 1
        self.totals["wait"] += record.waited
        self.totals["hidden"] += max(0.0, record.barrier_wait - record.waited)
        for key, seconds in record.wait.items():
            self.waits[key] += seconds
        for read in record.delayed:
            self.totals["delayed_tasks"] += 1
            self.totals["delayed_rows"] += read.rows
            self.totals["delayed_mass"] += read.mass
            self.totals["delay.max"] = max(self.totals["delay.max"], read.delay)
        return record

    def summary(self) -> dict[str, float]:
        """Totals by name; waits as ``wait.<hazard>.<rank>``. Seconds, bytes, rows and counts."""
        out = {"rank": float(self.rank), "elapsed": now() - self.started, **self.totals}
        out.update({f"wait.{hazard}.{peer}": seconds for (hazard, peer), seconds in sorted(self.waits.items())})
        return out

    def reset(self) -> None:
        """Forget the totals (not the spans), to measure a stretch of a run."""
        self.totals.clear()
        self.waits.clear()
        self.started = now()


_FIELDS = (
    "acquire", "barrier_wait", "compute", "contribute", "publish",
    "sent", "received", "active_rows", "candidate_rows", "deferred_rows", "tasks",
)  # fmt: skip
