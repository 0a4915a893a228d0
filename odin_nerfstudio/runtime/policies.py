"""The policies by the name of their mode."""

from __future__ import annotations

from collections.abc import Callable

from odin_nerfstudio.runtime.evidence import EvidenceStore
from odin_nerfstudio.runtime.gate import BarrierPolicy, GatePolicy, QualityPolicy
from odin_nerfstudio.runtime.throughput import DelayLimits, ThroughputPolicy

POLICIES: dict[str, Callable[[DelayLimits], GatePolicy]] = {
    "barrier": lambda limits: BarrierPolicy(),
    "quality": lambda limits: QualityPolicy(),
    "throughput": lambda limits: ThroughputPolicy(EvidenceStore(), limits),
}


def make_policy(mode: str, limits: DelayLimits | None = None) -> GatePolicy:
    """The policy of a mode. A policy that keeps evidence starts without any.

    Raises:
        ValueError: There is no such mode.
    """
    if mode not in POLICIES:
        raise ValueError(f"mode: {mode!r} is none of {', '.join(POLICIES)}")
    return POLICIES[mode](limits or DelayLimits())
