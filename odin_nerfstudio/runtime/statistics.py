"""Densification statistics, lane by lane, with the arithmetic of gsplat's ``DefaultStrategy._update_state``.

A rank collects the rows of the views that it renders; every rank applies every lane's, in the order of steps and lanes,
so all of them end with what the stock strategy has after it was fed lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.runtime import rows as row_operations


@dataclass(eq=False)
class DensificationStatistics:
    """Feeds the state of a gsplat ``DefaultStrategy``."""

    state: MutableMapping[str, Any]
    """The strategy's own state (``grad2d``, ``count``, ``radii``), as ``initialize_state`` made it."""
    absgrad: bool = False
    """Use absolute gradients, as the strategy's option of that name."""
    key: str = "means2d"
    """The strategy's ``key_for_gradient``."""
    until: Callable[[int], bool] | None = None
    """Steps whose views count (the stock strategy stops at ``refine_stop_iter``); None: all."""

    def wanted(self, step: int) -> bool:
        """Whether the views of a step count."""
        return self.until is None or self.until(step)

    def collect(self, info: Mapping[str, Any], rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """What one view adds.

        Args:
            info: gsplat's ``meta`` after backward, of one camera: ``radii`` [1, n] or [n], the 2D means with ``grad``
            or
                ``absgrad`` [1, n, 2] or [n, 2], ``width``, ``height``, ``n_cameras``.
            rows: Rows of the shadow that are primitives; the others are padding.

        Returns:
            Visible rows [m] int64, 2D gradient norms in units of the image [m], radii as shares of the image [m].

        Raises:
            RuntimeError: A padding row was visible.
        """
        radii = info["radii"].reshape(-1)
        means = info[self.key]
        gradient = means.absgrad if self.absgrad else means.grad
        if bool((radii[rows:] > 0).any()):
            raise RuntimeError("a padding row was visible; the padding row of a view must lie outside its image")
        visible = (radii[:rows] > 0).nonzero().flatten()
        if gradient is None:
            norms = torch.zeros(visible.shape[0], device=radii.device)
        else:
            picked = gradient.reshape(-1, 2)[visible].clone()
            picked[..., 0] *= info["width"] / 2.0 * info["n_cameras"]
            picked[..., 1] *= info["height"] / 2.0 * info["n_cameras"]
            norms = picked.norm(dim=-1)
        return visible, norms, (radii[visible] / float(max(info["width"], info["height"]))).float()

    def apply(self, total: int, ids: Tensor, norms: Tensor, radii: Tensor) -> None:
        """Add one view. total: number of primitives. ids [m] int32, norms [m], radii [m]."""
        state = self.state
        for key in ("grad2d", "count", "radii"):
            if key in state and state[key] is None:
                state[key] = torch.zeros(total, device=ids.device)
        kept = [state["grad2d"], state["count"], *([state["radii"]] if "radii" in state else [])]
        if row_operations.adds_statistics(*kept, norms, radii):
            largest = kept[2] if len(kept) > 2 else None
            row_operations.add_statistics(kept[0], kept[1], largest, ids, norms, radii)
            return
        index = ids.long()
        state["grad2d"].index_add_(0, index, norms)
        state["count"].index_add_(0, index, torch.ones_like(norms))
        if "radii" in state:
            state["radii"][index] = torch.maximum(state["radii"][index], radii)

    def arrays(self) -> dict[str, Tensor]:
        """The per-row arrays of the state."""
        return {k: v for k, v in self.state.items() if isinstance(v, Tensor)}
