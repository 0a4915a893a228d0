"""Faults that are put into an engine to see that tests notice them. The engine's own counts stay right."""

from __future__ import annotations

from typing import cast

import torch

from odin_nerfstudio.runtime.engine import Engine
from odin_nerfstudio.runtime.evidence import Evidence, Shares
from odin_nerfstudio.runtime.messages import Contribution
from odin_nerfstudio.runtime.throughput import ThroughputPolicy

FIRST_VISITS, TWICE, NEVER = "first visits", "twice", "never"
AT = 5
"""Step whose first contribution is applied twice, or never."""


def break_rule(engine: Engine, rule: str) -> None:
    """Breaks one rule from now on."""
    if rule == FIRST_VISITS:
        policy = cast(ThroughputPolicy, engine.policy)
        policy.evidence = Harmless(policy.evidence)
    else:
        _stage_wrongly(engine, rule)


class Harmless:
    """Evidence that takes what is not known for harmless."""

    def __init__(self, known: Evidence) -> None:
        self._known = known

    def of(self, view: int) -> Shares:
        none = Shares.of(torch.empty(0), torch.empty(0))
        return self._known.of(view) or none


def _stage_wrongly(engine: Engine, rule: str) -> None:
    frontier = engine.frontier
    stage = frontier.stage

    def wrongly(message: Contribution) -> None:
        staged = frontier.staging(message.step)
        stage(message)
        if (message.step, message.lane) == (AT, 0) and message.has_rest:
            parts = staged.lanes[0].parts[0]
            ids, values = parts[-1] if rule == TWICE else parts.pop()
            if rule == TWICE:
                parts.append((ids, values))
            frontier.staged_rows += int(ids.shape[0]) * (1 if rule == TWICE else -1)

    frontier.stage = wrongly  # type: ignore[method-assign]
