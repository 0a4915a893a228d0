"""The MCMC strategy on a shard: all ranks together relocate and add what one does of the whole model, to the bit.

Rank 0 gathers the opacities of all primitives in host memory, 4 bytes each, draws as it would for the whole model, and
tells who gets copies; the others see no more than these rows. For a moment that takes rank 0 about 25 bytes for each
primitive of the model (a shard's state takes 720 for each of its own). What sources and copies have in common is
computed by every rank over all sources, its own in their places and dummies elsewhere, since torch's kernels may round
the last elements of a tensor otherwise than the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch
from gsplat.strategy import MCMCStrategy
from torch import Tensor

from odin_nerfstudio.glue.mcmc import Draw, OdinMcmcStrategy, growth, relocations
from odin_nerfstudio.runtime.sharded.copies import ShardRows
from odin_nerfstudio.runtime.sharded.engine import ShardedEngine
from odin_nerfstudio.runtime.sharded.requests import Requests


class ShardMcmcStrategy(OdinMcmcStrategy):
    """Relocation and growth of this rank's rows. Give it the settings of the whole model's, an engine and requests."""

    engine: ShardedEngine
    requests: Requests

    @classmethod
    def like(cls, strategy: MCMCStrategy) -> ShardMcmcStrategy:
        """One with the settings of another."""
        return cls(**{f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)})

    def _refine(
        self,
        params: torch.nn.ParameterDict,
        optimizers: dict[str, torch.optim.Optimizer],
        state: MutableMapping[str, Any],
    ) -> tuple[int, int]:
        """Collective; what is drawn is drawn on rank 0."""
        rows = ShardRows(self.engine, state)
        gathered = self.requests.gather({"opacities": params["opacities"]}, lambda _, s, t: torch.empty(s, dtype=t))
        logits = None if gathered is None else gathered["opacities"]
        moved = self._told(rows, None if logits is None else relocations(logits, self.min_opacity))
        if moved is not None:
            targets, draw = moved
            shared = self._settle(rows, draw)
            rows.relocate(targets, draw.sources)
            if logits is not None:
                logits[draw.rows.cpu()] = shared.cpu()
                logits[targets.cpu()] = logits[draw.sources.cpu()]
        drawn = None if logits is None else growth(logits, self.cap_max)
        added = self._told(rows, None if drawn is None else (drawn.sources[:0], drawn))
        if added is not None:
            self._settle(rows, added[1])
            rows.append(added[1].sources)
        return len(moved[0]) if moved else 0, len(added[1].sources) if added else 0

    def _told(self, rows: ShardRows, drawn: tuple[Tensor, Draw] | None) -> tuple[Tensor, Draw] | None:
        """What rank 0 has drawn, on every rank's device."""
        data = b""
        if drawn is not None:
            targets, draw = drawn
            words = [torch.tensor([len(targets), len(draw.sources)]), targets, draw.sources]
            data = torch.cat([torch.cat(words).int(), draw.opacities.view(torch.int32)]).numpy().tobytes()
        words = torch.from_numpy(np.frombuffer(bytearray(self.engine.exchange_of_shards.broadcast(data)), np.int32))
        if not len(words):
            return None
        dead, copies = words[:2].tolist()
        words = words[2:].to(rows.table.device)
        targets, sources = words[:dead].long(), words[dead : dead + copies].long()
        return targets, Draw.of(sources, words[dead + copies :].view(torch.float32), whole=False)

    def _settle(self, rows: ShardRows, draw: Draw) -> Tensor:
        """Give this rank's sources what they share with their copies; returns the logits of all. [u, 1]."""
        parameters = rows.table.parameters
        places, held = rows.mine(draw.rows)
        log_scales = torch.zeros((len(draw.rows), 3), device=held.device)
        log_scales[places] = parameters["scales"].detach()[held]
        logits, log_scales = draw.shared(log_scales, self.min_opacity)
        parameters["opacities"].data[held] = logits[places, None]
        parameters["scales"].data[held] = log_scales[places]
        return logits[:, None]
