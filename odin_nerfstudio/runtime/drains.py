"""Where a rank waits until everything is applied: drains, structural steps, changes of mode."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from odin_nerfstudio.runtime.engine_options import EngineOptions
from odin_nerfstudio.runtime.gate import BARRIER, DRAIN, LINGER, STRUCTURAL, Decision, GatePolicy
from odin_nerfstudio.runtime.keyed import keyed_randomness
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.ranks import Rank
from odin_nerfstudio.runtime.recorder import Recorder
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.telemetry import now


class Drains(Rank):
    """The engine's part between tasks."""

    options: EngineOptions
    policy: GatePolicy
    publisher: Publisher
    recorder: Recorder | None
    is_structural: Callable[[int], bool]
    _open: set[tuple[int, int]]
    """Tasks (step, lane) that were acquired and have not contributed."""
    _done: set[tuple[int, int]]
    """Tasks of the current step that have contributed."""
    _surgery_done: int
    """The last structural step that is done."""

    @property
    def tables(self) -> Sequence[RowTable]:
        return self.store.tables

    def drain(self, reason: str = DRAIN) -> None:
        """Wait until every contribution of the steps so far is applied. Not collective: the others may be ahead.

        Raises:
            RankFailure: A rank failed or stalled.
            RuntimeError: Not every staged row was applied exactly once.
        """
        if self._open or self._done:
            raise ValueError(f"drain: step {self.frontier.current} is not published")
        self._exchange.poll()
        self.frontier.publish_ready(self.frontier.current - 1)
        while self.frontier.low < self.frontier.current:
            self._await(self.frontier.current - 1, Decision(reason, self.frontier.missing()))
            self.frontier.publish_ready(self.frontier.current - 1)
        ahead = self.frontier.waiting_rows()
        staged, applied = self.frontier.staged_rows, self.publisher.applied_rows
        if staged != applied + ahead:
            raise RuntimeError(
                f"drained at step {self.frontier.current} with {staged} rows staged, {applied} applied and {ahead} left"
            )

    def structural(self, step: int, surgery: Callable[[], None], state: MutableMapping[str, Any]) -> None:
        """Drain, then change the primitives in the same way on every rank, without communication.

        Args:
            step: The step just published, for which `is_structural` holds.
            surgery: Changes the first table's parameters, optimizers and `state` as gsplat's strategies do.
            state: The strategy's state; a tensor in it takes part in surgery and comes back as the map of parents.

        Raises:
            ValueError: The step is not structural.
            RuntimeError: In debug mode, the ranks' states differ.
        """
        if step != self.frontier.current - 1 or not self.is_structural(step):
            raise ValueError(f"structural: step {step} is not the step just published, or not structural")
        self.drain(STRUCTURAL)
        if self.options.debug:
            self.check_ranks()
        primitives = self.tables[0]
        begin = now()
        state["odin_parents"] = torch.arange(primitives.count, device=primitives.device)
        try:
            with keyed_randomness(self.options.seed, step, primitives.device):
                surgery()
        finally:
            parents = state.pop("odin_parents")
        before = primitives.versions.shape[0]
        primitives.resize(parents, step + 1)
        if self.frontier.evidence is not None:
            self.frontier.evidence.resize(parents, before)
        if self.recorder is not None:
            self.recorder.resized(parents)
        self.telemetry.structural(step, begin, now())
        self._surgery_done = step
        if self.frontier.traffic is not None:
            self.frontier.reduced = self.frontier.traffic.decide(self.frontier.reduced)
        self._exchange.release()

    def use_policy(self, policy: GatePolicy) -> None:
        """Change the mode between two steps, on all ranks at the same one. For measurements within one run.

        Raises:
            ValueError: Not drained.
        """
        if self.frontier.low != self.frontier.current:
            raise ValueError(f"use_policy: step {self.frontier.low} is not published; drain first")
        self.policy = policy
        self.frontier.use_policy(policy)

    def crosses_structure(self, step: int) -> bool:
        """Whether a structural step that is still to be done lies before a step."""
        return any(self.is_structural(s) for s in range(max(self.frontier.low - 1, self._surgery_done + 1), step))

    def _await(self, step: int, decision: Decision) -> None:
        """Block until a message arrives, and count the wait."""
        begin, awaited = now(), tuple((a.step, a.lane) for a in decision.awaited)
        doing, hazard = self.telemetry.doing, decision.hazard or BARRIER
        self.telemetry.enter("waiting", step, hazard, awaited)
        peer = self._exchange.wait(step, decision)
        self.telemetry.waited(step, hazard, peer, begin, now())
        self.telemetry.doing = doing

    def _linger(self, step: int) -> None:
        """Wait for the rest of the steps before, where that takes less than publishing them in parts."""
        while self.frontier.low < step and self.frontier.patience.waits():
            self._await(step, Decision(LINGER, self.frontier.missing()))
            self.frontier.publish_ready(step)
