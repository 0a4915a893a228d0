"""Where the time of a run goes: monotonic clocks around the actual blocking calls, per rank and step.

Words: *wait* is time in which this rank has a next task but may not start it (critical-path wait). How much more a run
would have waited at a barrier is for `barrier_estimate` to say, from the `Timeline`.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import defaultdict, deque
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


@dataclass(frozen=True)
class Doing:
    """What a rank is doing; replaced as a whole, so that any thread may read it."""

    what: str
    """``computing``, ``waiting``, ``paused``, ``busy`` (evaluating, saving) or ``updating`` (the rest)."""
    step: int
    since: float
    """Monotonic clock, seconds."""
    hazard: str = ""
    awaited: tuple[tuple[int, int], ...] = ()
    """(step, lane) of the contributions that a waiting rank waits for; lane -1 - r: sums of owner r."""


class Timeline:
    """This rank's tasks and the arrivals from its peers, as `barrier_estimate` replays them. Seconds.

    Work is split into what a synchronized run could do before the step before is complete (``before``), what it could
    not (``after``) and its publication; time that only finer gates cost (``gating``) and pauses are left out.
    ``reaction`` is what passed between an arrival and the end of the wait for it, 0 without one.
    """

    TASK_COLUMNS = ("step", "lane", "before", "after", "publication", "wait", "paused", "reaction", "end")
    ARRIVAL_COLUMNS = ("step", "lane", "time")
    LIMIT = 100_000
    """Tasks that are kept; of longer runs, the latest."""

    def __init__(self) -> None:
        self.tasks = array("d")
        """Per task: `TASK_COLUMNS`; the last is the end of its contribution (monotonic)."""
        self.arrivals = array("d")
        """Per contribution of a peer: `ARRIVAL_COLUMNS`; the last is the arrival of its last part (monotonic)."""
        self._mark: float | None = None
        self._spent: dict[str, float] = dict.fromkeys(("after", "gating", "paused", "publish", "wait"), 0.0)
        self._reaction = 0.0
        self._whole: deque[float] = deque(maxlen=15)
        self._of_whole = 0.0
        self._published: deque[float] = deque(maxlen=15)

    def begin(self, time: float) -> None:
        """The rank is about to start a task; counts for the first one only."""
        if self._mark is None:
            self._mark = time

    def spend(self, what: str, seconds: float) -> None:
        """Note time since the last task: ``after``, ``gating``, ``paused``, ``publish`` or ``wait``."""
        self._spent[what] += seconds

    def inside(self) -> float:
        """Waits and publications since the last task; for blocks that contain some."""
        return self._spent["wait"] + self._spent["publish"]

    def whole(self, seconds: float) -> None:
        """A step was published in one go, as a synchronized run does with all of them."""
        self._whole.append(seconds)
        self._of_whole += seconds

    def reacted(self, seconds: float) -> None:
        """A wait ended so long after the arrival that ended it."""
        self._reaction = max(0.0, seconds)

    @property
    def reaction(self) -> float:
        """Median time from an arrival to the end of the wait for it; 0 if there was none."""
        column, width = self.TASK_COLUMNS.index("reaction"), len(self.TASK_COLUMNS)
        return statistics.median([time for time in self.tasks[column::width] if time > 0] or [0.0])

    def task(self, step: int, lane: int, end: float) -> None:
        """A task has contributed."""
        spent, mark = self._spent, self._mark
        assert mark is not None
        before = end - mark - sum(spent.values())
        if not self.tasks or self.tasks[-len(self.TASK_COLUMNS)] != step:
            self._published.append(spent["publish"])
        publish = spent["publish"]
        if publish - self._of_whole > 0.1 * publish:  # finer gates publish a step in parts, which takes longer
            publish = sum(self._published) / len(self._published)
            if len(self._whole) > 2:
                publish = min(publish, sum(self._whole) / len(self._whole))
        wait, paused, reaction = spent["wait"], spent["paused"], self._reaction
        self.tasks.extend((step, lane, max(0.0, before), spent["after"], publish, wait, paused, reaction, end))
        self._mark, self._of_whole, self._reaction = end, 0.0, 0.0
        for what in spent:
            spent[what] = 0.0
        width = len(self.TASK_COLUMNS)
        if len(self.tasks) > width * self.LIMIT:
            del self.tasks[: width * (self.LIMIT // 2)]
            self._forget_arrivals_before(self.tasks[0])

    def _forget_arrivals_before(self, step: float) -> None:
        width = len(self.ARRIVAL_COLUMNS)
        known = range(0, len(self.arrivals), width)
        del self.arrivals[: next((i for i in known if self.arrivals[i] >= step), len(self.arrivals))]

    def arrived(self, step: int, lane: int, time: float) -> None:
        """The last part of a peer's contribution is here."""
        self.arrivals.extend((step, lane, time))


@dataclass
class StepRecord:
    """Seconds and bytes of one step on one rank."""

    step: int
    acquire: float = 0.0
    """Candidates, gates and shadows, without waits."""
    wait: dict[tuple[str, int], float] = field(default_factory=dict)
    """By (hazard, awaited rank); a wait for several ranks counts for the one that arrived last."""
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
    conflicts: int = 0
    """Tasks that found rows with pending older updates among those that they read."""
    conflict_rows: int = 0
    """Such rows."""
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
        self.timeline = Timeline()
        self.doing = Doing("updating", -1, self.started)

    def now(self) -> float:
        """The time that everything here is measured with. [s]"""
        return now()

    def record(self, step: int) -> StepRecord:
        """The record of a step, made at first use."""
        found = self._records.get(step)
        if found is None:
            found = self._records[step] = StepRecord(step)
        return found

    def enter(self, what: str, step: int, hazard: str = "", awaited: tuple[tuple[int, int], ...] = ()) -> None:
        """Say what this rank is doing from now on."""
        self.doing = Doing(what, step, now(), hazard, awaited)

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
            if what == "publish":
                self.timeline.spend("publish", end - begin)
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
        self.timeline.spend("wait", end - start)
        self.span("wait", start, end, step=step, hazard=hazard, peer=peer)

    def structural(self, step: int, start: float, end: float) -> None:
        """Count the surgery of a structural step, after its drain."""
        self.totals["structural"] += end - start
        self.timeline.spend("after", end - start)
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
        self.timeline = Timeline()
        self.started = now()


_FIELDS = (
    "acquire", "compute", "contribute", "publish",
    "sent", "received", "active_rows", "candidate_rows", "deferred_rows", "tasks",
    "conflicts", "conflict_rows",
)  # fmt: skip
