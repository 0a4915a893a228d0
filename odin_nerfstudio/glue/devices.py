"""Which device a rank computes on, and how the messages of ranks travel."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from odin_nerfstudio.runtime.channels import NcclChannel
from odin_nerfstudio.runtime.faults import FaultLimits
from odin_nerfstudio.runtime.gloo import GlooTransport
from odin_nerfstudio.runtime.ordered import OrderedTransport
from odin_nerfstudio.runtime.transport import Transport

Backend = Literal["gloo", "nccl"]

LEAST_NCCL_TIMEOUT = 60.0
"""NCCL's own start-up takes seconds. [s]"""


def rank_device(device_type: str, local_rank: int) -> torch.device:
    """The device of a machine's rank; where there are more ranks than CUDA devices, they share them in turn."""
    if device_type != "cuda":
        return torch.device(device_type)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def own_device_each(device_type: str, local_ranks: int) -> bool:
    """Whether each of a machine's ranks has a CUDA device of its own."""
    return device_type == "cuda" and local_ranks <= torch.cuda.device_count()


def check_backend(wanted: Backend | None, device_type: str, local_ranks: int) -> None:
    """Finds out before any rank starts that NCCL cannot do what is asked for.

    Raises:
        SystemExit: with the remedy.
    """
    if wanted != "nccl":
        return
    if device_type != "cuda":
        raise SystemExit(
            f"Error: --pipeline.odin.backend nccl moves tensors between CUDA devices, but --machine.device-type is "
            f"{device_type}; use --pipeline.odin.backend gloo, or leave the option out"
        )
    if not dist.is_nccl_available():
        raise SystemExit(
            "Error: --pipeline.odin.backend nccl, but this build of torch has no NCCL; use --pipeline.odin.backend gloo"
        )
    if not own_device_each(device_type, local_ranks):
        devices = torch.cuda.device_count()
        raise SystemExit(
            f"Error: --pipeline.odin.backend nccl needs a CUDA device for each rank, but {local_ranks} ranks of this "
            f"machine have {devices}; start {devices} (--machine.num-devices, with torchrun --nproc-per-node), or let "
            "ranks share devices with --pipeline.odin.backend gloo"
        )


def connect(
    wanted: Backend | None, device: torch.device, local_ranks: int, limits: FaultLimits
) -> tuple[Transport, str]:
    """Connects this rank to all others; collective.

    Args:
        wanted: what the user asked for. None: NCCL where every rank of every machine has a CUDA device of its own, gloo
            elsewhere.
        local_ranks: ranks on this machine.

    Returns:
        The transport, and how messages travel, in words for the log.
    """
    if device.type != "cuda":
        return GlooTransport(limits), "gloo"
    own = torch.tensor([own_device_each(device.type, local_ranks)], dtype=torch.int32)
    dist.all_reduce(own, op=dist.ReduceOp.MIN)
    if (wanted or ("nccl" if bool(own) else "gloo")) == "nccl":
        timeout = max(limits.stall, LEAST_NCCL_TIMEOUT)
        return OrderedTransport(lambda: NcclChannel(device, timeout), limits), "nccl"
    shared = "" if bool(own) else ", ranks share devices"
    return GlooTransport(limits, device=device), f"gloo, through host memory{shared}"
