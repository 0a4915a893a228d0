"""The runtime's parts, one at a time, without processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gsplat.strategy import DefaultStrategy
from torch import Tensor

from odin_nerfstudio.runtime import hazards, messages, rows
from odin_nerfstudio.runtime.contributions import collect
from odin_nerfstudio.runtime.engine import Engine, EngineOptions
from odin_nerfstudio.runtime.faults import NonFiniteGradient
from odin_nerfstudio.runtime.gate import RAW, Gate, QualityPolicy
from odin_nerfstudio.runtime.hazards import HazardError
from odin_nerfstudio.runtime.messages import Contribution, Section
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.shadow import Shadow, ShadowPool, Task
from odin_nerfstudio.runtime.staging import StepStaging
from odin_nerfstudio.runtime.statistics import DensificationStatistics
from odin_nerfstudio.runtime.store import RowTable


class Everything:
    """Reads all rows."""

    def mark(self, step: int, view: int, versions: Tensor, least_lag: int, out: Tensor) -> int:
        out.fill_(1)
        return out.shape[0]


def make_table(n: int, seed: int = 0) -> RowTable:
    g = torch.Generator().manual_seed(seed)
    parameters = {
        "means": torch.nn.Parameter(torch.rand(n, 3, generator=g)),
        "sh": torch.nn.Parameter(torch.rand(n, 4, 3, generator=g)),
    }
    optimizers = {k: torch.optim.Adam([p], lr=0.1, eps=1e-15) for k, p in parameters.items()}
    return RowTable(
        "primitives", parameters, optimizers, Everything(), lambda step: {"means": 0.1 / (step + 1), "sh": 0.02},
        padding=lambda view: {"means": torch.full((3,), 9.0), "sh": torch.zeros(4, 3)}, multiple=64,
        active_columns=lambda step: {"sh": 6},
    )  # fmt: skip


def make_contribution(
    table: RowTable, step: int, lane: int, rng: np.random.Generator, front: float = 0.5
) -> Contribution:
    n, width = table.count, table.layout(step).total
    ids = rng.permutation(n)[: rng.integers(0, n)].astype(np.int32)
    first = int(len(ids) * front)
    ids = np.concatenate([np.sort(ids[:first]), np.sort(ids[first:])])
    values = torch.from_numpy(rng.standard_normal((len(ids), width)).astype(np.float32))
    section = Section(torch.from_numpy(ids), first, values[:first], values[first:], n)
    return Contribution(step, lane, [section], None)


def split(message: Contribution) -> tuple[Contribution, Contribution]:
    """A contribution as the two messages that a peer receives."""
    return tuple(  # type: ignore[return-value]
        messages.decode(messages.encode(message, first=first, rest=not first)) for first in (True, False)
    )


def test_messages_survive_the_wire() -> None:
    table, rng = make_table(50), np.random.default_rng(1)
    sent = make_contribution(table, 7, 3, rng)
    visible = (torch.arange(5, dtype=torch.int32), torch.rand(5), torch.rand(5))
    sent.statistics = visible
    first, rest = split(sent)
    assert (first.step, first.lane, first.has_first, first.has_rest) == (7, 3, True, False)
    assert torch.equal(first.tables[0].ids, sent.tables[0].ids)
    assert torch.equal(first.tables[0].first_rows, sent.tables[0].first_rows)
    assert torch.equal(rest.tables[0].rest_rows, sent.tables[0].rest_rows)
    assert rest.statistics is not None
    assert all(torch.equal(a, b) for a, b in zip(rest.statistics, visible))
    whole = messages.encode(sent, first=True, rest=True)
    with pytest.raises(RuntimeError, match="words received, its header says"):
        messages.decode(whole[:-1])


def test_rows_published_in_parts_have_the_bits_of_a_whole_step() -> None:
    rng = np.random.default_rng(2)
    whole, parts = make_table(200), make_table(200)
    one, other = Publisher([whole]), Publisher([parts])
    for table in (whole, parts):
        for name in table.names:
            table.adam_state(name)
    for step in range(6):
        contributions = [make_contribution(whole, step, lane, rng) for lane in range(3)]
        staged = StepStaging(step, [0, 1, 2], [whole])
        for message in contributions:
            staged.accept(message)
        one.whole(staged)
        staged = StepStaging(step, [0, 1, 2], [parts])
        for lane, message in zip(staged.lanes, contributions):
            mask = torch.zeros(200, dtype=torch.uint8)
            mask[message.tables[0].ids.long()] = 1
            mask[torch.from_numpy(rng.integers(0, 200, 20))] = 1  # candidates exceed the active rows
            lane.candidates = [mask]
        staged.track()
        arrivals = [m for message in contributions for m in split(message)]
        order = [0, 2, 4, 1, 3, 5] if step % 2 else [4, 5, 0, 2, 3, 1]
        for k in order:
            other.some(staged, 0)
            staged.accept(arrivals[k])
        other.some(staged, 0)
        other.finish(staged)
        assert staged.complete and int(parts.versions.min()) == step + 1
    for name in whole.names:
        assert torch.equal(whole.parameters[name], parts.parameters[name])
        for key, value in whole.adam_state(name).items():
            assert torch.equal(value, parts.adam_state(name)[key]), (name, key)
    assert one.applied_rows == other.applied_rows
    assert float(parts.gradient("means").abs().max()) == 0


def test_raw_is_found_and_ends_with_the_contribution() -> None:
    table, rng = make_table(100), np.random.default_rng(3)
    staged = StepStaging(0, [0, 1], [table])
    mine, theirs = make_contribution(table, 0, 0, rng), make_contribution(table, 0, 1, rng)
    staged.accept(mine)
    mask = torch.zeros(100, dtype=torch.uint8)
    mask[theirs.tables[0].ids.long()] = 1
    staged.lanes[1].candidates = [mask]
    staged.track()
    publisher = Publisher([table])
    for name in table.names:
        table.adam_state(name)
    ids = torch.arange(100, dtype=torch.int32)
    gate = Gate(1, 5, [ids], [table], lambda: [staged], lambda s: None, 2)
    decision = QualityPolicy().decide(gate)
    assert decision.hazard == RAW and decision.rows == theirs.tables[0].ids.shape[0]
    assert [(a.step, a.lane) for a in decision.awaited] == [(0, 1)]
    publisher.some(staged, 0)
    with pytest.raises(HazardError, match="RAW"):
        hazards.check_read(table, ids, 1)
    first, rest = split(theirs)
    staged.accept(first)
    assert QualityPolicy().decide(gate).rows == theirs.deferred
    staged.accept(rest)
    assert QualityPolicy().decide(gate).open
    publisher.some(staged, 0)
    hazards.check_read(table, ids, 1)


def test_waw_is_refused() -> None:
    table, rng = make_table(100), np.random.default_rng(4)
    staged = StepStaging(0, [0], [table])
    message = make_contribution(table, 0, 0, rng)
    table.versions[int(message.tables[0].ids[0])] = 1
    with pytest.raises(HazardError, match="WAW: step 0 lane 0 contributes to 1 rows"):
        staged.accept(message)
    with pytest.raises(HazardError, match="WAW"):
        hazards.check_publication(table, 0)
    staged.started = True
    with pytest.raises(HazardError, match="candidates of step 0 were asked for after"):
        staged.track()


def test_active_rows_outside_the_candidates_are_refused() -> None:
    table, rng = make_table(100), np.random.default_rng(5)
    staged = StepStaging(0, [0], [table])
    staged.lanes[0].candidates = [torch.zeros(100, dtype=torch.uint8)]
    staged.track()
    with pytest.raises(HazardError, match="were not candidates"):
        staged.accept(make_contribution(table, 0, 0, rng))


def test_a_shadow_keeps_its_values_while_rows_are_published() -> None:
    table = make_table(100)
    pool = ShadowPool(table)
    ids = torch.tensor([3, 7, 50], dtype=torch.int32)
    shadow = pool.take(ids, 0)
    before = shadow.leaves["means"].detach().clone()
    assert before.shape == (64, 3) and float(before[3:].min()) == 9.0
    assert torch.equal(before[:3], table.parameters["means"][ids.long()])
    staged = StepStaging(0, [0], [table])
    staged.accept(make_contribution(table, 0, 0, np.random.default_rng(6)))
    Publisher([table]).whole(staged)
    assert torch.equal(shadow.leaves["means"], before)
    hazards.check_shadow(table, shadow.leaves)
    with pytest.raises(HazardError, match="WAR"):
        hazards.check_shadow(table, {"means": table.parameters["means"].detach()[:5]})


def test_a_shadow_ends_before_inactive_columns() -> None:
    """Two of four bands are active at every step: the leaf has these, its gradient is packed as that of a full one."""
    table = make_table(100)
    ids = torch.arange(0, 70, 2, dtype=torch.int32)
    full, cut = (ShadowPool(table).take(ids, 0, step) for step in (None, 5))
    assert full.leaves["sh"].shape == (64, 4, 3) and cut.leaves["sh"].shape == (64, 2, 3)
    assert torch.equal(full.leaves["sh"][:, :2], cut.leaves["sh"]) and torch.equal(
        full.leaves["means"], cut.leaves["means"]
    )
    task, sent = Task(5, 0, 0), []
    for shadow in (full, cut):
        weights = torch.arange(64.0)[:, None, None] % 3
        (shadow.leaves["sh"][:, :2] * weights).sum().backward()
        sent.append(collect(task, Shadow(task, {"primitives": shadow}), [table], None, None).tables[0])
    assert torch.equal(sent[0].ids, sent[1].ids) and torch.equal(sent[0].first_rows, sent[1].first_rows)
    assert sent[0].ids.shape[0] == 23 and sent[0].first_rows.shape == (23, 9)
    table.active_columns = lambda step: {"sh": 0}
    none = ShadowPool(table).take(ids, 0, 5)
    none.leaves["means"].sum().backward()
    assert none.leaves["sh"].shape == (64, 0, 3)
    assert collect(task, Shadow(task, {"primitives": none}), [table], None, None).tables[0].first_rows.shape == (35, 3)


def test_an_empty_shadow_has_padding_only() -> None:
    shadow = ShadowPool(make_table(10)).take(torch.zeros(0, dtype=torch.int32), 0)
    assert shadow.count == 0 and shadow.leaves["sh"].shape == (64, 4, 3)


def test_gradients_that_are_not_finite_are_refused_with_view_and_rows() -> None:
    table = make_table(100)
    mine = ShadowPool(table).take(torch.tensor([3, 7, 50], dtype=torch.int32), 12)
    mine.leaves["means"].grad = torch.zeros(64, 3)
    mine.leaves["means"].grad[1, 2] = float("nan")
    task = Task(4, 0, 12)
    with pytest.raises(NonFiniteGradient, match=r"step 4: view 12 .* 1 rows of table primitives \(rows 7; means\)"):
        collect(task, Shadow(task, {"primitives": mine}), [table], None, None)


def test_gradients_in_inactive_columns_are_noticed_in_debug_mode() -> None:
    table = make_table(100)
    mine = ShadowPool(table).take(torch.tensor([3], dtype=torch.int32), 0)
    mine.leaves["sh"].grad = torch.ones(64, 4, 3)
    task = Task(0, 0, 0)
    with pytest.raises(ValueError, match="sh has a gradient in columns declared inactive at step 0"):
        collect(task, Shadow(task, {"primitives": mine}), [table], None, None, debug=True)


def test_statistics_equal_the_stock_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    strategy = DefaultStrategy(refine_scale2d_stop_iter=100, absgrad=False)
    stock, ours = strategy.initialize_state(1.0), strategy.initialize_state(1.0)
    keeper = DensificationStatistics(ours)
    parameters = {"means": torch.nn.Parameter(torch.zeros(90, 3))}
    for _ in range(5):
        radii = torch.from_numpy(rng.integers(-3, 9, (1, 90)).astype(np.int32)).clamp(min=0)
        means2d = torch.zeros(1, 90, 2, requires_grad=True)
        means2d.grad = torch.from_numpy(rng.standard_normal((1, 90, 2)).astype(np.float32))
        info = {"radii": radii, "means2d": means2d, "width": 333, "height": 217, "n_cameras": 3, "gaussian_ids": None}
        strategy._update_state(parameters, stock, info, packed=False)  # type: ignore[arg-type]
        visible, norms, shares = keeper.collect(info, 90)
        keeper.apply(90, visible.int(), norms, shares)
    for key in ("grad2d", "count", "radii"):
        assert torch.equal(stock[key], ours[key]), key
    with pytest.raises(RuntimeError, match="padding row was visible"):
        keeper.collect({"radii": torch.ones(1, 90), "means2d": torch.zeros(1, 90, 2)}, 80)


def test_row_operations_have_equal_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch operations used on other devices mean what the kernels mean."""
    rng = np.random.default_rng(8)
    n = 60
    ids = torch.from_numpy(np.sort(rng.permutation(n)[:25]).astype(np.int32))
    mask = torch.from_numpy(rng.integers(0, 2, n).astype(np.uint8))
    versions = torch.from_numpy(rng.integers(3, 6, n).astype(np.int32))
    pending = torch.from_numpy(rng.integers(0, 2, n).astype(np.uint8))
    source = torch.from_numpy(rng.standard_normal((n, 2, 3)).astype(np.float32))
    source[4] = 0
    source[9, 1, 2] = float("inf")
    other = torch.from_numpy(rng.standard_normal((n, 1)).astype(np.float32))
    other[4] = 0
    values = torch.from_numpy(rng.standard_normal((25, 9)).astype(np.float32))

    def fresh(call: Callable[[Tensor], object], start: Tensor) -> Tensor:
        copy = start.clone()
        call(copy)
        return copy

    def results() -> list[Tensor]:
        packed = rows.pack_active([source, None, other], [4, 2, 1], ids, mask)
        everything = rows.pack_active([source, other], [6, 1], torch.arange(n, dtype=torch.int32), None)
        front = packed[1]
        counts = [front, rows.count_older(versions, ids, 4), rows.count_newer(versions, ids, 4)]
        counts += [rows.count_outside(mask, ids), rows.count_inside(mask, ids), rows.any_beyond(source, 5, n)]
        return [
            rows.ids_of_mask(mask),
            fresh(lambda out: rows.gather(source, ids, out), torch.zeros(32, 2, 3)),
            packed[0], packed[2], everything[0], everything[2], torch.tensor(counts),
            torch.tensor([packed[3], everything[3], everything[1] == n - 1]),
            fresh(lambda t: rows.scatter_add(t, ids, values, 2, 5, None), source),
            fresh(lambda t: rows.scatter_add(t, ids, values, 2, 5, mask), source),
            fresh(lambda t: rows.clear(t, ids, 4, None), source),
            fresh(lambda t: rows.clear(t, ids, 4, mask), source),
            fresh(lambda out: rows.publishable(versions, 4, pending, out), torch.zeros(n, dtype=torch.uint8)),
            fresh(lambda v: rows.fill_at(v, ids, 9), versions),
            rows.blocked(versions, ids, 4, pending),
            fresh(lambda p: rows.add_counts(p, ids, 1), pending),
            fresh(lambda p: rows.add_counts(p, ids, -1), torch.ones(n, dtype=torch.uint8)),
        ]  # fmt: skip

    with_kernels = results()
    ids_in_front, ids_behind = with_kernels[2][: int(with_kernels[6][0])], with_kernels[2][int(with_kernels[6][0]) :]
    assert bool(mask[ids_in_front.long()].all()) and not bool(mask[ids_behind.long()].any())
    assert with_kernels[7].tolist() == [False, True, True] and 4 not in with_kernels[4].tolist()
    monkeypatch.setattr(rows, "on_cpu", lambda tensor: False)
    for k, (a, b) in enumerate(zip(with_kernels, results())):
        assert a.dtype == b.dtype and torch.equal(a, b), k


def test_every_per_row_array_follows_a_structural_step() -> None:
    table = make_table(10)
    table.arrays.add("evidence", torch.arange(10), None)
    table.gradient("means")
    parents = torch.tensor([0, 0, 3, 9, 9, 9, 2])
    for name in list(table.parameters):
        table.parameters[name] = torch.nn.Parameter(table.parameters[name].detach()[parents])
    table.resize(parents, 5)
    assert table.versions.tolist() == [5] * 7
    assert table.arrays["evidence"].tolist() == parents.tolist()
    assert all(table.arrays[name].shape[0] == 7 for name in table.arrays.names())
    with pytest.raises(RuntimeError, match="7 rows but 8 parents"):
        table.resize(torch.zeros(8, dtype=torch.long), 5)


class OneTask:
    views_per_step = 1
    steps = 3

    def view(self, step: int, lane: int) -> int:
        return 0

    def rank(self, step: int, lane: int) -> int:
        return 0


def test_hooks_out_of_order_are_refused() -> None:
    engine = Engine(OneTask(), [make_table(10)], options=EngineOptions(debug=True))
    task = engine.tasks(0)[0]
    with pytest.raises(ValueError, match="was not acquired"):
        engine.contribute(task, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tasks are missing"):
        engine.publish(0)
    with pytest.raises(ValueError, match="this rank works on step 0"):
        engine.acquire(Task(1, 0, 0))
    shadow = engine.acquire(task)
    with pytest.raises(ValueError, match="is not published"):
        engine.drain()
    engine.contribute(task, shadow)
    engine.publish(0)
    engine.drain()
    assert engine.low == engine.current == 1
    with pytest.raises(ValueError, match="not structural"):
        engine.structural(0, lambda: None, {})


def test_an_optimizer_of_something_else_is_refused() -> None:
    table = make_table(5)
    with pytest.raises(ValueError, match="the optimizer of 'means' must hold exactly the parameter of that name"):
        RowTable("x", dict(table.parameters), {"means": table.optimizers["sh"]}, Everything(), table.schedule)
