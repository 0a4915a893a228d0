"""The options under ``--pipeline.odin``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Suppress

from odin_nerfstudio.runtime.engine_options import EngineOptions
from odin_nerfstudio.runtime.gate import GatePolicy
from odin_nerfstudio.runtime.policies import make_policy
from odin_nerfstudio.runtime.throughput import DelayLimits

if TYPE_CHECKING:
    from odin_nerfstudio.planning.schedule import Order


@dataclass
class OdinOptions:
    """How Odin orders views and synchronizes devices."""

    mode: Literal["barrier", "quality", "throughput"] = "quality"
    """When a view may be rendered. "barrier": when every update of the step before is in, as in ordinary
    synchronized training. "quality": when the updates of the primitives that the view can see are in; the result is
    the same, bit for bit. "throughput": also while some of these updates are still on their way, where the view's
    last visit showed that little depends on them; faster, the quality is about the same, and two runs are not the
    same bit for bit (see max_overlap, max_impact, max_delay)."""
    views_per_step: int | None = None
    """Views that contribute to one optimizer step. Default: one per device; a resumed run keeps its number. The result
    depends on this number, not on the number of devices."""
    order: Literal["rlg", "local", "random"] | None = None
    """Order of the views. "rlg": by the Relative Locality Graph, so that views rendered at the same time on
    different devices share little; "local": so, too, but every device keeps to its own part of the scene, which is
    where its primitives are with placement sharded, so that fewer splats travel; "random": shuffled, the baseline. One
    view per step is shuffled in any case. Default: local with placement sharded, else rlg. The result depends on the
    order, and not on the placement."""
    turn_lanes: bool = False
    """Hand every lane of views to the next device once an epoch. Otherwise each device keeps its views, and one whose
    views take longer makes the others wait sooner or later. The views of a step stay what they are; every device then
    reads and keeps every image."""
    lookahead: int = 2
    """How many steps a device may be ahead of the oldest step that is not complete. More hides more, and takes more
    memory for contributions that wait."""
    linger: bool = True
    """Modes quality and throughput: wait like mode barrier where that turns out to be faster, which is tried for some
    steps now and then. Otherwise never."""
    max_delay: int = 2
    """How many steps late a primitive may be read in mode throughput, at most lookahead; 0: never late. In every mode
    the plan keeps conflicts low between a view and those of other devices in the last max_delay + 1 steps."""
    max_overlap: float = 0.5
    """Mode throughput: how much of a view's gradient may lie on primitives whose updates are still on their way, and
    matter to the views that send them, too (0: none, 1: all). Smaller waits more and is closer to mode quality."""
    max_impact: float = 0.02
    """Mode throughput: the largest part of a view's gradient, in the same sense, on a single primitive read late."""
    backend: Literal["gloo", "nccl"] | None = None
    """How messages travel between devices. "nccl": from CUDA device to CUDA device, for which every rank needs a device
    of its own. "gloo": through host memory, on the CPU, where ranks share a CUDA device, and with placement sharded.
    Default: nccl where it can be used, else gloo."""
    placement: Literal["replicated", "sharded"] = "replicated"
    """Where primitives live. "replicated": every device holds all of them and applies every update. "sharded": every
    primitive has one owner, which projects it for all views, so that memory per device falls with their number; for
    models that one device cannot hold."""
    scale_schedule: bool = True
    """With several views per step, divide all intervals that count steps (training length, warm-up, refinement, resets,
    resolution, spherical harmonics) by that number, multiply learning rates by its square root and raise Adam's betas
    to its power, so that as many views are rendered as with one device and the quality stays."""
    seed: int | None = None
    """Seed of view order, backgrounds and densification. Default: the run's --machine.seed."""
    stall: float = 120.0
    """A device that is silent or awaited for this many seconds counts as failed, and the job ends, naming it."""
    trace: Path | None = None
    """Write a Chrome/Perfetto trace of the whole run here, with one row per device (open it at ui.perfetto.dev)."""
    record: Path | None = None
    """Write what every view reads, writes and takes to recording.npz in this folder, for odin-simulate."""
    scaled_for: Suppress[int] = 1
    """Views per step that the intervals and learning rates of this config are made for; set by scale_schedule."""
    debug: bool = False
    """Check every read, write and publication for hazards, and compare all devices' states at structural steps."""

    @property
    def planned_order(self) -> Order:
        """The order that is meant."""
        return self.order or ("local" if self.placement == "sharded" else "rlg")

    def policy(self) -> GatePolicy:
        """The policy of the mode."""
        return make_policy(self.mode, DelayLimits(self.max_delay, self.max_overlap, self.max_impact))

    def engine_options(self, seed: int) -> EngineOptions:
        """What an engine is told, whatever the placement."""
        return EngineOptions(
            lookahead=self.lookahead,
            linger=self.linger,
            seed=seed,
            stall=self.stall,
            debug=self.debug,
            trace=self.trace is not None,
        )
