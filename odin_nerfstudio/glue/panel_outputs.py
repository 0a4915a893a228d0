"""Outputs of the viewer beside rgb and depth: primitives coloured by conflicts, lag and the rank that wrote them last.

They are rendered by the model itself, with other colours in the place of its own. They exist in the viewer of a
training only; only what is chosen there is rendered and counted.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from nerfstudio.models.splatfacto import RGB2SH, SH2RGB
from nerfstudio.viewer.render_state_machine import RenderStateMachine
from torch import Tensor

from odin_nerfstudio.glue.panel_text import CONFLICT_COLORS, LAG_COLORS, RANK_COLORS
from odin_nerfstudio.runtime.row_watch import CONFLICTS, LAG, WRITER, RowWatch

if TYPE_CHECKING:
    from nerfstudio.cameras.cameras import Cameras
    from nerfstudio.viewer.viewer import Viewer

    from odin_nerfstudio.glue.splats import OdinSplats

OUTPUTS = {"odin_conflicts": CONFLICTS, "odin_lag": LAG, "odin_writer": WRITER}
"""Names of the outputs and of what they show."""
_DIM = 0.55
"""Brightness of primitives that have nothing to show, so that the scene stays recognizable."""


class RowColors(ABC):
    """Adds the outputs to what the viewer's render threads get from a model."""

    def __init__(self, model: OdinSplats, viewer: Viewer) -> None:
        self._model, self._viewer = model, viewer

    def chosen(self) -> set[str]:
        """The outputs that the viewer shows."""
        panel = self._viewer.control_panel
        return {panel.output_render, *([panel.split_output_render] if panel.split else [])} & OUTPUTS.keys()

    @abstractmethod
    def choose(self, watched: bool) -> None:
        """Has the runtime count what is shown, or nothing. watched: a browser is connected."""

    def add(self, outputs: dict[str, Any], camera: Cameras) -> dict[str, Any]:
        """The outputs of a model and these, ``[H, W, 3]``; only in a render thread of the viewer, which holds the
        training up meanwhile."""
        if not isinstance(threading.current_thread(), RenderStateMachine):
            return outputs
        chosen = self.chosen()
        if chosen:
            self.choose(True)
        height, width = outputs["rgb"].shape[:2]
        blank = torch.zeros(1, device=outputs["rgb"].device).expand(height, width, 3)
        added = {name: self._render(name, camera) if name in chosen else blank for name in OUTPUTS}
        last = {"background": outputs["background"]}  # the viewer offers the last one for its second half
        return {**{k: v for k, v in outputs.items() if k not in last}, **added, **last}

    def _render(self, name: str, camera: Cameras) -> Tensor:
        """Renders a twin of the model that has other colours.

        The viewer may abort a render at any line of Python, so the model itself is left alone.
        """
        twin = copy.copy(self._model)
        twin.__dict__ = {**self._model.__dict__, "_modules": {**self._model._modules}}
        self._recolor(twin, OUTPUTS[name])
        return twin.get_outputs(camera)["rgb"]  # type: ignore[return-value]

    @abstractmethod
    def _recolor(self, twin: OdinSplats, kind: str) -> None:
        """Give a twin the colours that show something."""


class ReplicaColors(RowColors):
    """Where every rank has all primitives."""

    def __init__(self, model: OdinSplats, viewer: Viewer, watch: RowWatch, lookahead: int) -> None:
        super().__init__(model, viewer)
        self._watch, self._lookahead = watch, lookahead

    def choose(self, watched: bool) -> None:
        self._watch.wanted = watched and bool(self.chosen())

    def _recolor(self, twin: OdinSplats, kind: str) -> None:
        params = {name: row.detach() for name, row in twin.gauss_params.items()}
        params = painted(params, kind, self._watch.values(kind), twin.config.sh_degree, self._lookahead)
        twin._modules["gauss_params"] = torch.nn.ParameterDict(
            {key: torch.nn.Parameter(value, requires_grad=False) for key, value in params.items()}
        )


class ShardColors(RowColors):
    """Where primitives are sharded: owners paint their own, and count while they are asked for it."""

    def choose(self, watched: bool) -> None:
        """Nothing: asking an owner for a picture has it count."""

    def _recolor(self, twin: OdinSplats, kind: str) -> None:
        twin.remote = partial(cast(Any, twin).remote, shows=kind)  # type: ignore[attr-defined]


def painted(
    rows: Mapping[str, Tensor], kind: str, values: Tensor | None, sh_degree: int, lookahead: int
) -> dict[str, Tensor]:
    """Parameters of primitives with colours that show something.

    Args:
        rows: By name, [n, ...].
        kind: One of `row_watch.KINDS`.
        values: What `RowWatch` has of it for these rows, [n]; None: nothing is counted, all are gray.
        sh_degree: The model's.
        lookahead: Steps that a row can lag.
    """
    base = rows["features_dc"].detach()
    rgb = SH2RGB(base) if sh_degree > 0 else torch.sigmoid(base)
    gray = rgb.clamp(0, 1).mean(dim=-1, keepdim=True)
    colors = (_DIM * gray).expand(-1, 3)
    if values is not None:
        tint, share = _TINTS[kind](values, lookahead)
        colors = (1 - share) * colors + share * tint * (0.45 + 0.55 * gray)
    if sh_degree == 0:
        return {**rows, "features_dc": torch.logit(colors, eps=1e-6)}
    return {**rows, "features_dc": RGB2SH(colors), "features_rest": torch.zeros_like(rows["features_rest"])}


def _conflict_tint(values: Tensor, _lookahead: int) -> tuple[Tensor, Tensor]:
    return _ramp(CONFLICT_COLORS, values), (3 * values).clamp(0, 1).sqrt()[:, None]


def _lag_tint(values: Tensor, lookahead: int) -> tuple[Tensor, Tensor]:
    part = (values / (lookahead + 1)).clamp(0, 1)
    return _ramp(LAG_COLORS, part), (3 * part).clamp(0, 1).sqrt()[:, None]


def _writer_tint(values: Tensor, _lookahead: int) -> tuple[Tensor, Tensor]:
    palette = torch.tensor([_rgb(color) for color in RANK_COLORS], device=values.device)
    return palette[values.clamp_min(0).long() % len(RANK_COLORS)], 0.9 * (values >= 0).float()[:, None]


_TINTS: dict[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
    CONFLICTS: _conflict_tint,
    LAG: _lag_tint,
    WRITER: _writer_tint,
}


def _ramp(colors: tuple[str, str], values: Tensor) -> Tensor:
    """values: [N], 0 to 1. [N, 3]."""
    low, high = (torch.tensor(_rgb(color), device=values.device) for color in colors)
    return low + values[:, None] * (high - low)


def _rgb(color: str) -> list[float]:
    return [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
