"""Runs trainings on several ranks, as real processes; one set of processes for many trainings, to save start-up."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from read_checker import ReadChecker
from training import small_config

from odin_nerfstudio.runtime.throughput import DelayLimits


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank(rank: int, ranks: int, port: int, jobs: list[tuple[Path, Path, int, dict[str, Any]]]) -> None:
    from odin_nerfstudio.glue.launch import Place, join_group

    torch.set_num_threads(1)
    if ranks > 1:
        join_group(Place(rank, rank, ranks, ranks), "cpu", f"tcp://127.0.0.1:{port}")
    for scene, outputs, steps, options in jobs:
        watch, check = options.pop("watch", None), options.pop("check", False)
        config = small_config(scene, outputs, steps, **options)
        config.machine.num_devices = ranks
        config.set_timestamp()
        config.viewer.quit_on_train_completion = True
        if rank == 0:
            config.save_config()
        trainer = config.setup(local_rank=rank, world_size=ranks)
        trainer.setup()
        if watch is not None and rank == 0:
            watch(trainer)
        checker = _checker(trainer, rank) if check else None
        trainer.train()
        if checker is not None:
            checker.write(outputs / f"reads.{rank}.json")
    if ranks > 1:
        torch.distributed.destroy_process_group()


def _checker(trainer: Any, rank: int) -> ReadChecker:
    """Watches a training; rank 1 is slowed down at random, so that others come to read late."""
    options, model = trainer.config.pipeline.odin, trainer.runner.model
    if rank == 1:
        image_loss = model.image_loss

        def slower(outputs: Any, batch: Any) -> torch.Tensor:
            time.sleep(float(np.random.default_rng(model.task).exponential(0.006)))
            return image_loss(outputs, batch)

        model.image_loss = slower
    return ReadChecker(trainer.runner.engine, DelayLimits(options.max_delay, options.max_overlap, options.max_impact))


def run_on_ranks(ranks: int, jobs: list[tuple[Path, Path, int, dict[str, Any]]]) -> None:
    """Trains each job (scene, outputs, steps, options of ``small_config``) on that many ranks.

    An option ``watch`` is a function of a module that rank 0 calls with the trainer before it trains; with ``check`` a
    `ReadChecker` watches each rank and writes ``reads.RANK.json``.

    Steps and intervals are those of the options; they are not scaled by the number of views.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs = [(s, o, n, {"pipeline__odin__scale_schedule": False, **options}) for s, o, n, options in jobs]
    mp.spawn(_rank, args=(ranks, free_port(), jobs), nprocs=ranks, join=True)  # type: ignore[attr-defined]
