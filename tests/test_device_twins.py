"""What a CUDA device computes in torch's operations, run on the CPU against the kernels and stock Adam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_toy import Toy, plain_loop, same, snapshot, train

from odin_nerfstudio.runtime import adam, adam_device, publication, reduction, rows
from odin_nerfstudio.runtime.adam import OdinAdam, publish_rows
from odin_nerfstudio.runtime.transport import LocalTransport

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def take_cpu_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam steps CPU tensors as if they were on another device: the kernel exists for both."""
    monkeypatch.setattr(adam, "_fusable", lambda *tensors: False)
    monkeypatch.setattr(adam, "steps_on_device", adam_device.fits)
    monkeypatch.setattr(adam, "publishes_on_device", adam_device.rows_fit)


def test_training_by_torchs_operations_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense gradients, the optimizer's own step, torch's row operations: the way of a device. On the CPU also the bits
    are the same."""
    torch.set_num_threads(1)
    monkeypatch.setattr(rows, "on_cpu", lambda tensor: False)
    monkeypatch.setattr(publication, "steps_parts", lambda *args, **options: False)
    toy = Toy(primitives=300, steps=25)
    engine = train(toy, LocalTransport())
    assert same(snapshot(engine.scene), snapshot(plain_loop(toy))) == []  # type: ignore[attr-defined]


def test_sums_at_owners_have_an_equal_twin() -> None:
    g = torch.Generator().manual_seed(4)
    parts = []
    for n in (40, 0, 25, 60):
        ids = torch.randperm(80, generator=g)[:n].sort().values.int()
        parts.append((ids, torch.randn(n, 7, generator=g)))
    ids, values = reduction.sum_in_order(parts)
    twin = reduction.sum_in_order_torch(parts)
    assert ids.dtype == twin[0].dtype == torch.int32 and torch.equal(ids, twin[0])
    assert torch.equal(values, twin[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_adam_in_one_kernel_is_stock_adam_but_for_rounding(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        take_cpu_for_a_device(monkeypatch)
    g = torch.Generator().manual_seed(5)
    start = torch.randn(500, 3, generator=g)
    start = start.to(device)
    ours, stock = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [OdinAdam([ours], lr=1e-2, eps=1e-15), torch.optim.Adam([stock], lr=1e-2, eps=1e-15)]
    for step in range(60):
        gradient = torch.randn(500, 3, generator=g) * (torch.arange(500) % 3 != 0)[:, None]
        for p, optimizer in zip((ours, stock), optimizers):
            optimizer.param_groups[0]["lr"] = 1e-2 * 0.97**step
            p.grad = gradient.clone().to(device)
            optimizer.step()
    mine, theirs = optimizers[0].state[ours], optimizers[1].state[stock]
    assert mine.keys() == theirs.keys() and torch.equal(mine["step"], theirs["step"])
    assert float((ours - stock).detach().abs().max()) < 1e-6 and not torch.equal(ours, start)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_rows_stepped_in_portions_have_the_bits_of_the_whole_step(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Ranks publish a step in different portions; their copies must stay equal. No tails: the CPU's kernel has them."""
    if device == "cpu":
        take_cpu_for_a_device(monkeypatch)
    g = torch.Generator().manual_seed(6)
    whole = torch.nn.Parameter(torch.randn(512, 4, generator=g).to(device))
    parts, m, v = whole.detach().clone(), torch.zeros(512, 4, device=device), torch.zeros(512, 4, device=device)
    optimizer = OdinAdam([whole], lr=3e-3, eps=1e-15)
    optimizer.state[whole] = {"step": torch.tensor(0.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    for step in range(1, 9):
        gradient = (torch.randn(512, 4, generator=g) * (torch.arange(512) % 4 != 1)[:, None]).to(device)
        whole.grad = gradient.clone()
        optimizer.step()
        rest = gradient.clone()
        order = torch.randperm(512, generator=g)
        first = torch.zeros(512, dtype=torch.uint8)
        first[order[:256]] = 1
        options: dict[str, Any] = {"step": step, "lr": 3e-3, "eps": 1e-15}
        assert publish_rows(parts, m, v, rest, first.to(device), clear_grads=True, **options) == 256
        assert bool((rest[order[:256].to(device)] == 0).all())
        ids = order[256:].to(device)
        assert publish_rows(parts, m, v, gradient[ids], ids.int(), **options) == 256
    state = optimizer.state[whole]
    assert torch.equal(whole.detach(), parts)
    assert torch.equal(state["exp_avg"], m) and torch.equal(state["exp_avg_sq"], v)
