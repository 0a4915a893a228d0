"""What the runtime needs of a splat model, whoever wrote it.

:class:`DistributedSplats` is the whole interface. A model that derives from splatfacto's gets all of it from
:class:`odin_nerfstudio.glue.splats.OdinSplats`; docs/own_method.md shows how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from odin_nerfstudio.runtime.candidates import ViewTest
from odin_nerfstudio.runtime.reads import PoseMotion
from odin_nerfstudio.runtime.store import DenseTerm, ReadRule, RowNoise, RowTable, Statistics


@dataclass(frozen=True)
class TrainingContext:
    """What a model's read rule and noise are made from."""

    seed: int
    """Seed of the run."""
    schedule: Callable[[int], Mapping[str, float]]
    """Learning rates of the per-primitive parameters at a step."""
    learning_rate: Callable[[str, int], float]
    """(parameter group, step) -> learning rate."""
    optimizers: Mapping[str, torch.optim.Adam]
    """By parameter group."""
    cameras: Cameras
    """All training views ``[V]``, undistorted, on the CPU."""
    view_test: Callable[[int, int], ViewTest]
    """(step, view) -> the camera of a view at that step's resolution, as gsplat's 3D visibility test."""
    betas: Mapping[str, tuple[float, float]]
    """Adam's betas, by parameter."""
    pose: PoseMotion | None = None
    """How far cameras can move, where their poses are trained."""


class DistributedSplats(Protocol):
    """A splat model that several ranks can train.

    Rendering a view must depend on primitives only through those that the view sees, on the view through its camera and
    its rows of per-view parameters, and on chance only through ``task``; then the result depends neither on the
    number of ranks nor on their timing.
    """

    gauss_params: torch.nn.ParameterDict
    """Per-primitive parameters ``[N, ...]``, float32. During a task they hold the rows that the view can see,
    followed by up to 63 rows behind the camera."""
    strategy: Any
    """Has ``verbose``."""
    strategy_state: MutableMapping[str, Any]
    """State of the strategy. A tensor ``[N]`` that is put in must take part in surgery (new rows take their parent's
    value)."""
    info: dict[str, Any]
    """gsplat's ``meta`` of the last rendered view."""
    task: tuple[int, int, int]
    """(seed, step, lane) of what is rendered: what random numbers may be keyed by."""
    camera_optimizer: Any
    """nerfstudio's, of mode "off" or "SO3xR3"."""

    @property
    def device(self) -> Any: ...

    @property
    def num_points(self) -> int:
        """N."""
        ...

    # rendering and loss

    def __call__(self, camera: Cameras, /) -> dict[str, Any]:
        """Renders a view; ``camera.metadata["cam_idx"]`` is the row of per-view parameters."""
        ...

    def image_loss(self, outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        """Loss of one rendered view. Terms over all primitives are :meth:`dense_terms`."""
        ...

    def regularizers(self) -> dict[str, Tensor]:
        """Values of the dense terms, for the log."""
        ...

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]: ...

    def downscale_at(self, step: int) -> int:
        """The factor by which images are smaller at a step of training."""
        ...

    # what the runtime does with rows

    def active_columns(self, step: int) -> dict[str, int]:
        """Leading columns of a parameter's flattened rows that can have a gradient at a step; others: all."""
        ...

    def dense_terms(self) -> Sequence[DenseTerm]:
        """Loss terms that touch every primitive without needing a view."""
        ...

    def statistics(self) -> Statistics | None:
        """What the strategy wants to know of each view."""
        ...

    def reads(self, context: TrainingContext) -> ReadRule:
        """Which primitives a view can make visible."""
        ...

    def row_noise(self, context: TrainingContext) -> RowNoise | None:
        """Noise that every primitive gets after its update."""
        ...

    def further_tables(self, context: TrainingContext) -> Sequence[RowTable]:
        """Trained parameters beside those of the primitives, camera poses and bilateral grids: per view or shared.

        A table is named after the submodule that holds its parameters: ``tone`` for ``self.tone.weight``.
        """
        ...

    # structural steps, checkpoints

    def follow_plan(self, steps_per_epoch: int) -> None:
        """Told how many steps show every view once, before the first step."""
        ...

    def acts_at(self, step: int) -> bool:
        """Whether :meth:`surgery` changes primitives after a step; equal on all ranks."""
        ...

    def surgery(self, step: int) -> None:
        """The structural step. torch's and numpy's global generators are keyed by (seed, step)."""
        ...

    def resume_state(self) -> dict[str, Any]:
        """What a checkpoint must hold beyond parameters and optimizers."""
        ...

    def load_resume_state(self, state: dict[str, Any]) -> None: ...
