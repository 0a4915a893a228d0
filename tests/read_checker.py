"""Watches one rank of a toy training and proves E5 on it, from what arrives and what is read.

It keeps its own account of gradient mass, of every contribution row by row, and of the bits of the rows that were read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime.engine import Engine
from odin_nerfstudio.runtime.gate import Decision
from odin_nerfstudio.runtime.messages import Contribution
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.runtime.staging import Phase, StepStaging
from odin_nerfstudio.runtime.throughput import DelayLimits

ROUNDING = 1.01
"""Shares are kept with 8 bits."""
SAMPLE = 20
"""Of every so many rows read, the bits of one are kept."""


class ReadChecker:
    """Attached to an engine before its first step."""

    def __init__(self, engine: Engine, limits: DelayLimits) -> None:
        self.engine, self.limits = engine, limits
        self.mass: dict[int, np.ndarray] = {}
        """By view: its share of the gradient on each primitive at its last visit. [N] float64."""
        self.received: dict[int, list[np.ndarray]] = {}
        self.applied: dict[int, list[np.ndarray]] = {}
        """By step and table: per row, how many contributions, and the sum of their bits as integers. [N, 2] int64."""
        self.bits: dict[str, int] = {}
        self.late_reads = self.late_rows = self.structural_steps = self.worst_delay = 0
        self.surgeries = 0
        if engine.frontier.evidence is not None:
            engine.frontier.evidence.tail = 0.0
        engine.on_read = self.on_read
        self._wrap()

    # -- what is received and applied

    def _wrap(self) -> None:
        frontier, publisher, table = self.engine.frontier, self.engine.publisher, self.engine.tables[0]
        stage, whole, some, resize = frontier.stage, publisher.whole, publisher.some, table.resize
        structural = self.engine.structural

        def staged_(message: Contribution) -> None:
            rest = frontier.staging(message.step).lanes[message.lane].rest
            for k, section in enumerate(message.tables):
                if message.has_first:
                    self._note(self.received, message.step, k, section.ids[: section.first], section.first_rows)
                if message.has_rest:
                    ids = section.ids[section.first :] if message.has_first else rest[k]
                    self._note(self.received, message.step, k, ids, section.rest_rows)
            stage(message)
            if message.has_rest:
                self._learn(message)

        def whole_(staged: StepStaging) -> None:
            for k in range(len(self.engine.tables)):
                for ids, values in staged.parts(k):
                    self._note(self.applied, staged.step, k, ids, values)
            whole(staged)

        def some_(staged: StepStaging, ahead: int) -> int:
            before = [t.versions.clone() for t in self.engine.tables]
            count = some(staged, ahead)
            for k, table in enumerate(self.engine.tables):
                raised = table.versions != before[k]
                assert bool((before[k][raised] == staged.step).all()) and int(table.versions.max()) <= frontier.current
                for ids, values in staged.parts(k):
                    inside = raised[ids.long()]
                    self._note(self.applied, staged.step, k, ids[inside], values[inside])
            return count

        def resize_(parents: Tensor, version: int) -> None:
            resize(parents, version)
            old = parents.numpy()
            for view, mass in self.mass.items():
                self.mass[view] = (mass / np.maximum(np.bincount(old, minlength=len(mass)), 1))[old]
            self.surgeries += 1

        def structural_(step: int, surgery: Any, state: Any) -> None:
            def seen() -> None:
                assert all(bool((t.versions == step + 1).all()) for t in self.engine.tables), "not everything is seen"
                self.settle(step)
                self.structural_steps += 1
                surgery()

            structural(step, seen, state)

        frontier.stage, publisher.whole, publisher.some = staged_, whole_, some_  # type: ignore[method-assign]
        table.resize, self.engine.structural = resize_, structural_  # type: ignore[method-assign]

    def _note(self, book: dict[int, list[np.ndarray]], step: int, k: int, ids: Tensor, values: Tensor) -> None:
        counts = [np.zeros((t.count, 2), np.int64) for t in self.engine.tables] if step not in book else book[step]
        book[step] = counts
        sums = values.contiguous().view(torch.int32).numpy().astype(np.int64)
        sums = (sums * (1 + np.arange(sums.shape[1]))).sum(1)
        np.add.at(counts[k], ids.numpy(), np.stack([np.ones_like(sums), sums], 1))

    def settle(self, step: int) -> None:
        """At a drain: every contribution up to a step has been applied exactly once, row by row."""
        for s in [s for s in self.received if s <= step]:
            for received, applied in zip(self.received.pop(s), self.applied.pop(s), strict=True):
                assert np.array_equal(received, applied), f"step {s}"
        assert not [s for s in self.applied if s <= step]

    def _learn(self, message: Contribution) -> None:
        staged = self.engine.frontier.staging(message.step)
        table = self.engine.tables[0]
        mass = np.zeros(table.count)
        for ids, values in staged.lanes[message.lane].parts[0]:
            for name, offset, width in table.layout(message.step).columns():
                if name in ("opacities", "features_dc"):
                    mass[ids.numpy()] += np.abs(values[:, offset : offset + width].numpy().astype(np.float64)).sum(1)
        self.mass[staged.views[message.lane]] = mass / max(mass.sum(), 1e-300)

    # -- what is read

    def on_read(self, task: Task, ids: Sequence[Tensor], decision: Decision) -> None:
        tables = self.engine.tables
        lags = [task.step - t.versions[i.long()].numpy() for t, i in zip(tables, ids)]
        assert all(not lag.any() for lag in lags[1:]), "a per-view row was read late"
        lag, rows = lags[0], ids[0].numpy()
        assert not len(lag) or (lag.min() >= 0 and lag.max() <= self.limits.max_delay), f"lag {lag.max()}"
        late = rows[lag > 0]
        if len(late):
            assert decision.delayed is not None
            assert (decision.delayed.rows, decision.delayed.delay) == (len(late), lag.max())
            least = self._least(task.view, late, task.step)
            assert least.sum() < self.limits.max_overlap * ROUNDING and least.max() <= self.limits.max_impact * ROUNDING
            assert abs(least.sum() - decision.delayed.mass) < 0.01 * least.sum() + 1e-6
            self.late_reads += 1
            self.late_rows += len(late)
            self.worst_delay = max(self.worst_delay, int(lag.max()))
        else:
            assert decision.delayed is None
        self._keep_bits(rows, lag, task.step)

    def _least(self, view: int, late: np.ndarray, step: int) -> np.ndarray:
        """Per late row the smaller of the reader's and the pending writers' shares; 1 for who is not known."""
        frontier, writers = self.engine.frontier, np.zeros(len(late))
        versions = self.engine.tables[0].versions.numpy()[late]
        for s in range(frontier.low, step):
            staged = frontier.staging(s)
            for lane, writer in zip(staged.lanes, staged.views):
                pending = np.zeros(self.engine.tables[0].count, bool)
                if lane.phase == Phase.WAITING:
                    assert lane.candidates is not None
                    pending |= lane.candidates[0].numpy() != 0
                elif lane.phase == Phase.IDS:
                    pending[lane.rest[0].numpy()] = True
                share = self.mass[writer][late] if writer in self.mass else 1.0
                writers += np.where(pending[late] & (versions <= s), share, 0.0)
        return np.minimum(self.mass[view][late] if view in self.mass else 1.0, writers)

    def _keep_bits(self, rows: np.ndarray, lag: np.ndarray, step: int) -> None:
        parameters = self.engine.tables[0].parameters
        chosen = rows % SAMPLE == 0
        for i, late in zip(rows[chosen], lag[chosen]):
            content = b"".join(p.detach()[int(i)].numpy().tobytes() for p in parameters.values())
            key = f"{self.surgeries}:{i}:{step - late}"
            value = hash_of(content)
            assert self.bits.setdefault(key, value) == value, "a row of one version was read with two contents"

    def write(self, path: Path) -> None:
        """After the last drain."""
        self.settle(self.engine.current - 1)
        facts = {
            "late_reads": self.late_reads,
            "late_rows": self.late_rows,
            "worst_delay": self.worst_delay,
            "structural_steps": self.structural_steps,
            "bits": self.bits,
        }
        path.write_text(json.dumps(facts))


def hash_of(content: bytes) -> int:
    """The same in every process."""
    words = np.frombuffer(content, np.uint32).astype(np.uint64)
    return int(words @ (1 + 2 * np.arange(len(words), dtype=np.uint64)))
