"""The rank that renders a view: splats of all owners, merged in the order of the model's rows, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.rendering.stages import StageView, ViewSplats
from odin_nerfstudio.runtime.faults import NonFiniteGradient
from odin_nerfstudio.runtime.shadow import Shadow, Task
from odin_nerfstudio.runtime.sharded.packets import GradientPacket, SplatPacket
from odin_nerfstudio.runtime.store import Statistics

_NAMED_ROWS = 8
NO_GRADIENT: Any = SimpleNamespace(grad=None, absgrad=None)
"""Stands for 2D means whose gradient is not there."""


class MergedView:
    """All splats of a view, from every owner."""

    def __init__(self, packets: Mapping[int, SplatPacket], view: StageView, kind: type[ViewSplats]) -> None:
        """packets: of each owner, by rank."""
        self._parts = [(rank, packets[rank].ids.shape[0]) for rank in sorted(packets)]
        ids = torch.cat([packets[rank].ids for rank, _ in self._parts])
        given = [packets[rank].splats for rank, count in self._parts if count]
        splats = torch.cat(given) if given else torch.empty((0, kind.columns), device=ids.device)
        self._place: Tensor | None = None
        if sum(count > 0 for _, count in self._parts) > 1:
            order = torch.argsort(ids)  # ids are unique
            self._place = torch.empty_like(order)
            self._place[order] = torch.arange(order.shape[0], device=order.device)
            ids, splats = ids[order], splats[order]
        self.ids = ids
        """Rows of the whole model, ascending. [V] int32."""
        self.splats = kind(splats, view)
        """What is to be rasterized."""

    def gradients(self, task: Task, norms: Tensor | None) -> dict[int, GradientPacket]:
        """What the backward pass left, by owner. norms: for the statistics, of all splats [V]; None: not wanted.

        Raises:
            NonFiniteGradient: Some gradient is not finite.
        """
        values = self.splats.gradients()
        finite = torch.isfinite(values).all(1)
        if not bool(finite.all()):
            bad = self.ids[~finite].tolist()
            shown = ", ".join(map(str, bad[:_NAMED_ROWS])) + (", ..." if len(bad) > _NAMED_ROWS else "")
            raise NonFiniteGradient(
                f"step {task.step}: view {task.view} gave gradients that are not finite in {len(bad)} primitives (rows"
                f" {shown}). Look at these primitives and at the view's image and camera; a lower learning rate or a"
                " stricter prune often helps"
            )
        if self._place is not None:
            values = values[self._place]
            norms = None if norms is None else norms[self._place]
        active = (values != 0).any(1)
        if norms is not None:
            active |= norms != 0
        out, start = {}, 0
        for rank, count in self._parts:
            part = slice(start, start + count)
            rows = active[part].nonzero().flatten()
            mine = None if norms is None else norms[part][rows]
            out[rank] = GradientPacket(task.step, task.lane, count, rows, values[part][rows], mine)
            start += count
        return out


@dataclass(eq=False)
class ViewTask:
    """A task whose splats are all there."""

    task: Task
    merged: MergedView
    started: float
    """When it could start (monotonic clock, seconds)."""
    view: Shadow | None = None
    """Its view's own parameters, where some are trained."""

    @property
    def splats(self) -> ViewSplats:
        """What the task rasterizes."""
        return self.merged.splats


def norms_of(statistics: Statistics | None, step: int, info: Mapping[str, Any] | None, count: int) -> Tensor | None:
    """2D gradient norms of all splats of a view as the statistics want them [V]; None: not wanted.

    Raises:
        ValueError: They are wanted, and info is missing.
    """
    if statistics is None or not statistics.wanted(step):
        return None
    if info is None:
        raise ValueError("contribute: info of the view is needed for the densification statistics")
    visible, norms, _ = statistics.collect(info, count)
    if visible.shape[0] != count:
        raise RuntimeError(f"{count} splats arrived, but {visible.shape[0]} of them have a radius")
    return norms
