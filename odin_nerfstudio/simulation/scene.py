"""What is simulated: sets and times of each view, and stand-ins for the tables, rows with versions and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from odin_nerfstudio.planning.rlg import Rlg
from odin_nerfstudio.runtime.recording import Overheads, Recording, ViewSets
from odin_nerfstudio.runtime.store import RowTable

RECENT_EPOCHS = 3
"""Compute times are taken from the last so many visits of each view: early ones had fewer primitives."""
PRIMITIVES = "primitives"


@dataclass(eq=False)
class Scene:
    """Input of a simulation.

    Attributes:
        sets: By view.
        row_sizes: Primitives of each row of the stand-in table. [rows] int32
        seconds: Compute time of each view, 0 where there is none. (V,) float64
        residuals: Factors by which times of single tasks differed from their view's; drawn from. [n] float64
        columns: Gradient columns of an active primitive on the wire.
        statistics: Densification statistics travel.
        overheads: Seconds beside rendering.
        structural_every: Steps between structural steps, 0 for none.
        rlg: Graph to plan on.
        assumptions: What the sets and times rest on, one phrase each.
    """

    sets: Mapping[int, ViewSets]
    row_sizes: np.ndarray
    seconds: np.ndarray
    residuals: np.ndarray
    columns: int
    statistics: bool
    overheads: Overheads
    structural_every: int
    rlg: Rlg
    assumptions: tuple[str, ...] = field(default=())

    @property
    def views(self) -> int:
        """Number of views V."""
        return self.rlg.views

    @property
    def rows(self) -> int:
        """Rows of the stand-in table."""
        return len(self.row_sizes)

    def faster(self, speed: float, overhead_speed: float | None = None) -> Scene:
        """The same on devices that render `speed` times as fast; bytes stay.

        Args:
            speed: Of rendering and backward pass.
            overhead_speed: Of everything beside them: publication, candidate sets, shadows. None: the same.

        Raises:
            ValueError: A factor is not positive.
        """
        others = speed if overhead_speed is None else overhead_speed
        if not (speed > 0 and others > 0):
            raise ValueError(f"speed and overhead-speed must be positive, got {speed} and {others}")
        if speed == others == 1:
            return self
        overheads = Overheads(**{name: value / others for name, value in vars(self.overheads).items()})
        said = (
            *self.assumptions,
            f"devices render {speed:g} times as fast as recorded, do everything else {others:g} times as fast, and "
            "messages are as large",
        )
        return replace(self, seconds=self.seconds / speed, overheads=overheads, assumptions=said)


def scene_of(recording: Recording) -> Scene:
    """A scene from a recording.

    Raises:
        ValueError: Views were not recorded, or the recording has no graph.
    """
    missing = sorted(set(range(recording.views)) - recording.sets.keys())
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise ValueError(
            f"{len(missing)} of {recording.views} views were not recorded ({shown}): train for at least an epoch with "
            "--pipeline.odin.record, or record every view of a checkpoint with 'odin-simulate record'"
        )
    if "indptr" not in recording.rlg:
        raise ValueError("the recording has no co-visibility graph: record again")
    graph = recording.rlg
    views = recording.views
    weights = sparse.csr_matrix((graph["data"], graph["indices"], graph["indptr"]), shape=(views, views))
    rlg = Rlg(weights, graph["unknown"].astype(bool), graph["sizes"], recording.text.get("source", "recording"))
    seconds, residuals = _times(recording)
    exact = len(recording.row_sizes) == recording.primitives
    kind = "exact" if exact else f"in blocks of {int(recording.row_sizes.max())} primitives"
    assumptions = (
        f"sets of {recording.primitives:,} primitives, {kind}, from one {recording.text.get('how', 'recording')}: "
        "they stay what they are",
        f"compute times are those of {len(recording.tasks):,} recorded tasks",
    )
    return Scene(
        recording.sets, recording.row_sizes, seconds, residuals, recording.columns, recording.statistics,
        recording.overheads, recording.structural_every, rlg, assumptions,
    )  # fmt: skip


def _times(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    """Median compute time of each view over its last visits, and the ratios of single times to it."""
    view, compute = recording.column("view").astype(int), recording.column("compute")
    order = np.argsort(recording.column("step"), kind="stable")
    view, compute = view[order], compute[order]
    seconds, ratios = np.zeros(recording.views), [np.ones(0)]
    for v in range(recording.views):
        times = compute[view == v][-RECENT_EPOCHS:]
        if len(times):
            seconds[v] = np.median(times)
            if len(times) > 1 and seconds[v] > 0:
                ratios.append(times / seconds[v])
    residuals = np.concatenate(ratios)
    return seconds, residuals if len(residuals) else np.ones(1)


class Meter:
    """Virtual seconds that a rank has spent since they were last taken."""

    def __init__(self) -> None:
        self.total = 0.0
        self._taken = 0.0

    def spend(self, seconds: float) -> None:
        """Spend some."""
        self.total += seconds

    @property
    def spent(self) -> float:
        """What has been spent since it was last taken."""
        return self.total - self._taken

    def take(self) -> float:
        """What has been spent since the last call."""
        new, self._taken = self.total - self._taken, self.total
        return new


class RecordedReads:
    """Read rule that answers with the recorded candidate sets, and spends the time of computing one."""

    def __init__(self, scene: Scene, meter: Meter) -> None:
        self._sets, self._meter, self._costs = scene.sets, meter, scene.overheads
        self._step = -1

    def mark(self, step: int, view: int, versions: Tensor, least_lag: int, out: Tensor) -> int:
        candidates = self._sets[view].candidates
        out.zero_()
        out.numpy()[candidates] = 1
        self._meter.spend(self._costs.mark + (self._costs.bound if step != self._step else 0.0))
        self._step = step
        return len(candidates)


def stand_in(scene: Scene, meter: Meter) -> RowTable:
    """A table whose rows have versions and no columns."""
    rows = torch.nn.Parameter(torch.empty(scene.rows, 0))
    adam = torch.optim.Adam([rows])
    return RowTable(PRIMITIVES, {"row": rows}, {"row": adam}, RecordedReads(scene, meter), lambda _: {"row": 0.0})
