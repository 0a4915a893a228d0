"""Is one run as near to another as that one is to its repetition? For runs on CUDA, where gsplat sums with atomics.

    python scripts/gpu_runs.py BARRIER BARRIER_AGAIN QUALITY

Compares the parameters of the last checkpoints: the root mean square difference of each, in units of its own root mean
square. Exit status 1 if QUALITY differs from BARRIER by more than FACTOR times what BARRIER differs from BARRIER_AGAIN
(and by more than FLOOR), or in its number of primitives; 2 if there is nothing to compare. Runs must end before the
first densification: what is densified hangs on the last digits. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

FACTOR = 3.0
FLOOR = 1e-5


def parameters_of(run: Path) -> dict[str, Tensor]:
    """The primitives' parameters in a run's last checkpoint.

    Raises:
        ValueError: There is none.
    """
    found = sorted(run.rglob("*.ckpt"))
    if not found:
        raise ValueError(f"{run}: no checkpoint (*.ckpt) in it")
    state = torch.load(found[-1], map_location="cpu", weights_only=False)["pipeline"]
    return {name.rsplit(".", 1)[1]: value.double() for name, value in state.items() if "gauss_params" in name}


def distance(a: Tensor, b: Tensor) -> float:
    """Root mean square difference relative to the root mean square of a; infinite for other shapes."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    return float((a - b).pow(2).mean().sqrt() / a.pow(2).mean().sqrt().clamp(min=1e-12))


def main(arguments: list[str] | None = None) -> int:
    """Compare the runs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "again", "other"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args(arguments)
    try:
        run, again, other = (parameters_of(path) for path in (options.run, options.again, options.other))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not run or run.keys() != again.keys() or run.keys() != other.keys():
        print(f"parameters differ: {sorted(run)}, {sorted(again)}, {sorted(other)}", file=sys.stderr)
        return 2
    failed = False
    for name, values in run.items():
        noise, difference = distance(values, again[name]), distance(values, other[name])
        good = difference <= max(FACTOR * noise, FLOOR)
        failed |= not good
        verdict = "ok" if good else "DIFFERS"
        print(f"{name:14s} repetition {noise:.2e}  other run {difference:.2e}  {verdict}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
