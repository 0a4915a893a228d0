"""Trainings on several ranks that start within a moment: forked from a server process that has nerfstudio imported.

Importing this module imports everything that a training needs; the server does so once for all ranks to come.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

import ranks as spawned
from nerfstudio.configs.method_configs import all_methods

from odin_nerfstudio.glue import odin_trainer

assert odin_trainer and "odin-splatfacto" in all_methods, "imported for the ranks"

Job = tuple[Path, Path, int, dict[str, Any]]


def _rank(rank: int, count: int, port: int, jobs: list[Job], log: str) -> None:
    with open(f"{log}.{rank}", "w") as stream:  # a training's table of steps is of no use in a test's output
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            spawned._rank(rank, count, port, jobs)
        except BaseException:
            traceback.print_exc()
            raise


def run_on_ranks(count: int, jobs: list[Job], log: Path) -> None:
    """Like ``ranks.run_on_ranks``; each rank's output is in ``log.RANK``, and told where a rank fails."""
    jobs = [(s, o, n, {"pipeline__odin__scale_schedule": False, **options}) for s, o, n, options in jobs]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    port = spawned.free_port()
    processes = [
        context.Process(target=_rank, args=(rank, count, port, jobs, str(log)), daemon=True) for rank in range(count)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    bad = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    told = "\n".join(Path(f"{log}.{rank}").read_text()[-3000:] for rank in bad)
    assert not bad, f"ranks {bad} failed:\n{told}"
