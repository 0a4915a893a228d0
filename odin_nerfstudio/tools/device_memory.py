"""How much memory a device of this machine has."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")


def device_memory(ranks: int) -> tuple[float, str, bool]:
    """Memory of a rank's device: of the CUDA device where there is one, else its share of this machine's.

    Args:
        ranks: Ranks that share the machine's memory, where there is no CUDA device.

    Returns:
        Bytes, where the number is from, in words, and whether it is a CUDA device's.
    """
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return float(device.total_memory), device.name, True
    total = machine_memory()
    share = f" / {ranks} ranks" if ranks > 1 else ""
    return total / ranks, f"no CUDA device: this machine's {total / 1e9:.1f} GB{share}", False


def machine_memory() -> float:
    """Memory that this process may use, in bytes: the machine's, or less where its container allows less."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
    return min(total, float(limit)) if limit.isdigit() else total
