"""Placement sharded on a device, without one: tensors pretend to be there, gsplat's kernels are references."""

from __future__ import annotations

import dataclasses as dc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_device import DEVICE, Pretended, pretend_device
from runtime_toy import Toy, ToyPlan, same
from sharded_toy import Run, collected, run_sharded
from torch import Tensor

from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.runtime.sharded.crop import Crop
from odin_nerfstudio.runtime.sharded.view_rows import ViewRows
from odin_nerfstudio.runtime.store import RowTable, ViewRow
from odin_nerfstudio.runtime.transport import Kind, Received

SMALL = Run(primitives=60, views=2, steps=8, refine_every=3, reset_every=4, pretend=True)
RUNS = {
    "usual": dc.replace(SMALL, imbalance=0.02),
    "copied": dc.replace(SMALL, relocates=True, scattered=True, refine_every=2),
    "flat": dc.replace(SMALL, surfels=True, imbalance=0.02),
}


def test_owners_on_a_device_train_as_one_owner(tmp_path: Path) -> None:
    """All that owners and renderers do, with references that round every row alike: one owner and two give the bits."""
    for ranks in (1, 2):
        outcome = run_sharded(ranks, tmp_path / str(ranks), RUNS)
        assert outcome.codes == [0] * ranks, (outcome.errors, outcome.failures)
    for name in RUNS:
        one, two = (collected(tmp_path / str(ranks) / name) for ranks in (1, 2))
        assert same(one, two) == [], name
        assert len(one["means"]) != SMALL.primitives and bool(torch.isfinite(one["means"]).all())
        totals = json.loads((tmp_path / "2" / name / "totals.json").read_text())
        assert sum(t["sent"] for t in totals) == sum(t["received"] for t in totals) > 0


class Wire:
    """A transport that keeps what is sent."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.sent: list[tuple[Kind, Tensor]] = []

    def send(self, peers: Any, kind: Kind, words: Tensor, body: Tensor | None = None) -> None:
        assert body is None and not isinstance(words, Pretended)
        self.sent.append((kind, words))


def view_rows(rank: int, backward: Any) -> ViewRows:
    """Of one view, which rank 0 renders at every step."""
    shift = torch.nn.Parameter(torch.zeros(1, 2).to(DEVICE))
    adam = torch.optim.Adam([shift], lr=1e-3)
    table = RowTable("cameras", {"shift": shift}, {"shift": adam}, ViewRow(), lambda _: {"shift": 1e-3}, defer=False)
    plan: Any = ToyPlan(Toy(lanes=1, views=1, steps=2), 1)
    transport: Any = Wire(rank, 3)
    return ViewRows(plan, [table], transport, backward, lambda: 1, 0)


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2), (1, 2, 0)])
def test_sums_of_a_pose_are_added_in_the_order_of_the_ranks(order: tuple[int, ...]) -> None:
    of_rank = [torch.tensor([k, 1.0], dtype=torch.float64) for k in (1.0, 1e16, -1e16)]
    expected = (of_rank[0] + of_rank[1]) + of_rank[2]
    found: list[Tensor] = []

    def backward(task: Task, total: Tensor, tables: Any) -> None:
        found.append(total)
        leaf = tables["cameras"].leaves["shift"]
        leaf.grad = total.float().view(1, 2).to(leaf.device)

    with pretend_device():
        renderer = view_rows(0, backward)
        renderer.rendered(renderer.take(Task(0, 0, 0)), {0, 1, 2})
        for rank in order:
            if rank == 0:
                renderer.send_sums(0, 0, of_rank[0])
                continue
            owner = view_rows(rank, backward)
            owner.send_sums(0, 0, of_rank[rank])
            ((kind, words),) = owner._transport.sent  # type: ignore[attr-defined]
            renderer.take_sums(Received(rank, kind, words, 0.0))
        renderer.advance()
        assert len(found) == 1 and torch.equal(found[0], expected)
        moved = renderer.tables[0].parameters["shift"].detach()
        assert isinstance(moved, Pretended) and renderer.low == 1 and bool((moved[:, 1] < 0).all())
        # the same contribution on another rank
        ((kind, words),) = renderer._transport.sent  # type: ignore[attr-defined]
        other = view_rows(1, backward)
        other.take_contribution(Received(0, kind, words, 0.0))
        other.advance()
        assert torch.equal(other.tables[0].parameters["shift"].detach(), moved)


def test_a_crop_is_where_the_points_are() -> None:
    box = Crop.of([*torch.eye(3).flatten().tolist(), 0.0, 0.0, 0.0, 2.0, 2.0, 2.0])
    points = torch.tensor([[0.5, 0.5, 0.5], [1.5, 0.0, 0.0]])
    with pretend_device():
        inside = box.inside(points.to(DEVICE))
        assert isinstance(inside, Pretended) and inside.tolist() == box.inside(points).tolist() == [True, False]
