"""Compiles the runtime's CPU kernels, or loads them from the cache, before ranks start and each does it for itself."""

from __future__ import annotations

import torch

from odin_nerfstudio.runtime import mass, rows
from odin_nerfstudio.runtime.adam import OdinAdam, publish_rows
from odin_nerfstudio.runtime.adam_parts import AdamTarget, GradientPart, LiveColumns, step_parts, steps_parts
from odin_nerfstudio.runtime.candidates import MotionBound, ViewTest, candidate_ids
from odin_nerfstudio.runtime.evidence import EvidenceStore, Shares
from odin_nerfstudio.runtime.noise import PositionNoise

_ROWS = 64


def warm_up() -> None:
    """Calls every kernel once with the types that training uses."""
    ids = torch.arange(4, dtype=torch.int32)
    versions = torch.zeros(_ROWS, dtype=torch.int32)
    mask = torch.ones(_ROWS, dtype=torch.uint8)
    out = torch.empty_like(mask)
    table = torch.zeros(_ROWS, 3)
    packed = torch.zeros(4, 3)

    rows.ids_of_mask(mask)
    rows.gather(table, ids, packed)
    rows.add_statistics(table[:, 0].clone(), table[:, 1].clone(), None, ids, torch.zeros(4), torch.zeros(4))
    rows.any_beyond(packed, 3, 4)
    rows.pack_active([packed, None], [3, 1], ids, mask)
    for where in (mask, None):
        rows.scatter_add(table, ids, packed, 0, 3, where)
        rows.clear(table, ids, 3, where)
    rows.publishable(versions, 0, out.zero_(), mask)
    rows.fill_at(versions, ids, 1)
    rows.count_older(versions, ids, 1)
    rows.count_newer(versions, ids, 1)
    rows.blocked(versions, ids, 1, out)
    rows.add_counts(out, ids, 1)
    rows.count_outside(mask, ids)

    evidence = EvidenceStore()
    evidence.put(0, Shares(*mass.of_rows([(ids, packed)], [(0, 3)], 0.01, 2.0**-13)))
    evidence.resize(torch.cat((ids.long(), ids.long())), 4)
    total, half = torch.zeros(_ROWS), Shares.of(ids, torch.full((4,), 0.25))
    late = torch.zeros_like(mask)
    mass.mark_late(versions, ids, 1, mask, 1, late, torch.empty_like(ids), 0)
    for target in (late, total):
        rows.fill_at(target, ids, 0)
    mass.add(total, half.mass, mask)
    mass.add_unknown(total, ids, mask)
    mass.meets(ids, mask, total)
    for known in (half.mass, None):
        mass.overlap(known, ids, late, total)

    test = ViewTest.of(torch.eye(4), torch.diag(torch.tensor([32.0, 32.0, 1.0])), 32, 32)
    motion = MotionBound.steady(1e-4, 5e-3, (0.9, 0.999), max_lag=2)
    for known in (versions, None):
        candidate_ids(table, table, test, motion, versions=known, step=1)

    primitives = {"means": table, "scales": table - 5, "quats": torch.ones(_ROWS, 4), "opacities": table[:, :1] - 5}
    noise = PositionNoise({k: v.clone() for k, v in primitives.items()}, lambda _: dict.fromkeys(primitives, 0.0), 1, 0)
    for which in (mask, None):
        noise.add(0, which)
    noise.reach(1, versions, 0, motion)

    parameter = torch.nn.Parameter(torch.zeros(_ROWS, 3))
    parameter.grad = torch.ones(_ROWS, 3)
    adam = OdinAdam([parameter], lr=1e-3, eps=1e-15)
    adam.step()
    m, v = (adam.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))
    for gradient, which in ((parameter.grad, mask), (packed, ids), (None, mask)):
        publish_rows(parameter.data, m, v, gradient, which, step=2, lr=1e-3, eps=1e-15)
    if steps_parts(parameter, m, v, betas=(0.9, 0.999)):
        parts = [GradientPart(ids, packed, 0, 3)]
        step_parts([AdamTarget(parameter, m, v, parts, 3, 1e-3, (0.9, 0.999), 1e-15, LiveColumns())], ids)
