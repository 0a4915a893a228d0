"""One rank of scripts/bench_simulate.py: alternates modes in one recorded run. Not for direct use."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from sync_worker import add_skew, config_for, start_rank

from odin_nerfstudio.glue.odin_trainer import OdinTrainer
from odin_nerfstudio.glue.recording import finish_recording
from odin_nerfstudio.runtime.policies import make_policy
from odin_nerfstudio.runtime.recorder import Recorder


def stretch(trainer: OdinTrainer, mode: str, policy: Any, first: int, steps: int) -> dict[str, Any]:
    """Trains some steps in a mode, from a drain to a drain; wall time and this rank's telemetry."""
    engine = trainer.runner.engine
    engine.drain()
    engine.use_policy(policy)
    engine.telemetry.reset()
    dist.barrier()
    start = time.monotonic()
    for step in range(first, first + steps):
        trainer._train_step(step)
    engine.drain()
    ended = time.monotonic() - start
    dist.barrier()
    return {**engine.telemetry.summary(), "mode": mode, "first": first, "steps": steps, "seconds": ended}


def main() -> None:
    """Reads a job, runs it, and writes this rank's stretches and, on rank 0, the recording."""
    job = json.loads(Path(sys.argv[1]).read_text())
    place = start_rank()
    config = config_for(job)
    config.set_timestamp()
    trainer = OdinTrainer(config, place.local_rank, place.ranks)
    trainer.setup()
    engine, model = trainer.runner.engine, trainer.runner.model
    # Structural steps belong to training, not to a comparison of synchronization.
    engine.is_structural = lambda step: False
    model.acts_at = lambda step: False  # type: ignore[method-assign]
    if job["skew_ms"]:
        add_skew(trainer, job["skew_ms"])
    policies = {mode: make_policy(mode) for mode in dict.fromkeys(job["modes"])}
    step = trainer._start_step
    # Evidence of every view, caches and connections first; none of it is measured.
    warm = -(-trainer.runner.plan.views // job["lanes"]) + 2
    stretch(trainer, "warm", policies[job["modes"][-1]], step, warm)
    step += warm
    recorder, stretches = Recorder(engine), []
    for mode in job["modes"] * job["repeats"]:
        stretches.append(stretch(trainer, mode, policies[mode], step, job["steps"]))
        step += job["steps"]
    plan = trainer.runner.plan
    views = [plan.views_of_step(s).tolist() for s in range(stretches[0]["first"], step)]
    text = {"stretches": stretches, "views": views, "evidence": _evidence(policies)}
    pipeline = trainer.pipeline
    finish_recording(recorder, engine, pipeline.datamanager, pipeline.seed, Path(job["result"]).with_name("recorded"))
    Path(f"{job['result']}.{place.rank}").write_text(json.dumps(text))
    engine.close()


def _evidence(policies: dict[str, Any]) -> int:
    """Views that throughput mode knew at the end."""
    store = getattr(policies.get("throughput"), "evidence", None)
    return len(getattr(store, "_views", {}))


if __name__ == "__main__":
    main()
