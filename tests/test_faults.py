"""Faults of real jobs: each ends in time, says which rank failed, leaves no process and a checkpoint to go on from."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hosts import TwoHosts
from jobs import ENDED_WITHIN, Job, checkpoints, last_step, loadable, ns_train, options, send, torchrun
from quick_ranks import QuickRanks, is_whole, start_server
from ranks import free_port
from runtime_toy import Toy, same
from training import BIN, sample_scene

from odin_nerfstudio.runtime.faults import EXIT_CODE

pytestmark = pytest.mark.timeout(600)

ENDLESS = 200_000
"""Views of runs that only a fault ends."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_scene(tmp_path_factory.mktemp("scene"), size="64x48", points=400)


@pytest.fixture(scope="module")
def endless(scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Job, Path]]]:
    """Two jobs on two devices each, started together to save time, with their outputs; both have a checkpoint."""
    outputs = [tmp_path_factory.mktemp("endless") for _ in range(2)]
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(ns_train(options(scene, out, ENDLESS)), out / "log")) for out in outputs]
        for job, out in zip(jobs, outputs):
            job.until("the first checkpoint", lambda out=out: last_step(out) >= 0)
        yield list(zip(jobs, outputs))


def test_a_killed_rank_ends_the_job_and_is_named(endless: list[tuple[Job, Path]]) -> None:
    job, outputs = endless[0]
    send(job.ranks()[1], signal.SIGKILL)
    job.finish(ENDED_WITHIN)
    assert job.process.returncode == EXIT_CODE
    assert "Error on rank 0: rank 1 died or lost its connection at its step" in job.lines
    assert "(noticed at step" in job.lines
    assert "Error: the job has ended: rank 1 was ended by SIGKILL" in job.lines, "the launcher's last line"
    assert "Traceback" not in job.output
    assert loadable(outputs) >= 0


def test_ctrl_c_saves_the_finished_steps_on_all_ranks_and_leaves_no_process(endless: list[tuple[Job, Path]]) -> None:
    job, outputs = endless[1]
    before = last_step(outputs)
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
    job.finish(60)
    assert job.process.returncode == 0, job.output[-3000:]
    assert loadable(outputs) > before
    assert job.output.count("Stopping: saving the finished steps") == 1
    assert "Traceback" not in job.output


FAILING_SET_UP = """
import os
from odin_nerfstudio import train
from odin_nerfstudio.glue.odin_pipeline import OdinPipeline

def fail(*_, **__):
    raise RuntimeError("no room for the views")

if os.environ["RANK"] == "1":
    OdinPipeline.prepare_training = fail
train.main()
"""


def test_a_rank_that_fails_in_set_up_stops_the_others(scene: Path, tmp_path: Path) -> None:
    """Two launchers, as on two machines: neither can end the other's rank."""
    script = tmp_path / "failing_set_up.py"
    script.write_text(FAILING_SET_UP)
    meet = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(), "--nproc-per-node", 1]
    launch = [str(BIN / "torchrun"), *map(str, meet), "--node-rank"]
    arguments = [str(script), *options(scene, tmp_path, ENDLESS)]
    with (
        Job([*launch, "0", *arguments], tmp_path / "log0") as first,
        Job([*launch, "1", *arguments], tmp_path / "log1") as second,
    ):
        second.until("the exception", lambda: "RuntimeError: no room for the views" in second.output)
        for job in (first, second):
            job.finish(ENDED_WITHIN)
            assert job.process.returncode != 0
        assert "rank 1 could not be set up: RuntimeError: no room for the views" in first.lines
        assert "terminate called" not in first.output + second.output
    assert not checkpoints(tmp_path)


def test_a_full_disk_keeps_the_earlier_checkpoints(scene: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("a full disk is played by a small tmpfs, which needs root")
    try:
        arguments = options(scene, small, ENDLESS, save_only_latest_checkpoint=False)
        with Job(torchrun(arguments, "--standalone", "--nproc-per-node", 2), tmp_path / "log") as job:
            job.until("the first checkpoint", lambda: last_step(small) >= 0)
            job.finish()
            assert job.process.returncode != 0
            assert "Error on rank 0: could not write" in job.lines and "No space left on device" in job.lines
            assert "free some space or choose another --output-dir" in job.lines
            assert "Error on rank 1: rank 0 raised CheckpointError at its step" in job.lines
        assert len(checkpoints(small)) > 1 and loadable(small) > 0
        assert not list(small.rglob("checkpoint_being_written"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_lost_connection_between_machines_is_named(scene: Path, tmp_path: Path) -> None:
    """nerfstudio's launcher on each of two machines, until the cable between them is cut."""
    with TwoHosts() as hosts:
        jobs = []
        for host in range(2):
            arguments = options(
                scene,
                tmp_path,
                ENDLESS,
                pipeline__odin__stall=10,
                machine__num_machines=2,
                machine__machine_rank=host,
                machine__dist_url=f"tcp://{hosts.address(0)}:29555",
            )
            log, inside = tmp_path / f"log{host}", hosts.inside(host)
            jobs.append(Job(ns_train(arguments, devices=1), log, inside, GLOO_SOCKET_IFNAME=hosts.INTERFACE))
        with jobs[0], jobs[1]:
            jobs[0].until("the first checkpoint", lambda: last_step(tmp_path) >= 0)
            hosts.cut()
            for job in jobs:
                job.finish(10 + ENDED_WITHIN)
                assert job.process.returncode == EXIT_CODE
            assert "Error on rank 0: rank 1 has stalled at its step" in jobs[0].lines
            assert "Error on rank 1: rank 0 has stalled at its step" in jobs[1].lines
    assert len(list(tmp_path.glob("object/*/*"))) == 1, "one output folder"
    assert loadable(tmp_path) >= 0


def test_killed_at_twenty_random_moments_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """The toy of the runtime's tests on three ranks: each time another rank is killed and all start anew."""
    kills, every = 20, 20
    rng = np.random.default_rng(7)
    toy = Toy(steps=900, lanes=3, primitives=300, jitter=0.002, debug=False, refine_every=60, reset_every=150)
    toy = Toy(**{**vars(toy), "save_at": tuple(range(every, toy.steps + 1, every))})
    start_server()
    with QuickRanks(1, tmp_path / "undisturbed", Toy(**{**vars(toy), "jitter": 0.0})) as alone:
        alone.ended(200)
    reached = 0
    for attempt in range(kills):
        with QuickRanks(3, tmp_path / str(attempt), toy) as ranks:
            ranks.until(ranks.checkpoints)
            time.sleep(float(rng.uniform(0, 0.15)))
            victim = int(rng.integers(3))
            ranks.kill(victim)
            ranks.ended(ENDED_WITHIN)
            codes = [process.exitcode for process in ranks.processes]
            assert codes == [-signal.SIGKILL if rank == victim else EXIT_CODE for rank in range(3)], ranks.reports()
            for rank in {0, 1, 2} - {victim}:
                culprit, text = ranks.reports()[f"failure.{rank}"].split("\n", 1)
                assert int(culprit) == victim and f"rank {victim} died or lost its connection" in text
            whole = {step: path for step, path in ranks.checkpoints().items() if is_whole(path)}
        if whole:
            assert max(whole) > reached
            reached = max(whole)
            toy = Toy(**{**vars(toy), "start_from": str(whole[reached])})
    assert reached >= every * kills // 2
    with QuickRanks(3, tmp_path / "last", toy) as ranks:
        ranks.ended(200)
    end = torch.load(tmp_path / "last" / "run" / "end.pt")
    assert same(torch.load(tmp_path / "undisturbed" / "run" / "end.pt"), end) == []
