"""Whether all ranks of a job are about to train the same thing; asked before the first step."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from importlib import metadata
from typing import Any, Protocol

from odin_nerfstudio.glue.input_error import InputError

PACKAGES = ("odin-nerfstudio", "nerfstudio", "gsplat", "torch", "numpy", "pymetis")
"""Packages whose versions can explain why two machines plan differently."""

Facts = dict[str, dict[str, str]]


class Exchanges(Protocol):
    """What is needed of an engine."""

    def exchange(self, data: bytes) -> list[bytes]: ...


def facts_of(fingerprint: str, **options: Any) -> Facts:
    """What a rank tells the others. options: dataclasses of options, of which plain values count (paths may differ)."""
    values = {}
    for name, held in options.items():
        for field in fields(held) if is_dataclass(held) else ():
            value = getattr(held, field.name)
            if value is None or isinstance(value, (bool, int, float, str)):
                values[f"{name}.{field.name}"] = repr(value)
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {"plan": {"fingerprint": fingerprint}, "options": values, "versions": versions}


def require_agreement(engine: Exchanges, facts: Facts) -> None:
    """Compares all ranks' plans and options; collective.

    Raises:
        InputError: they differ; names the ranks and what to compare.
    """
    everyone: list[Facts] = [json.loads(part) for part in engine.exchange(json.dumps(facts).encode())]
    unlike = [r for r, theirs in enumerate(everyone) if any(theirs[k] != everyone[0][k] for k in ("plan", "options"))]
    if not unlike:
        return
    who = f"rank {unlike[0]}" if len(unlike) == 1 else f"ranks {', '.join(map(str, unlike))}"
    differing = [text for kind in ("options", "versions") for text in _differences(everyone, unlike[0], kind)]
    if differing:
        compare = f"rank {unlike[0]} and rank 0 differ in {'; '.join(differing[:6])}"
    else:
        compare = (
            "options and versions are the same, so compare the contents of the data folders (images, COLMAP model, "
            "transforms.json)"
        )
    raise InputError(
        f"{who} would train other views than rank 0: {compare}. Give every machine the same data, options and versions"
    )


def _differences(everyone: list[Facts], rank: int, kind: str) -> list[str]:
    theirs, ours = everyone[rank][kind], everyone[0][kind]
    keys = sorted(k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k))
    return [f"{key} ({theirs.get(key)}, {ours.get(key)})" for key in keys]
