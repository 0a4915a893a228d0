"""Launching: nerfstudio's launcher and torchrun, one machine and two, restarts; all give one run with the same bits."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hosts import TwoHosts
from jobs import ENDED_WITHIN, Job, checkpoints, last_step, ns_train, options, send, torchrun
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from training import command, differences, latest, sample_scene

from odin_nerfstudio.glue import launch
from odin_nerfstudio.glue.meeting import store_of_attempt

pytestmark = pytest.mark.timeout(600)

STEPS = 400
DEVICES = 2


@dataclass(frozen=True)
class Run:
    """A finished job."""

    outputs: Path
    trace: Path
    output: str
    threads: list[str | None]
    """OMP_NUM_THREADS of each rank."""

    @property
    def folder(self) -> Path:
        (folder,) = self.outputs.glob("*/*/*")  # one output folder
        return folder


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_scene(tmp_path_factory.mktemp("scene"), size="64x48", points=400)


@pytest.fixture(scope="module")
def by_ns_train(scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """ns-train with two devices, to the end, without threads chosen by the user."""
    root = tmp_path_factory.mktemp("ns-train")
    arguments = options(scene, root / "outputs", STEPS * DEVICES, pipeline__odin__trace=root / "traces" / "trace.json")
    with Job(ns_train(arguments), root / "log", without=("OMP_NUM_THREADS",)) as job:
        job.until("both ranks", lambda: len(job.ranks()) == DEVICES)
        threads = [job.processes()[pid].get("OMP_NUM_THREADS") for pid in job.ranks()]
        return Run(root / "outputs", root / "traces" / "trace.json", job.succeed(), threads)


def test_ns_train_gives_one_folder_one_checkpoint_and_one_report(by_ns_train: Run) -> None:
    files = sorted(path.name for path in by_ns_train.folder.rglob("*") if path.is_file())
    events = [name for name in files if name.startswith("events.out.tfevents")]
    assert len(events) == 1
    last = f"step-{STEPS - 1:09d}.ckpt"
    assert files == ["config.yml", "dataparser_transforms.json", events[0], last]
    assert by_ns_train.output.count("Where the ranks' time went") == 1
    assert by_ns_train.output.count("Training Finished") == 1
    table = [line.split() for line in by_ns_train.output.splitlines()]
    rows = {line[0]: line[1] for line in table if len(line) > 8 and line[0] in ("0", "1") and line[1] == str(STEPS)}
    assert rows == {"0": str(STEPS), "1": str(STEPS)}, "tasks of each rank"
    assert "terminate called" not in by_ns_train.output


def test_threads_are_divided_between_the_ranks(by_ns_train: Run) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // DEVICES)
    assert by_ns_train.threads == [str(share)] * DEVICES


def test_trace_has_one_process_per_rank(by_ns_train: Run) -> None:
    events = json.loads(by_ns_train.trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    for rank in names:
        tasks = [e for e in events if e["name"] == "task" and e["pid"] == rank]
        assert sorted(e["args"]["step"] for e in tasks) == list(range(STEPS))
        assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in tasks)


def test_evaluation_and_export_need_nothing_special(by_ns_train: Run, tmp_path: Path) -> None:
    config, metrics, export = by_ns_train.folder / "config.yml", tmp_path / "metrics.json", tmp_path / "export"
    with ThreadPoolExecutor(2) as pool:
        evaluation = pool.submit(command, "ns-eval", "--load-config", config, "--output-path", metrics)
        command("ns-export", "gaussian-splat", "--load-config", config, "--output-dir", export)
        evaluation.result()
    assert json.loads(metrics.read_text())["results"]["psnr"] > 15
    header = (export / "splat.ply").read_bytes()[:500].decode(errors="replace")
    count = len(latest(by_ns_train.folder)["pipeline"]["_model.gauss_params.means"])
    assert count > 400, "the run densifies"
    assert f"element vertex {count}\n" in header


def test_torchrun_goes_on_by_itself_after_faults_and_ends_with_the_same_bits(
    scene: Path, by_ns_train: Run, tmp_path: Path
) -> None:
    """One rank is killed at a random moment, then one is stopped, which only the other can notice."""
    rng = np.random.default_rng(11)
    outputs, stall = tmp_path / "outputs", 10.0
    arguments = options(scene, outputs, STEPS * DEVICES, pipeline__odin__stall=stall)
    launcher = ("--standalone", "--nproc-per-node", DEVICES, "--max-restarts", 2)
    faults = {signal.SIGKILL: "died or lost its connection at its step", signal.SIGSTOP: "has stalled at its step"}
    with Job(torchrun(arguments, *launcher), tmp_path / "log") as job:
        saved = -1
        for number, words in faults.items():
            job.until("a new checkpoint", lambda before=saved: last_step(outputs) > before)
            time.sleep(float(rng.uniform(0, 0.3)))
            ranks, victim = job.ranks(), int(rng.integers(DEVICES))
            saved = last_step(outputs)
            send(ranks[victim], number)
            begin = time.monotonic()
            job.until("the end of all ranks", lambda them=ranks: not set(them) & job.processes().keys())
            assert time.monotonic() - begin < ENDED_WITHIN + (stall if number == signal.SIGSTOP else 0)
            assert f"Error on rank {1 - victim}: rank {victim} {words}" in job.lines
        output = job.succeed()
    (folder,) = outputs.glob("*/*/*")
    assert output.count("Restarted by torchrun: going on after step") == len(faults), output[-3000:]
    assert checkpoints(outputs) == [folder / "nerfstudio_models" / f"step-{STEPS - 1:09d}.ckpt"]
    assert differences(latest(by_ns_train.folder), latest(folder)) == []
    config = yaml.load((folder / "config.yml").read_text(), yaml.Loader)
    assert config.load_dir is None and config.max_num_iterations == STEPS, "the config is the first attempt's"


def test_two_machines_give_the_same_bits_as_one(scene: Path, by_ns_train: Run, tmp_path: Path) -> None:
    with TwoHosts() as hosts:
        meet = ("--nnodes", 2, "--master-addr", hosts.address(0), "--master-port", 29511, "--nproc-per-node", 1)
        jobs = [
            Job(
                torchrun(options(scene, tmp_path / "outputs", STEPS * DEVICES), *meet, "--node-rank", host),
                tmp_path / f"log{host}",
                hosts.inside(host),
                GLOO_SOCKET_IFNAME=hosts.INTERFACE,
            )
            for host in range(2)
        ]
        with jobs[0], jobs[1]:
            first, second = (job.succeed() for job in jobs)
    (folder,) = (tmp_path / "outputs").glob("*/*/*")
    assert differences(latest(by_ns_train.folder), latest(folder)) == []
    assert "Where the ranks' time went" in first and "Where the ranks' time went" not in second


def test_several_machines_without_a_meeting_point_are_told_what_to_pass() -> None:
    machine = SimpleNamespace(num_devices=1, num_machines=2, machine_rank=0, dist_url="auto")
    with pytest.raises(SystemExit, match=r"Error: .*--machine\.dist-url tcp://.*--machine\.machine-rank.*torchrun"):
        launch.check_machines(machine)


def test_ranks_of_an_attempt_meet_apart_from_those_of_the_attempts_before() -> None:
    """torchrun keeps its store over a restart, with what the killed ranks left in it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    within = timedelta(seconds=30)
    names: list[set[bytes]] = []
    for delays in ([0.2, 0.0, 0.0], [0.0, 0.2, 0.1]):  # rank 0 comes last, or first and sees old words

        def meet(rank: int, delays: list[float] = delays) -> bytes:
            mine = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
            time.sleep(delays[rank])
            part = store_of_attempt(mine, rank, 3, within)
            if rank == 0:
                part.set("name", secrets.token_hex(8))
            part.wait(["name"], within)
            return part.get("name")

        with ThreadPoolExecutor(3) as pool:
            names.append(set(pool.map(meet, range(3))))
    assert [len(n) for n in names] == [1, 1] and names[0] != names[1]
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2, 3\] did not come within 0.5 s"):
        store_of_attempt(store, 0, 4, timedelta(seconds=0.5))


@pytest.mark.parametrize("chosen", [True, False])
def test_threads_under_torchrun_are_divided_unless_the_user_chose_them(
    chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets OMP_NUM_THREADS to 1 by itself; only what it was started with counts."""
    environment = {"OMP_NUM_THREADS": "1"} if chosen else {}
    with subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(b"?")
        agent.stdin.flush()
        agent.stdout.read(1)  # until it runs, /proc has no environment of it
        monkeypatch.setattr(os, "getppid", lambda: agent.pid)
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
        before = torch.get_num_threads()
        try:
            launch.divide_threads(2)
            assert torch.get_num_threads() == (1 if chosen else 3)
        finally:
            torch.set_num_threads(before)
            agent.kill()
