"""A job as a whole: what is checked and settled once, before its ranks start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.glue import restart, sharding
from odin_nerfstudio.glue.checkpoint import CheckpointError, find_checkpoint, read_checkpoint
from odin_nerfstudio.glue.devices import check_backend
from odin_nerfstudio.glue.launch import Place, broadcast_text, check_machines, divide_threads, use_own_worker
from odin_nerfstudio.glue.model_options import flag, refusal
from odin_nerfstudio.glue.scale_schedule import scale_schedule
from odin_nerfstudio.glue.warm_up import warm_up_kernels

if TYPE_CHECKING:
    from odin_nerfstudio.glue.odin_options import OdinOptions
    from odin_nerfstudio.glue.odin_trainer import OdinTrainerConfig


def ranks_of(config: OdinTrainerConfig) -> int:
    """How many ranks the job has."""
    place = Place.of_torchrun()
    return place.ranks if place is not None else config.machine.num_devices * config.machine.num_machines


def is_first_process(config: OdinTrainerConfig) -> bool:
    """Whether this process speaks and writes for the job."""
    place = Place.of_torchrun()
    return place.rank == 0 if place is not None else config.machine.machine_rank == 0


def prepare(config: OdinTrainerConfig) -> None:
    """Checks the options, settles those that depend on the job, and gets this process ready to start ranks.

    Raises:
        SystemExit: an option cannot be honoured; one line says which and what to do.
    """
    options, machine = config.pipeline.odin, config.machine
    check_machines(machine)
    _refuse_unsupported(config)
    if options.placement == "sharded" and (reason := sharding.refusal(config)) is not None:
        raise SystemExit(f"Error: --pipeline.odin.placement sharded: {reason}")
    if (reason := refusal(config.pipeline.model)) is not None:
        raise SystemExit(f"Error: {reason}")
    unused = getattr(config.pipeline.model, "unused", list)()
    if unused and is_first_process(config):
        CONSOLE.log(f"{config.method_name} has no use for {', '.join(map(flag, unused))}")
    if machine.device_type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("Error: --machine.device-type cuda, but torch finds no CUDA device; use cpu")
    check_backend(options.backend, machine.device_type, local_ranks(config))
    if options.seed is None:
        options.seed = machine.seed
    check_delays(options)
    ranks = ranks_of(config)
    if options.views_per_step is None:
        options.views_per_step = _views_per_step_of_checkpoint(config) or ranks
    if options.views_per_step < ranks:
        raise SystemExit(
            f"Error: {ranks} devices need at least as many views per step, but --pipeline.odin.views-per-step is "
            f"{options.views_per_step}"
        )
    if options.scale_schedule and options.views_per_step != options.scaled_for:
        changes = scale_schedule(config, options.views_per_step / options.scaled_for)
        options.scaled_for = options.views_per_step
        if is_first_process(config):
            old, new = changes.get("max_num_iterations", (config.max_num_iterations,) * 2)
            CONSOLE.log(
                f"{options.views_per_step} views per step: {old} steps become {new}, with learning rates times "
                f"{options.views_per_step**0.5:.2f} (--pipeline.odin.scale-schedule False keeps the schedule as it is)"
            )
    if ranks > 1:
        divide_threads(local_ranks(config))
        use_own_worker()
    if machine.device_type == "cpu" and Place.of_torchrun() is None:
        warm_up_kernels(config.pipeline.model)


def agree_on_folder(config: OdinTrainerConfig) -> None:
    """One output folder for all ranks that torchrun started: rank 0's, after a restart that of the first attempt."""
    if Place.of_torchrun() is None:
        return  # there is only one process yet
    found = restart.Progress(config.timestamp)
    if restart.is_restart() and is_first_process(config):
        found = restart.progress_of_earlier_attempt(config.get_base_dir().parent) or found
    restart.go_on(config, restart.Progress.of_text(broadcast_text(found.as_text())))


def local_ranks(config: OdinTrainerConfig) -> int:
    """How many of the job's ranks run on this machine."""
    place = Place.of_torchrun()
    return place.local_ranks if place is not None else config.machine.num_devices


def _views_per_step_of_checkpoint(config: OdinTrainerConfig) -> int | None:
    """A resumed run keeps its views per step: the result depends on them."""
    try:
        if config.load_dir is not None:
            path = find_checkpoint(config.load_dir, config.load_step)
        elif config.load_checkpoint is not None:
            path = config.load_checkpoint
        else:
            return None
        return read_checkpoint(path).get("odin", {}).get("views_per_step")
    except CheckpointError as error:
        raise SystemExit(f"Error: {error}") from error


def check_delays(options: OdinOptions) -> None:
    """Refuses limits of delayed reads that make no sense.

    Raises:
        SystemExit: one line says which and what to do.
    """
    for name in ("max_delay", "max_overlap", "max_impact"):
        if (value := getattr(options, name)) < 0:
            raise SystemExit(f"Error: --pipeline.odin.{name.replace('_', '-')} {value} is negative")
    if options.mode == "throughput" and options.max_delay > options.lookahead:
        raise SystemExit(
            f"Error: --pipeline.odin.max-delay {options.max_delay} is more than --pipeline.odin.lookahead "
            f"{options.lookahead}: no device runs that far ahead; lower the one or raise the other"
        )


def _refuse_unsupported(config: OdinTrainerConfig) -> None:
    """Options of nerfstudio that have no meaning with Odin, named with the reason before anything starts."""
    reasons = {
        "--mixed-precision": (config.mixed_precision, "splats are rasterized in float32"),
        "--use-grad-scaler": (config.use_grad_scaler, "splats are rasterized in float32"),
        "--gradient-accumulation-steps": (
            bool(config.gradient_accumulation_steps),
            "use --pipeline.odin.views-per-step, which accumulates over views",
        ),
        "--log-gradients": (config.log_gradients, "gradients exist per view and primitive, never for the whole model"),
    }
    for option, (used, reason) in reasons.items():
        if used:
            raise SystemExit(f"Error: {option} does not go with Odin: {reason}")
    of_method = getattr(config.pipeline.model, "refusals", dict)()
    for option, (used, reason) in of_method.items():
        if used:
            raise SystemExit(f"Error: {option} does not go with {config.method_name}: {reason}")
    for group, settings in config.optimizers.items():
        if settings["optimizer"].max_norm is not None:
            raise SystemExit(
                f"Error: max_norm of the optimizer of {group} does not go with Odin: the norm of a whole gradient is "
                "known only when every view is in"
            )
