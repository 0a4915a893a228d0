"""Recordings: what a run's tasks read, wrote and took, in one small file that the simulator replays.

A recording is one ``.npz`` of plain arrays. Per view it holds the sets of the view's last visit (candidates, active
rows and their share of the view's gradient mass), carried through surgery; per task and per step it holds times and
bytes. Its *rows* are primitives or, where the sets would be large, blocks of primitives that lie together in space:
then a row counts as read or written where one of its primitives is, so conflicts are overestimated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from odin_nerfstudio.runtime.stage_costs import StageCosts

FORMAT = 1
EXACT_IDS = 20_000_000
"""Most ids, over all sets, up to which rows are primitives."""
BLOCKS = (64, 256)
"""Primitives in a block, where exact ids are too many."""

TASK_FIELDS = (
    "step", "lane", "view", "rank", "candidates", "active", "visible", "sent", "primitives", "compute", "end",
)  # fmt: skip
"""Columns of `Recording.tasks`; compute: render and backward pass [s]; sent: bytes to all peers; end: when the
contribution was packed, on a monotonic clock that stands still while something is recorded [s]."""
STEP_FIELDS = ("step", "rank", "tasks", "acquire", "contribute", "publish", "wait", "received")
"""Columns of `Recording.steps`; seconds without waits, but for `wait`; received in bytes."""


@dataclass(eq=False)
class ViewSets:
    """What the task of one view reads and writes.

    Attributes:
        candidates: Rows that the view can read, ascending. [n] int32
        active: Rows with a gradient, ascending. [m] int32
        counts: Active primitives in each of them. [m] int32
        mass: Share of the view's gradient that fell on each of them; sums to 1. [m] float32
        visible: Primitives with a radius in the image; their densification statistics travel.
    """

    candidates: np.ndarray
    active: np.ndarray
    counts: np.ndarray
    mass: np.ndarray
    visible: int


@dataclass(frozen=True)
class Overheads:
    """Seconds that a rank spends beside rendering.

    Attributes:
        mark: One candidate set.
        bound: What the first candidate set of a step costs beyond that: how far primitives can have moved.
        acquire: The rest of `acquire`: ids and shadow.
        contribute: `contribute` without candidate sets of other tasks.
        publish: Publication of all rows of a step.
        scan: One pass over all rows that looks for what may be published.
        sweep: What publishing some rows costs beside their share of `publish`.
        defer: What splitting a contribution into two messages adds to `contribute`.
        structural: The surgery of a structural step.
        between: Everything outside the runtime's hooks and rendering, per task: images, schedulers, logs.
        react: From an arrival to the end of the wait for it; 0 as recorded by one process.
    """

    mark: float = 0.0
    bound: float = 0.0
    acquire: float = 0.0
    contribute: float = 0.0
    publish: float = 0.0
    scan: float = 0.0
    sweep: float = 0.0
    defer: float = 0.0
    structural: float = 0.0
    between: float = 0.0
    react: float = 0.0


@dataclass(eq=False)
class Recording:
    """A recorded run.

    Attributes:
        primitives: Number of primitives at the end.
        row_sizes: Primitives of each row. [rows] int32
        columns: Gradient columns of an active row on the wire.
        views: Number of training views.
        sets: By view.
        tasks: One row per recorded task, columns `TASK_FIELDS`. [T, 11] float64
        steps: One row per step and rank, columns `STEP_FIELDS`. [S, 8] float64
        overheads: See there.
        structural_every: Steps between structural steps, 0 for none seen.
        statistics: Densification statistics travel.
        ranks: Ranks of the recorded run.
        views_per_step: Its lanes.
        rlg: Arrays of the Relative Locality Graph (``indptr``, ``indices``, ``data``, ``unknown``, ``sizes``), or
            empty.
        text: What was recorded, by key: ``source`` of the graph, ``mode``, ``how``, ``scene``.
        means: Mean position of the primitives of each row, or no rows where it is unknown. [rows or 0, 3] float32
        stages: Times of the parts of a view (placement sharded); None where they were not measured.
    """

    primitives: int
    row_sizes: np.ndarray
    columns: int
    views: int
    sets: dict[int, ViewSets]
    tasks: np.ndarray
    steps: np.ndarray
    overheads: Overheads = field(default_factory=Overheads)
    structural_every: int = 0
    statistics: bool = True
    ranks: int = 1
    views_per_step: int = 1
    rlg: dict[str, np.ndarray] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    means: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.float32))
    stages: StageCosts | None = None

    def column(self, name: str) -> np.ndarray:
        """A column of `tasks` by name. [T] float64"""
        return self.tasks[:, TASK_FIELDS.index(name)]

    def step_column(self, name: str) -> np.ndarray:
        """A column of `steps` by name. [S] float64"""
        return self.steps[:, STEP_FIELDS.index(name)]


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording as .npz, complete or not at all.

    Raises:
        ValueError: The file has another suffix.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"cannot write a recording to {path}: its name must end in .npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(pack_recording(recording))
    part.replace(path)


def pack_recording(recording: Recording) -> bytes:
    """The bytes of a recording's file."""
    import io

    views = sorted(recording.sets)
    sets = [recording.sets[v] for v in views]
    settings: dict[str, Any] = {
        "format": FORMAT, "primitives": recording.primitives, "columns": recording.columns, "views": recording.views,
        "structural_every": recording.structural_every, "statistics": recording.statistics, "ranks": recording.ranks,
        "views_per_step": recording.views_per_step, "overheads": vars(recording.overheads), "text": recording.text,
        "stages": None if recording.stages is None else recording.stages.as_dict(),
    }  # fmt: skip
    out = io.BytesIO()
    np.savez_compressed(
        out, settings=np.array(json.dumps(settings)), row_sizes=recording.row_sizes.astype(np.int32),
        tasks=recording.tasks.astype(np.float64), steps=recording.steps.astype(np.float64),
        view=np.array(views, np.int32), visible=np.array([s.visible for s in sets], np.int64),
        candidate_start=_starts([s.candidates for s in sets]), active_start=_starts([s.active for s in sets]),
        candidates=_gaps([s.candidates for s in sets]), active=_gaps([s.active for s in sets]),
        counts=_joined([s.counts for s in sets], np.int32), mass=_joined([s.mass for s in sets], np.float32),
        means=recording.means.astype(np.float32),
        **{f"rlg_{name}": value for name, value in recording.rlg.items()},
    )  # fmt: skip
    return out.getvalue()


def load_recording(source: Path | bytes) -> Recording:
    """Read a recording; a folder stands for the ``recording.npz`` in it.

    Raises:
        ValueError: It is no recording, or one of another format.
    """
    import io

    name: Any = "the data" if isinstance(source, bytes) else Path(source)
    if isinstance(name, Path) and name.is_dir():
        name = name / "recording.npz"
    try:
        with np.load(io.BytesIO(source) if isinstance(source, bytes) else name, allow_pickle=False) as file:
            data = {key: file[key] for key in file.files}
        settings = json.loads(str(data["settings"]))
        found = settings["format"]
    except (OSError, KeyError, ValueError, TypeError, EOFError) as error:
        raise ValueError(
            f"{name} is no recording ({error}); write one with --pipeline.odin.record or 'odin-simulate record'"
        ) from error
    if found != FORMAT:
        raise ValueError(f"{name} has recording format {found}, this version reads {FORMAT}: record again")
    sets = {}
    for k, view in enumerate(data["view"].tolist()):
        a, b = data["candidate_start"][k : k + 2]
        c, d = data["active_start"][k : k + 2]
        sets[view] = ViewSets(
            np.cumsum(data["candidates"][a:b], dtype=np.int32), np.cumsum(data["active"][c:d], dtype=np.int32),
            data["counts"][c:d], data["mass"][c:d], int(data["visible"][k]),
        )  # fmt: skip
    stages = settings.get("stages")
    return Recording(
        primitives=settings["primitives"], row_sizes=data["row_sizes"], columns=settings["columns"],
        views=settings["views"], sets=sets, tasks=data["tasks"], steps=data["steps"],
        overheads=Overheads(**settings["overheads"]), structural_every=settings["structural_every"],
        statistics=settings["statistics"], ranks=settings["ranks"], views_per_step=settings["views_per_step"],
        rlg={key[4:]: value for key, value in data.items() if key.startswith("rlg_")}, text=settings["text"],
        means=data.get("means", np.zeros((0, 3), np.float32)), stages=stages and StageCosts.from_dict(stages),
    )  # fmt: skip


def spatial_blocks(means: np.ndarray, size: int) -> np.ndarray:
    """Block of each primitive: `size` neighbours along a Morton curve of 30 bits. means [N, 3] -> [N] int32"""
    if not len(means):
        return np.zeros(0, np.int32)
    # Ranks, not coordinates: a few far primitives would otherwise leave one cell for all others.
    code = np.zeros(len(means), np.int64)
    for axis in range(3):
        rank = np.empty(len(means), np.int64)
        rank[np.argsort(means[:, axis], kind="stable")] = np.arange(len(means))
        cell = rank * 1024 // len(means)
        for bit in range(10):
            code |= ((cell >> bit) & 1) << (3 * bit + axis)
    block = np.empty(len(means), np.int32)
    block[np.argsort(code, kind="stable")] = np.arange(len(means)) // size
    return block


def in_blocks(sets: ViewSets, block: np.ndarray) -> ViewSets:
    """Sets of primitives as sets of blocks. block: of each primitive. [N] int32"""
    blocks = block[sets.active]
    active, at = np.unique(blocks, return_inverse=True)
    counts = np.bincount(at, weights=sets.counts, minlength=len(active))
    mass = np.bincount(at, weights=sets.mass, minlength=len(active))
    candidates = np.unique(block[sets.candidates])
    return ViewSets(
        candidates.astype(np.int32), active.astype(np.int32), counts.astype(np.int32), mass.astype(np.float32),
        sets.visible,
    )  # fmt: skip


def compress(recording: Recording, means: np.ndarray, block: int | None = None) -> Recording:
    """The recording with rows that are blocks, where exact sets are too large or `block` asks for it.

    Args:
        recording: Its rows are primitives.
        means: Positions of the primitives. [N, 3]
        block: Primitives in a block; 1: exact; None: exact up to `EXACT_IDS` ids, else the smallest of `BLOCKS` that
            brings the number below that, or the largest.
    """
    if block is None:
        ids = sum(len(s.candidates) + len(s.active) for s in recording.sets.values())
        fitting = (b for b in (1, *BLOCKS) if ids <= EXACT_IDS * b)
        block = next(fitting, BLOCKS[-1])
    if block == 1:
        return recording
    of = spatial_blocks(means, block)
    sizes = np.bincount(of)
    middle = np.stack([np.bincount(of, weights=axis) for axis in means.T], 1) / sizes[:, None]
    return Recording(
        **{
            **vars(recording),
            "row_sizes": sizes.astype(np.int32),
            "means": middle.astype(np.float32),
            "sets": {view: in_blocks(sets, of) for view, sets in recording.sets.items()},
        }
    )


def merge(parts: Sequence[Recording]) -> Recording:
    """One recording from those of all ranks of a run, whose states are equal.

    Raises:
        ValueError: They do not belong together.
    """
    first = parts[0]
    if any(len(p.row_sizes) != len(first.row_sizes) or p.views != first.views for p in parts):
        raise ValueError("the ranks' recordings differ in rows or views: they are not of one run")
    sets: dict[int, ViewSets] = {}
    seen: dict[int, float] = {}
    for part in parts:
        last = dict(zip(part.column("view").astype(int).tolist(), part.column("step").tolist()))
        for view, one in part.sets.items():
            if view not in sets or last.get(view, -1.0) > seen[view]:  # in random order ranks share views
                sets[view], seen[view] = one, last.get(view, -1.0)
    mean = {name: float(np.mean([getattr(p.overheads, name) for p in parts])) for name in vars(first.overheads)}
    return Recording(
        **{
            **vars(first),
            "sets": sets,
            "tasks": np.concatenate([p.tasks for p in parts]),
            "steps": np.concatenate([p.steps for p in parts]),
            "overheads": Overheads(**mean),
            "rlg": next((p.rlg for p in parts if p.rlg), {}),
        }
    )


def seconds_between(tasks: np.ndarray, steps: np.ndarray) -> float:
    """Mean time per task outside the runtime's hooks and rendering, from the records of one rank with one task per
    step, without pauses; 0 where these do not tell. tasks [T, 11], steps [S, 8] as in `Recording`. [s]"""
    known = {int(s[0]): float(s[3:7].sum()) for s in steps if s[2] == 1}
    rest = [
        now[10] - before[10] - now[9] - known[int(now[0])]
        for before, now in pairwise(tasks)
        if now[0] == before[0] + 1 and int(now[0]) in known
    ]
    return max(0.0, mean_without_pauses(rest)) if rest else 0.0


def mean_without_pauses(seconds: Sequence[float] | np.ndarray) -> float:
    """Mean of times that are at most ten times the median: others are evaluations, checkpoints, pauses. [s]"""
    values = np.asarray(seconds, np.float64)
    return float(values[values <= 10 * np.median(values)].mean())


def _starts(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)


def _gaps(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Ascending ids as differences, which compress well."""
    return _joined([np.diff(p, prepend=0) for p in parts], np.int32)


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
