"""Devices and backends of ranks, and whether ranks agree on what they train."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from ranks import free_port
from training import sample_scene, small_config

from odin_nerfstudio.glue import devices
from odin_nerfstudio.glue.agreement import facts_of, require_agreement
from odin_nerfstudio.glue.input_error import InputError
from odin_nerfstudio.glue.odin_options import OdinOptions
from odin_nerfstudio.runtime.faults import FaultLimits


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the machine had two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_ranks_take_devices_in_turn() -> None:
    assert [str(devices.rank_device("cuda", rank)) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert str(devices.rank_device("cpu", 3)) == "cpu"
    assert devices.own_device_each("cuda", 2) and not devices.own_device_each("cuda", 3)
    assert not devices.own_device_each("cpu", 1)


@pytest.mark.usefixtures("two_gpus")
def test_options_that_nccl_cannot_honour_are_named(tmp_path: Path) -> None:
    def refusal(backend: devices.Backend, device_type: str, ranks: int) -> str:
        try:
            devices.check_backend(backend, device_type, ranks)
        except SystemExit as error:
            return str(error)
        return ""

    config = small_config(tmp_path, tmp_path, 10, pipeline__odin__backend="nccl")
    with pytest.raises(SystemExit, match="backend nccl"):
        config.set_timestamp()
    on_cpu = refusal("nccl", "cpu", 2)
    assert "--pipeline.odin.backend nccl" in on_cpu and "--machine.device-type is cpu" in on_cpu
    crowded = refusal("nccl", "cuda", 3)
    assert "3 ranks of this machine have 2" in crowded and "--pipeline.odin.backend gloo" in crowded
    assert "--machine.num-devices" in crowded
    assert refusal("nccl", "cuda", 2) == refusal("gloo", "cuda", 3) == ""


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("wanted", "device", "local_ranks", "all_own", "expected"),
    [
        (None, "cpu", 2, True, "gloo"),
        (None, "cuda:1", 2, True, "nccl"),
        (None, "cuda:1", 2, False, "gloo, through host memory, ranks share devices"),  # another machine's ranks share
        ("gloo", "cuda:1", 2, True, "gloo, through host memory"),
        ("gloo", "cuda:1", 4, True, "gloo, through host memory, ranks share devices"),
    ],
)
def test_backend_goes_by_the_device(
    monkeypatch: pytest.MonkeyPatch,
    wanted: devices.Backend | None,
    device: str,
    local_ranks: int,
    all_own: bool,
    expected: str,
) -> None:
    made = {}

    def gloo(limits: FaultLimits, device: torch.device | None = None) -> str:
        made["gloo"] = device
        return "gloo"

    monkeypatch.setattr(devices, "GlooTransport", gloo)
    monkeypatch.setattr(devices, "OrderedTransport", lambda channel, limits: "nccl")
    monkeypatch.setattr(devices.dist, "all_reduce", lambda own, op: own.mul_(int(all_own)))
    transport, how = devices.connect(wanted, torch.device(device), local_ranks, FaultLimits())
    assert how == expected and transport == expected.split(",")[0]
    if transport == "gloo":
        assert made["gloo"] == (None if device == "cpu" else torch.device(device)), "bodies come from the rank's device"


@dataclass
class Others:
    """An engine whose ranks say what they are told to."""

    parts: list[dict]

    def exchange(self, data: bytes) -> list[bytes]:
        return [json.dumps(part).encode() for part in self.parts]


def test_ranks_that_differ_are_named_with_what_to_compare() -> None:
    mine = facts_of("abc", odin=OdinOptions())
    require_agreement(Others([mine, facts_of("abc", odin=OdinOptions())]), mine)
    with pytest.raises(InputError, match=r"^ranks 1, 3 would train other views than rank 0: .*data folders"):
        other = facts_of("xyz", odin=OdinOptions())
        require_agreement(Others([mine, other, mine, other]), mine)
    with pytest.raises(InputError, match=r"rank 2 and rank 0 differ in odin.lookahead \(3, 2\)"):
        require_agreement(Others([mine, mine, facts_of("abc", odin=OdinOptions(lookahead=3))]), mine)
    older = {**facts_of("xyz", odin=OdinOptions()), "versions": {**mine["versions"], "torch": "1.0"}}
    with pytest.raises(InputError, match=r"differ in torch \(1\.0, "):
        require_agreement(Others([mine, older]), mine)


def _rank(rank: int, port: int, scene: Path, outputs: Path) -> None:
    from odin_nerfstudio.glue.launch import Place, join_group

    torch.set_num_threads(1)
    join_group(Place(rank, rank, 2, 2), "cpu", f"tcp://127.0.0.1:{port}")
    config = small_config(scene, outputs, 10, pipeline__odin__seed=rank, pipeline__odin__scale_schedule=False)
    config.machine.num_devices = 2
    config.set_timestamp()
    trainer = config.setup(local_rank=rank, world_size=2)
    try:
        trainer.setup()
    except SystemExit as error:
        (outputs / f"said.{rank}").write_text(str(error))
        sys.exit(0)


@pytest.mark.timeout(200)
def test_a_job_whose_ranks_differ_ends_before_its_first_step(tmp_path: Path) -> None:
    scene = sample_scene(tmp_path, size="64x48", points=200)
    mp.spawn(_rank, args=(free_port(), scene, tmp_path), nprocs=2, join=True)  # type: ignore[attr-defined]
    for rank in range(2):
        said = (tmp_path / f"said.{rank}").read_text()
        assert "rank 1 would train other views than rank 0" in said and "odin.seed (1, 0)" in said
