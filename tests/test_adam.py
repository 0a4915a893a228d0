"""The fused Adam has the bits of ``torch.optim.Adam``, dense and for any subset of rows."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from odin_nerfstudio.runtime import adam, adam_roots
from odin_nerfstudio.runtime.adam import OdinAdam, cpu_arithmetic, publish_rows
from odin_nerfstudio.runtime.adam_parts import AdamTarget, GradientPart, LiveColumns, step_parts, steps_parts

SHAPES = [(1,), (7,), (1, 1), (5, 3), (333, 4), (1000, 15, 3), (70_001, 1), (3, 20_000), ()]
"""Tails of every kind, rows longer than a chunk, a scalar."""


def gradient(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values over many magnitudes, with exact zeros of both signs, denormals and rows without any gradient."""
    g = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape, generator=generator))
    u = torch.rand(shape, generator=generator)
    g = torch.where(u < 0.1, torch.zeros(()), g)
    g = torch.where((u > 0.1) & (u < 0.15), -torch.zeros(()), g)
    g = torch.where((u > 0.15) & (u < 0.2), torch.full((), 1e-42), g)
    if len(shape) > 1:
        g[torch.rand(shape[0], generator=generator) < 0.3] = 0
    return g


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().contiguous().view(torch.int32), b.detach().contiguous().view(torch.int32))


def make(cls: type[torch.optim.Adam], **options: object) -> tuple[list[torch.nn.Parameter], torch.optim.Adam]:
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    groups = [{"params": [p], "lr": 10.0 ** -(i % 5)} for i, p in enumerate(params)]
    return params, cls(groups, lr=1e-3, **options)  # type: ignore[arg-type]


def assert_same(stock: tuple, odin: tuple) -> None:
    for p, q in zip(stock[0], odin[0]):
        assert bits_equal(p, q), tuple(p.shape)
        a, b = stock[1].state[p], odin[1].state[q]
        assert list(a) == list(b)
        for key in a:
            assert a[key].dtype == b[key].dtype and bits_equal(a[key], b[key]), (key, tuple(p.shape))


def test_this_machine_is_supported() -> None:
    assert cpu_arithmetic() is not None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [{"eps": 1e-15}, {}, {"betas": (0.6, 0.7), "eps": 1e-3}, {"eps": 0.0}])
def test_dense_step_has_stock_bits(options: dict, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        stock, odin = make(torch.optim.Adam, **options), make(OdinAdam, **options)
        generator = torch.Generator().manual_seed(5)
        for step in range(5):
            for p, q in zip(stock[0], odin[0]):
                p.grad = gradient(tuple(p.shape), generator)
                if p.dim() == 3 and step < 3:  # SH bands that are switched on one after the other
                    p.grad[:, [0, 3, 8][step] :] = 0
                q.grad = p.grad.clone()
            for _, optimizer in (stock, odin):
                optimizer.param_groups[1]["lr"] = 1e-2 / (1 + step)
                optimizer.step()
        assert_same(stock, odin)
    finally:
        torch.set_num_threads(before)


def test_state_is_exchangeable_with_stock() -> None:
    stock, odin = make(torch.optim.Adam), make(OdinAdam)
    generator = torch.Generator().manual_seed(6)
    for step in range(4):
        for p, q in zip(stock[0], odin[0]):
            p.grad = gradient(tuple(p.shape), generator)
            q.grad = p.grad.clone()
        stock[1].step()
        odin[1].step()
        if step == 1:  # swap the states
            a, b = copy.deepcopy(stock[1].state_dict()), copy.deepcopy(odin[1].state_dict())
            assert a.keys() == b.keys() and a["param_groups"] == b["param_groups"]
            stock[1].load_state_dict(b)
            odin[1].load_state_dict(a)
    assert_same(stock, odin)


def test_unusual_parameters_go_through_stock_adam(caplog: pytest.LogCaptureFixture) -> None:
    def run(cls: type[torch.optim.Adam]) -> list[Tensor]:
        a = torch.nn.Parameter(torch.ones(6, 4).t())  # not contiguous
        b = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
        c = torch.nn.Parameter(torch.linspace(0, 1, 9))
        unused = torch.nn.Parameter(torch.ones(2))
        optimizer = cls(
            [{"params": [a, b, c, unused]}, {"params": [d := torch.nn.Parameter(torch.ones(3))], "weight_decay": 0.1}]
        )
        for _ in range(3):
            optimizer.zero_grad()
            loss = optimizer.step(lambda: sum((p.double() ** 3).sum() for p in (a, b, c, d)).backward() or 4.0)  # type: ignore[union-attr]
            assert loss == 4.0
        assert unused not in optimizer.state and all(p.grad is not None for p in (a, b, c, d))
        return [a, b, c, d]

    OdinAdam._said = False
    with caplog.at_level(logging.INFO, logger=adam.__name__):
        results = zip(run(torch.optim.Adam), run(OdinAdam))
    assert all(torch.equal(p, q) for p, q in results)
    assert len(caplog.records) == 1 and "Stock Adam steps" in caplog.text


@pytest.mark.parametrize("shape", [(1000,), (1000, 3), (500, 15, 3), (300, 59)])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_have_dense_bits(shape: tuple[int, ...], threads: int) -> None:
    """Any split of the rows over several calls, masks and ids, with and without gradients, equals one dense step."""
    generator = torch.Generator().manual_seed(7)
    stock = torch.nn.Parameter(torch.randn(shape, generator=generator))
    p = stock.detach().clone()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    optimizer = torch.optim.Adam([stock], lr=0.01, eps=1e-15)
    for step in range(1, 4):
        g = gradient(shape, generator)
        part = torch.randint(0, 3, (shape[0],), generator=generator)
        g[part == 2] = 0
        stock.grad = g.clone()
        optimizer.step()
        rules = {"step": step, "lr": 0.01, "eps": 1e-15, "threads": threads}
        seen = g.clone()
        assert publish_rows(p, m, v, seen, part == 0, clear_grads=True, **rules) == int((part == 0).sum())
        assert not seen[part == 0].any() and torch.equal(seen[part == 1], g[part == 1])
        ids = torch.nonzero(part == 1).flatten().flip(0)
        assert publish_rows(p, m, v, g[ids], ids, **rules) == len(ids)
        publish_rows(p, m, v, None, (part == 2).to(torch.uint8), **rules)
        assert publish_rows(p, m, v, None, torch.zeros(0, dtype=torch.int32), **rules) == 0
    state = optimizer.state[stock]
    assert bits_equal(stock, p) and bits_equal(state["exp_avg"], m) and bits_equal(state["exp_avg_sq"], v)


def test_columns_with_their_own_learning_rates() -> None:
    generator = torch.Generator().manual_seed(8)
    table, lrs = torch.randn(200, 7, generator=generator), [1e-4] * 3 + [5e-3] * 3 + [0.05]
    fields = [torch.nn.Parameter(table[:, c].clone()) for c in (slice(0, 3), slice(3, 6), slice(6, 7))]
    optimizer = torch.optim.Adam([{"params": [f], "lr": lr} for f, lr in zip(fields, (1e-4, 5e-3, 0.05))])
    m, v = torch.zeros_like(table), torch.zeros_like(table)
    p2, m2, v2 = table.clone(), m.clone(), v.clone()
    for step in range(1, 4):
        g = gradient((200, 7), generator)
        for f, c in zip(fields, (slice(0, 3), slice(3, 6), slice(6, 7))):
            f.grad = g[:, c].clone()
        optimizer.step()
        everything = torch.ones(200, dtype=torch.bool)
        publish_rows(table, m, v, g, everything, step=step, lr=lrs)
        scalars = adam.StepNumbers.of(step, lrs, (0.9, 0.999), 1e-8, 7)
        adam._publish_stock(p2, m2, v2, g, everything, True, scalars, False)
    assert bits_equal(table, torch.cat([f.detach() for f in fields], 1))
    assert all(bits_equal(a, b) for a, b in zip((table, m, v), (p2, m2, v2)))


def test_strided_rows_take_torchs_operations() -> None:
    wide = torch.randn(50, 8, generator=torch.Generator().manual_seed(9))
    p, q = wide[:, :3], wide[:, :3].clone()
    g = torch.randn(50, 3, generator=torch.Generator().manual_seed(10))
    states = [(torch.zeros(50, 3), torch.zeros(50, 3)) for _ in range(2)]
    mask = torch.arange(50) % 2 == 0
    for x, (m, v) in zip((p, q), states):
        publish_rows(x, m, v, g, mask, step=1, lr=0.1)
    assert bits_equal(p, q) and torch.equal(states[0][1], states[1][1])


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("exp_avg", {"exp_avg": torch.zeros(3, 2)}),
        ("grads", {"grads": torch.zeros(3, 2)}),
        ("rows", {"rows": torch.ones(5, dtype=torch.bool)}),
        ("rows", {"rows": torch.tensor([0.0])}),
        ("rows", {"rows": torch.tensor([4]), "grads": None}),
        ("lr", {"lr": [0.1, 0.2, 0.3]}),
    ],
)
def test_wrong_arguments_are_named(argument: str, change: dict) -> None:
    arguments = {
        "param": torch.zeros(4, 2), "exp_avg": torch.zeros(4, 2), "exp_avg_sq": torch.zeros(4, 2),
        "grads": torch.zeros(4, 2), "rows": torch.ones(4, dtype=torch.bool), "step": 1, "lr": 0.1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=argument):
        publish_rows(**(arguments | change))


@pytest.mark.parametrize("share", [1.0, 0.8, 0.3])
def test_a_gradient_in_parts_gives_the_bits_of_a_dense_one(share: float) -> None:
    """Parts are added in order, in columns of wider rows; threads and chunks do not show."""
    n, columns = 40_000, 5
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(n, columns, generator=generator) for _ in range(2)]
    start.append(torch.rand(n, columns, generator=generator))
    dense = torch.zeros(n, columns)
    parts = []
    for count, offset, width in ((9000, 2, 5), (7000, 0, 3), (0, 0, 5)):
        ids = torch.randperm(n, generator=generator)[:count].sort().values.int()
        values = torch.randn(count, 8, generator=generator)
        dense[ids.long(), :width] += values[:, offset : offset + width]
        parts.append(GradientPart(ids, values, offset, width))
    mask = (torch.rand(n, generator=generator) < share).to(torch.uint8) if share < 1 else None
    if not steps_parts(*start, betas=(0.9, 0.999)):
        pytest.skip("no kernel has the bits of torch.optim.Adam on this machine")
    ids = None if mask is None else mask.nonzero().flatten().int()
    rules: dict[str, Any] = {"step": 7, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-15}
    p, m, v = expected = [t.clone() for t in start]
    publish_rows(p, m, v, dense, torch.ones(n, dtype=torch.bool) if mask is None else mask, **rules)
    for threads in (1, 2):
        p, m, v = stepped = [t.clone() for t in start]
        a, b, c = other = [t[:, :3].contiguous() for t in start]
        step_parts([AdamTarget(p, m, v, parts, **rules), AdamTarget(a, b, c, parts[1:2], **rules)], ids, threads)
        assert all(torch.equal(a, b) for a, b in zip(expected, stepped)), threads
        a, b, c = alone = [t[:, :3].contiguous() for t in start]
        step_parts([AdamTarget(a, b, c, parts[1:2], **rules)], ids)
        assert all(torch.equal(x, y) for x, y in zip(alone, other)) and not torch.equal(a, start[0][:, :3])
    backwards = GradientPart(parts[0].ids.roll(1), parts[0].values, 0, 5)
    with pytest.raises(ValueError, match="ids"):
        step_parts([AdamTarget(p, m, v, [backwards], **rules)], ids)


def test_the_square_root_in_kernels_is_torchs() -> None:
    recipe = adam_roots.root_recipe()
    assert recipe is not None
    x = gradient((100_000,), torch.Generator().manual_seed(11)).abs()
    x[:4] = torch.tensor([0.0, 1e-45, 2.0**-126, 3.4028235e38])
    out = np.empty(x.shape[0], np.float32)
    adam_roots.roots(x.numpy(), out, x.shape[0], recipe)
    assert bits_equal(x.sqrt(), torch.from_numpy(out))


def test_inactive_columns_are_left_out_and_come_back() -> None:
    """Bands that are switched on one after the other, moments that somebody else filled, rows in two calls: stock."""
    n, generator = 3000, torch.Generator().manual_seed(12)
    stock = torch.nn.Parameter(torch.randn(n, 5, 3, generator=generator))
    optimizer = torch.optim.Adam([stock], lr=0.01, eps=1e-15)
    p = stock.detach().clone()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    live = LiveColumns()
    ids = torch.randperm(n, generator=generator)[:700].sort().values.int()
    stepped = []
    for step, width in enumerate((0, 0, 3, 3, 0, 9, 3, 3, 3, 15), start=1):
        values = gradient((700, max(width, 1)), generator)
        dense = torch.zeros(n, 15)
        dense[ids.long(), :width] = values[:, :width]
        stock.grad = dense.view_as(stock)
        if step in (5, 7):  # a checkpoint of another run: moments in columns without a gradient, in place or anew
            state = optimizer.state[stock]
            state["exp_avg"][:, 4, 0] += 0.5
            state["exp_avg_sq"][17, 4, 2] = 1e-9 * step
            if step == 7:
                m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
            else:
                m.copy_(state["exp_avg"])
                v.copy_(state["exp_avg_sq"])
        if step == 9:  # and a step that is none of the kernel's
            other = torch.nn.Parameter(p)
            theirs = OdinAdam([other], lr=0.01, eps=1e-15)
            theirs.state[other] = {"step": torch.tensor(8.0), "exp_avg": m, "exp_avg_sq": v}
            other.grad = stock.grad.clone()
            theirs.step()
        else:
            parts = [GradientPart(ids, values, 0, width)] if width else []
            chosen = torch.rand(n, generator=generator) < (0.2, 0.8)[step % 2]
            for mask in (None,) if step % 3 == 0 else (chosen, ~chosen):
                rules: dict[str, Any] = {"step": step, "lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-15, "live": live}
                chosen_ids = None if mask is None else mask.nonzero().flatten().int()
                step_parts([AdamTarget(p, m, v, parts, **rules)], chosen_ids)
                stepped.append(live.of(m, v, 0))
        optimizer.step()
        state = optimizer.state[stock]
        assert all(bits_equal(a, b) for a, b in ((stock, p), (state["exp_avg"], m), (state["exp_avg_sq"], v))), step
    assert stepped[0] == 0 and 3 in stepped and stepped[-1] == 15
