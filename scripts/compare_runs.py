"""Where do two runs part? Prints the first step, field and row at which their checkpoints differ.

    python scripts/compare_runs.py RUN_A RUN_B

A run is a checkpoint file, or a folder that holds checkpoints (``*.ckpt``, at any depth); of two folders the steps that
both have are compared, in order. Exit status: 0 if all of them are equal to the bit, 1 if not, 2 if nothing could be
compared.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UNIMPORTANT = ("generators", "schedulers", "scalers")
"""Parts that do not shape the model; compared with --all only."""


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Checkpoints of a run by step; a single file counts as step -1.

    Raises:
        ValueError: There is none.
    """
    if run.is_file():
        return {-1: run}
    found = {}
    for path in sorted(run.rglob("*.ckpt")):
        number = re.search(r"(\d+)", path.stem)
        if number:
            found[int(number[1])] = path
    if not found:
        raise ValueError(f"{run}: no checkpoint file and no folder with *.ckpt files")
    return found


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All tensors and plain values in nested dicts and lists, with their dotted names."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from leaves(item, f"{name}[{key}]")
    else:
        yield name, value


def difference(a: Any, b: Any) -> str | None:
    """How two leaves differ, in words; None if they are equal to the bit (NaN equals NaN of the same bits)."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if a == b or repr(a) == repr(b) else f"{a!r} against {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
    first, second = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    rows = first.shape[0] if first.dim() else 1
    if first.numel() == 0:
        return None
    bits = [x.reshape(rows, -1).view(torch.uint8) for x in (first, second)]
    unequal = (bits[0] != bits[1]).any(1).nonzero().flatten()
    if not unequal.numel():
        return None
    row = int(unequal[0])
    one, other = first.reshape(rows, -1)[row], second.reshape(rows, -1)[row]
    column = int((one != other).nonzero()[0]) if bool((one != other).any()) else 0
    gap = (first.double() - second.double()).abs().max()
    return (
        f"{unequal.numel()} of {rows} rows differ, by at most {float(gap):.3g}; first row {row}, column {column}:"
        f" {one[column].item()!r} against {other[column].item()!r}"
    )


def compare(a: Path, b: Path, everything: bool) -> list[str]:
    """The differences of two checkpoints, one line each; those of sizes and values in the order of the file."""
    first = dict(leaves(torch.load(a, map_location="cpu", weights_only=False)))
    second = dict(leaves(torch.load(b, map_location="cpu", weights_only=False)))
    lines = []
    for name in [*first, *(n for n in second if n not in first)]:
        if not everything and any(part in UNIMPORTANT for part in re.split(r"[.\[]", name)):
            continue
        if name not in first or name not in second:
            lines.append(f"{name}: only in {b if name in second else a}")
            continue
        found = difference(first[name], second[name])
        if found is not None:
            lines.append(f"{name}: {found}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Compare two runs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_a", type=Path)
    parser.add_argument("run_b", type=Path)
    parser.add_argument("--all", action="store_true", help="also compare random generators, schedulers and scalers")
    parser.add_argument("--fields", type=int, default=10, help="print at most this many fields of the first such step")
    options = parser.parse_args(arguments)
    try:
        first, second = checkpoints_of(options.run_a), checkpoints_of(options.run_b)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    single = -1 in first or -1 in second
    pairs = [(max(first), max(second))] if single else [(s, s) for s in sorted(first.keys() & second.keys())]
    if not pairs:
        print(f"no step in common: {sorted(first)} and {sorted(second)}", file=sys.stderr)
        return 2
    for one, other in pairs:
        lines = compare(first[one], second[other], options.all)
        if lines:
            print(f"{first[one]} and {second[other]} are the first checkpoints that differ, in {len(lines)} fields:")
            for line in lines[: options.fields]:
                print(f"  {line}")
            return 1
    print(
        f"equal to the bit: {len(pairs)} checkpoints, the last at step {pairs[-1][0]}"
        if not single
        else "equal to the bit"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
