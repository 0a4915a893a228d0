"""One rank of scripts/bench_sharded.py. Not for direct use."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sync_worker import config_for, start_rank, stretch

from odin_nerfstudio.glue.shard_rows import shard_tree
from odin_nerfstudio.runtime.policies import make_policy
from odin_nerfstudio.runtime.sharded.balance import row_tensors


def memory() -> dict[str, float]:
    """Resident memory of this process that is its own, now and at most. [MB]"""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, value = line.split(":", 1)
        fields[name] = (value.split() or [""])[0]  # some have no value
    return {"own": int(fields["RssAnon"]) / 1e3, "peak": int(fields["VmHWM"]) / 1e3}


def state_bytes(table: Any) -> int:
    """Parameters, moments and statistics of a rank, and what the runtime keeps per row."""
    kept = [table.arrays[name] for name in table.arrays.names()]
    return sum(t.numel() * t.element_size() for t in (*row_tensors(table).values(), *kept))


def seen_by_rank(trainer: Any, ranks: list[int]) -> list[dict[str, float]]:
    """Splats per view, and the share of them that another rank than the view's owns, for numbers of ranks."""
    pipeline, projector, model = trainer.pipeline, trainer.runner.projector, trainer.pipeline.model
    owner, views = trainer.runner.engine.owner, range(trainer.runner.plan.views)
    means, step = model.gauss_params["means"].detach(), trainer._start_step
    every = torch.arange(means.shape[0], dtype=torch.int32)
    seen = {v: owner.snapshot(projector.view(step, v), step, every)[0].long().numpy() for v in views}
    out = []
    for count in ranks:
        pipeline.config.odin.views_per_step = count
        plan = pipeline.prepare_training(0, count)
        part = shard_tree(means, plan, pipeline, count).owner(means.numpy())
        rank_of = {int(v): r for r in range(count) for v in plan.views_of_rank(r)}
        far = sum(int((part[seen[v]] != rank_of[v]).sum()) for v in views)
        owners = [len(np.unique(part[seen[v]])) for v in views]
        total = sum(len(s) for s in seen.values())
        out.append(
            {"ranks": count, "primitives": len(means), "visible": total / len(seen), "far": far / max(1, total),
             "owners": float(np.mean(owners))}
        )  # fmt: skip
    return out


def main() -> None:
    """Reads a job, runs it, and writes this rank's figures."""
    job = json.loads(Path(sys.argv[1]).read_text())
    place = start_rank()
    config = config_for(job)
    config.pipeline.odin.placement = job["placement"]
    config.set_timestamp()
    trainer = config.setup(local_rank=place.local_rank, world_size=place.ranks)
    before = memory()
    first, steps = [0], job["steps"]
    trainer._is_fence = lambda step: (step + 1 - first[0]) % steps == 0
    trainer.setup()
    first[0] = trainer._start_step
    engine = trainer.runner.engine
    engine.is_structural = lambda step: False
    trainer.runner.model.strategy.acts_at = lambda step: False
    table = engine.store.tables[0]
    result: dict[str, Any] = {"rows": table.count, "state": state_bytes(table), "before": before["own"]}
    if job.get("count"):
        result["seen"] = seen_by_rank(trainer, job["count"])
    else:
        step = trainer._start_step
        result["stretches"] = []
        policies = {mode: make_policy(mode) for mode in job["modes"]}
        for one in range(step, step + steps):  # warms up, as configured
            trainer._train_step(one)
        step += steps
        for mode in job["modes"] * job["repeats"]:
            result["stretches"].append({**stretch(trainer, policies[mode], step, steps), "first": step})
            step += steps
        result["first"] = first[0] + steps
        result["views"] = [trainer.runner.plan.views_of_step(s).tolist() for s in range(result["first"], step)]
    result |= memory()
    Path(f"{job['result']}.{place.rank}").write_text(json.dumps(result))
    engine.close()


if __name__ == "__main__":
    main()
