"""What messages of GPUs go through, with the CPU in their place: buffers in host memory, bodies in the plan's order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runtime_toy import Toy, ToyPlan, plain_loop, replace, run_ranks, same, snapshot

from odin_nerfstudio.runtime.faults import EXIT_CODE
from odin_nerfstudio.runtime.messages import FIRST, REST, SHARE
from odin_nerfstudio.runtime.pinned import HostBuffers, HostCopies
from odin_nerfstudio.runtime.travel_order import TravelOrder, Unit

SMALL = Toy(primitives=300, steps=25)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IDLE = Toy(views=3, primitives=300, steps=25, empty_lanes=True, empty_view=True)
LARGE = Toy(lanes=2, views=2, primitives=300, steps=3, wide=12000)


def runs(name: str, toy: Toy, *, sums: bool) -> dict[str, Toy]:
    """Over both carriers: quality (with announcements) and barrier, or rows summed at their owners."""
    found = {}
    for carrier in ("ordered", "copies"):
        toy = replace(toy, carrier=carrier, jitter=0.003)
        found[f"{name}-{carrier}-quality"] = replace(toy, mode="quality", announce=True)
        if sums:
            found[f"{name}-{carrier}-sums"] = replace(toy, reduce="always")
        else:
            found[f"{name}-{carrier}-barrier"] = replace(toy, mode="barrier")
    return found


RUNS = {
    2: runs("small", SMALL, sums=False) | runs("large", LARGE, sums=False) | runs("idle", IDLE, sums=True),
    3: runs("small", SMALL, sums=True) | runs("idle", IDLE, sums=False),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    return {name: snapshot(plain_loop(toy)) for name, toy in {"small": SMALL, "idle": IDLE, "large": LARGE}.items()}


@pytest.mark.parametrize("ranks", RUNS)
def test_every_run_equals_the_plain_loop(
    ranks: int, tmp_path: Path, expected: dict[str, dict[str, torch.Tensor]]
) -> None:
    outcome = run_ranks(ranks, tmp_path, RUNS[ranks])
    assert outcome.codes == [0] * ranks, (outcome.errors, outcome.failures)
    for name in RUNS[ranks]:
        assert same(torch.load(tmp_path / name / "end.pt"), expected[name.split("-")[0]]) == [], name
        totals = json.loads((tmp_path / name / "totals.json").read_text())
        assert sum(t["sent"] for t in totals) == sum(t["received"] for t in totals) > 0
        heard = json.loads((tmp_path / name / "heard.json").read_text())
        assert all(words == heard[0] for words in heard)
        assert bool(heard[0]) == (name.endswith("quality") and "large" not in name)  # 3 steps are too few to hear


@pytest.mark.parametrize(("fault", "reason"), [("kill:1:15", "died or lost"), ("stop:1:15", "has stalled")])
def test_faults_over_the_ordered_transport_are_noticed_at_once(tmp_path: Path, fault: str, reason: str) -> None:
    toy = replace(SMALL, lanes=3, steps=200, jitter=0.002, carrier="ordered", fault=fault, stall=4.0)
    outcome = run_ranks(3, tmp_path, {"run": toy})
    assert outcome.codes == [EXIT_CODE, -9, EXIT_CODE], (outcome.errors, outcome.failures)
    assert {rank for rank, _ in outcome.failures.values()} == {1}
    assert any(reason in text for _, text in outcome.failures.values()), outcome.failures
    assert max(outcome.seconds) - min(outcome.seconds) < 15


def walk(order: TravelOrder, parts: dict[Unit, int], count: int) -> list[tuple[Unit, int]]:
    """The next units, each with what its head says (default: everything is in it)."""
    found = []
    for _ in range(count):
        at = order.current()
        if at is None:
            break
        found.append(at)
        order.advance(parts.get(at[0], FIRST | REST))
    return found


def test_order_of_units() -> None:
    """4 lanes on 3 ranks: rank 0 has two. Part 2 after the parts 1 of its turn, sums after all tasks of their step."""
    plan = ToyPlan(Toy(lanes=4, steps=2), 3)
    deferring = {Unit(0, 0, 1): FIRST, Unit(0, 2, 1): FIRST, Unit(0, 3, 1): FIRST, Unit(0, 0, 2): REST}
    found = walk(TravelOrder(plan, 3, 0), deferring | {Unit(1, 0, 1): FIRST | REST | SHARE}, 99)
    assert found == [
        (Unit(0, 0, 1), 0), (Unit(0, 1, 1), 1), (Unit(0, 2, 1), 2), (Unit(0, 0, 2), 0), (Unit(0, 2, 2), 2),
        (Unit(0, 3, 1), 0), (Unit(0, 3, 2), 0),
        (Unit(1, 0, 1), 0), (Unit(1, 1, 1), 1), (Unit(1, 2, 1), 2), (Unit(1, 3, 1), 0),
        (Unit(1, -1, 1), 0), (Unit(1, -2, 1), 1), (Unit(1, -3, 1), 2),
    ]  # fmt: skip


def test_order_passes_over_empty_lanes_and_starts_anywhere() -> None:
    plan = ToyPlan(Toy(lanes=4, views=2, steps=5, empty_lanes=True), 2)
    found = walk(TravelOrder(plan, 2, 3), {}, 99)
    assert found == [(Unit(s, lane, 1), lane % 2) for s in (3, 4) for lane in range(4) if plan.view(s, lane) >= 0]
    assert len(found) == 4


def test_buffers_are_reused_only_when_given_back() -> None:
    buffers = HostBuffers(pinned=False, kept=1 << 14)
    first, second = buffers.take(5000), buffers.take(8192)
    assert first.shape == (5000,) and first.data_ptr() != second.data_ptr()
    buffers.give(first)
    assert buffers.take(4097).data_ptr() == first.data_ptr(), "the same power of two"
    buffers.give(second)
    buffers.give(first)
    large = buffers.take(20000)
    buffers.give(large)  # more than is kept: freed
    assert {buffers.take(8000).data_ptr(), buffers.take(8000).data_ptr()} == {first.data_ptr(), second.data_ptr()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_parcels_buffer_is_held_until_the_last_peer_has_it(device: str) -> None:
    copies = HostCopies(torch.device(device))
    head, body = torch.arange(5, dtype=torch.int32), torch.arange(10, 17, dtype=torch.int32, device=device)
    parcel = copies.to_host(head, body, receivers=2)
    words = parcel.ready()
    assert words.tolist() == [*range(5), *range(10, 17)]
    parcel.sent()
    assert copies.buffers.take(12).data_ptr() != words.data_ptr()
    arrived = copies.buffers.take(12)
    arrived.copy_(words)
    parcel.sent()
    assert copies.buffers.take(12).data_ptr() == words.data_ptr()
    back = copies.to_device(arrived, 5)
    assert [t.tolist() for t in back] == [head.tolist(), body.tolist()]
    assert copies.buffers.take(12).data_ptr() == arrived.data_ptr()
    arrived.zero_()
    assert back[0].tolist() == head.tolist() and back[1].tolist() == body.tolist(), "the buffer is free for others"
