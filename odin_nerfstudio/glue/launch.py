"""Starting the ranks: nerfstudio's own launcher and torchrun, one machine or several, CPU or CUDA."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from nerfstudio.utils import comms
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from odin_nerfstudio.glue.devices import rank_device
from odin_nerfstudio.glue.meeting import store_of_attempt
from odin_nerfstudio.runtime.faults import EXIT_CODE, brief

GROUP_TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for the others while the job is being set up."""

_PR_SET_PDEATHSIG = 1
_TEXT_BYTES = 1024


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job."""

    rank: int
    local_rank: int
    ranks: int
    local_ranks: int

    @staticmethod
    def of_torchrun() -> Place | None:
        """The place that torchrun gave to this process, or None outside of torchrun."""
        if "TORCHELASTIC_RUN_ID" not in os.environ and "LOCAL_RANK" not in os.environ:
            return None
        try:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            return Place(*(int(os.environ[name]) for name in names))
        except KeyError as error:
            raise SystemExit(f"Error: {error} is not set; start several ranks with torchrun") from error


def default_device_type() -> Literal["cpu", "cuda"]:
    """cuda where there is a usable device, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def threads_per_rank(local_ranks: int) -> int:
    """CPU threads for each of a machine's ranks, so that together they do not exceed its cores."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def divide_threads(local_ranks: int) -> None:
    """Limits this process (and those it spawns) to its share of the cores; an OMP_NUM_THREADS of the user wins.

    OpenMP's idle threads must sleep instead of spin: they would take the cores from the other ranks.
    """
    if not _threads_chosen():
        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(local_ranks))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _threads_chosen() -> bool:
    """Whether the user has set OMP_NUM_THREADS. torchrun sets it to 1 by itself, after it has started."""
    if "OMP_NUM_THREADS" not in os.environ or Place.of_torchrun() is None:
        return "OMP_NUM_THREADS" in os.environ
    try:
        of_torchrun = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True  # no telling; then it counts
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in of_torchrun.split(b"\0"))


def end_with_parent() -> None:
    """Has Linux ask this process to stop when its launcher is gone; torchrun's ranks would train on without it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def join_group(place: Place, device_type: str, init_method: str | None = None) -> None:
    """Joins the job's process group (gloo, also where ranks compute on CUDA: `devices.connect` adds what they need).

    init_method: the address at which ranks meet; None: that of torchrun.

    Raises:
        RuntimeError: the others did not come within :data:`GROUP_TIMEOUT`, or the address is wrong.
        SystemExit: the machines run different numbers of ranks.
    """
    if device_type == "cuda":
        torch.cuda.set_device(rank_device(device_type, place.local_rank))
    try:
        store = None
        if init_method is None:
            shared, _, _ = next(rendezvous("env://", timeout=GROUP_TIMEOUT))
            store = store_of_attempt(shared, place.rank, place.ranks, GROUP_TIMEOUT)
        dist.init_process_group(
            backend="gloo",
            init_method=init_method,
            store=store,
            world_size=place.ranks,
            rank=place.rank,
            timeout=GROUP_TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"rank {place.rank} of {place.ranks} could not join the job at "
            f"{init_method or 'the address that torchrun gave'}: {brief(error)}"
        ) from error
    counts = torch.zeros(place.ranks, dtype=torch.int64)
    counts[place.rank] = place.local_ranks
    dist.all_reduce(counts)
    if int(counts.min()) != int(counts.max()):
        raise SystemExit(
            f"Error: machines run {int(counts.min())} to {int(counts.max())} ranks; start the same number on each"
        )
    machines = place.ranks // place.local_ranks
    for machine in range(machines):
        members = list(range(machine * place.local_ranks, (machine + 1) * place.local_ranks))
        group = dist.new_group(members, timeout=GROUP_TIMEOUT)
        if place.rank in members:
            comms.LOCAL_PROCESS_GROUP = group


def distributed_worker(
    local_rank: int,
    main_func: Callable,
    world_size: int,
    num_devices_per_machine: int,
    machine_rank: int,
    dist_url: str,
    config: Any,
    timeout: timedelta,
    device_type: str = "cuda",
) -> None:
    """Runs one rank; takes the place of nerfstudio's worker of the same signature, which insists on CUDA."""
    place = Place(machine_rank * num_devices_per_machine + local_rank, local_rank, world_size, num_devices_per_machine)
    divide_threads(num_devices_per_machine)
    join_group(place, device_type, dist_url)
    run_rank(place, main_func, config)


def run_rank(place: Place, main_func: Callable, config: Any) -> None:
    """Trains as one rank of a group that has been joined, and leaves the group."""
    config.timestamp = broadcast_text(config.timestamp)
    try:
        main_func(local_rank=place.local_rank, world_size=place.ranks, config=config, global_rank=place.rank)
    except BaseException as error:
        _end_failed_rank(error)
    dist.destroy_process_group()
    comms.LOCAL_PROCESS_GROUP = None


def _end_failed_rank(error: BaseException) -> NoReturn:
    """Says why, and ends the process without Python's tidying up.

    Gloo's threads may wait for peers that are gone; tidying up around them aborts the process, which then seems to
    have died of a signal.
    """
    status = 1
    if isinstance(error, KeyboardInterrupt):
        status = 128 + signal.SIGINT
    elif not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif isinstance(error.code, str):
        sys.stderr.write(f"{error.code}\n")
    elif error.code is None or isinstance(error.code, int):
        status = error.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def broadcast_text(text: str) -> str:
    """Rank 0's text, on every rank; at most 1024 bytes as UTF-8."""
    encoded = text.encode()
    if len(encoded) > _TEXT_BYTES:
        raise ValueError(f"text of {len(encoded)} bytes, more than {_TEXT_BYTES}: {text[:40]}...")
    data = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    if dist.get_rank() == 0:
        data[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()


def use_own_worker() -> None:
    """Puts :func:`distributed_worker` into nerfstudio's launcher, and has the launcher explain how a job ended.

    Reason: its own worker asserts CUDA, and waits 30 minutes for a rank that is gone. The launcher may run as
    ``nerfstudio.scripts.train`` or, started with ``python -m``, as ``__main__``.
    """
    for name in ("nerfstudio.scripts.train", "__main__"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "_distributed_worker"):
            module._distributed_worker = distributed_worker  # type: ignore[attr-defined]
            if not hasattr(module.launch, "__wrapped__"):
                module.launch = explains_failures(module.launch)  # type: ignore[attr-defined]


def explains_failures(launch: Callable[..., None]) -> Callable[..., None]:
    """Wraps nerfstudio's launcher: a failed rank ends the program with one line instead of the launcher's traceback.

    By then the ranks have said what happened, except for one that was killed. The exit status is that of the rank that
    ended first.
    """

    @functools.wraps(launch)
    def launch_and_explain(*args: Any, **options: Any) -> None:
        first = options.get("machine_rank", 0) * options.get("num_devices_per_machine", 0)
        try:
            launch(*args, **options)
        except ProcessRaisedException as error:
            sys.stderr.write(f"{error.msg.strip()}\n")
            sys.stderr.write(f"Error: rank {first + error.error_index} raised an exception, see above\n")
            raise SystemExit(1) from error
        except ProcessExitedException as error:
            killed = f"rank {first + error.error_index} was ended by {error.signal_name}" if error.signal_name else ""
            sys.stderr.write(f"Error: the job has ended: {killed or 'see above'}\n")
            raise SystemExit(EXIT_CODE if killed else error.exit_code) from error

    return launch_and_explain


def check_machines(machine: Any) -> None:
    """Finds what nerfstudio's launcher would only trip over later.

    Raises:
        SystemExit: with the remedy.
    """
    if machine.num_devices < 1 or machine.num_machines < 1:
        raise SystemExit("Error: --machine.num-devices and --machine.num-machines must be at least 1")
    if machine.num_machines > 1 and machine.dist_url == "auto":
        raise SystemExit(
            "Error: several machines need a meeting point: pass --machine.dist-url tcp://HOST_OF_MACHINE_0:PORT and "
            "--machine.machine-rank 0, 1, ... to each, or use torchrun (see README)"
        )
