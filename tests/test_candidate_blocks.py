"""Candidate sets by blocks of rows: none that is visible is missed, and far blocks are left out."""

from __future__ import annotations

import pytest
import torch
from runtime_toy import same
from sharded_toy import Run, replicated
from torch import Tensor

from odin_nerfstudio.runtime import candidate_blocks, rows
from odin_nerfstudio.runtime.candidate_blocks import BLOCK, REFRESH, BlockBoxes
from odin_nerfstudio.runtime.candidates import MotionBound, ViewTest, candidate_mask
from odin_nerfstudio.runtime.transport import LocalTransport

ROWS, LR = 40_000, 0.01
MOTION = MotionBound.steady(LR, 0.02, (0.9, 0.999), max_lag=16)
STILL = MotionBound.steady(0.0, 0.0, (0.9, 0.999), max_lag=0)


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_blocks, "LEAST_ROWS", 1)


def view(x: float) -> ViewTest:
    matrix = torch.eye(4)
    matrix[0, 3] = -x
    return ViewTest.of(matrix, torch.tensor([[60.0, 0, 24], [0, 60.0, 16], [0, 0, 1]]), 48, 32, max_lag=16)


def strip(seed: int, order: bool = True) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Rows along a strip of 100 units, by place or not at all."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(ROWS, generator=g) * 100
    x = x.sort().values if order else x
    means = torch.stack([x, torch.rand(ROWS, generator=g) * 2 - 1, 2 + 2 * torch.rand(ROWS, generator=g)], 1)
    scales = torch.log(0.03 + 0.1 * torch.rand(ROWS, 3, generator=g))
    return torch.nn.Parameter(means), torch.nn.Parameter(scales)


def both(
    boxes: BlockBoxes, means: Tensor, scales: Tensor, versions: Tensor, step: int, x: float
) -> tuple[Tensor, Tensor]:
    """What blocks give, and what rows give."""
    out = torch.full((ROWS,), 7, dtype=torch.uint8)
    count = boxes.mark(means, scales, view(x), MOTION, versions, step, 0, out)
    assert count == int(out.sum())
    plain = candidate_mask(means.detach(), scales.detach(), view(x), MOTION, versions=versions, step=step)[0]
    return out, plain


def test_blocks_give_the_sets_of_rows_while_rows_move() -> None:
    boxes, (means, scales) = BlockBoxes(), strip(0)
    versions = torch.zeros(ROWS, dtype=torch.int32)
    g = torch.Generator().manual_seed(1)
    shares = []
    for step in range(3 * REFRESH):
        for x in (3.0, 50.0, 97.0):
            out, plain = both(boxes, means, scales, versions, step, x)
            assert torch.equal(out, plain)
            shares.append(boxes.near_share)
            # a copy without any lag, moved as far as the missing updates can: what is visible there was a candidate
            moved = means.detach() + MOTION.means[1] * 0.999 * (step - versions)[:, None] * torch.tensor([1.0, 1, -1])
            visible = candidate_mask(moved, scales.detach(), view(x), STILL)[0]
            assert not bool((visible & ~out.bool()).any())
        behind = torch.rand(ROWS, generator=g) < 0.5  # half of the rows get their update, as far as Adam goes
        ready = (versions == step) | behind
        with torch.no_grad():  # as the kernels of publication do, which torch does not notice
            means.detach().numpy()[ready] += MOTION.means[1] * 0.999 * (-1) ** step
        versions[ready] = torch.clamp(versions[ready] + 1, max=step + 1)
        versions[versions < step - 2] = step - 2
    assert max(shares) < 0.25


def test_new_rows_and_new_versions_give_new_boxes() -> None:
    boxes, (means, scales) = BlockBoxes(), strip(2)
    versions = torch.zeros(ROWS, dtype=torch.int32)
    both(boxes, means, scales, versions, 0, 50.0)
    with torch.no_grad():
        means.data[:BLOCK, 0] = 50.0  # surgery in place; the table then has new versions
    out, plain = both(boxes, means, scales, versions.clone(), 1, 50.0)
    assert torch.equal(out, plain) and bool(out[:BLOCK].any())
    other = torch.nn.Parameter(means.detach().flip(0).clone())
    out, plain = both(boxes, other, scales, versions, 2, 3.0)
    assert torch.equal(out, plain) and bool(out.any())


def test_what_is_no_number_stays_a_candidate() -> None:
    boxes, (means, scales) = BlockBoxes(), strip(3)
    with torch.no_grad():
        means[5, 1] = scales[30_000, 2] = float("nan")
    out, plain = both(boxes, means, scales, torch.zeros(ROWS, dtype=torch.int32), 0, 50.0)
    assert torch.equal(out, plain) and out[5] and out[30_000]


def test_rows_without_order_are_tested_one_by_one() -> None:
    boxes, (means, scales) = BlockBoxes(), strip(4, order=False)
    versions = torch.zeros(ROWS, dtype=torch.int32)
    for step in range(4 * REFRESH):
        out, plain = both(boxes, means, scales, torch.clamp(versions, min=step), step, 50.0)
        assert torch.equal(out, plain)
    boxes = BlockBoxes()
    for step in range(4 * REFRESH):
        versions.fill_(step)
        out, plain = both(boxes, means, scales, versions, step, 50.0)
        assert torch.equal(out, plain)
    assert boxes._rests_until >= 4 * REFRESH


def test_lag_beyond_the_bound_is_refused() -> None:
    boxes, (means, scales) = BlockBoxes(), strip(5)
    versions = torch.zeros(ROWS, dtype=torch.int32)
    with pytest.raises(ValueError, match="lags by 17"):
        boxes.mark(means, scales, view(50.0), MOTION, versions, 17, 0, torch.empty(ROWS, dtype=torch.uint8))


def test_training_has_the_same_bits_with_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(steps=10)
    monkeypatch.setattr(candidate_blocks, "BLOCK", 1)  # the rows of this scene have no order
    blocks = replicated(run, LocalTransport())
    monkeypatch.setattr(candidate_blocks, "LEAST_ROWS", 10**9)
    assert same(blocks, replicated(run, LocalTransport())) == []


def test_rows_of_masks_and_common_ids() -> None:
    g = torch.Generator().manual_seed(6)
    for n in (0, 1, 7, 8, 9, 4099):
        for share in (0.0, 0.01, 0.5, 1.0):
            mask = (torch.rand(n, generator=g) < share).to(torch.uint8) * 3
            assert torch.equal(rows.ids_of_mask(mask), mask.nonzero().flatten().int())
    even, odd = torch.arange(0, 100, 2, dtype=torch.int32), torch.arange(1, 300, 2, dtype=torch.int32)
    assert not rows.meet(even, odd) and not rows.meet(odd, even) and not rows.meet(even[:0], odd)
    assert rows.meet(torch.cat([even, odd[-1:]]), odd) and rows.meet(odd[:1], odd)
