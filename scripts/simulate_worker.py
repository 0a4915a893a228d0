"""One rank of scripts/bench_simulate.py: a recorded calibration, then alternating modes. Not for direct use."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from predicted import STEP_FIELDS
from sync_worker import add_skew, config_for, start_rank

from odin_nerfstudio.glue.odin_trainer import OdinTrainer
from odin_nerfstudio.glue.recording import finish_recording
from odin_nerfstudio.runtime.policies import make_policy
from odin_nerfstudio.runtime.recorder import Recorder
from odin_nerfstudio.runtime.telemetry import StepRecord


def stretch(trainer: OdinTrainer, mode: str, policy: Any, first: int, steps: int) -> dict[str, Any]:
    """Trains some steps in a mode, from a drain to a drain; wall time and this rank's telemetry."""
    engine = trainer.runner.engine
    engine.drain()
    engine.use_policy(policy)
    engine.telemetry.reset()
    records: list[list[float]] = []

    def keep(record: StepRecord) -> None:
        records.append([float(getattr(record, name)) for name in STEP_FIELDS])
        if engine.recorder is not None:
            engine.recorder.step(record)

    engine.on_step(keep)
    whole, passes = engine.publisher.whole_steps, engine.publisher.partial_passes
    dist.barrier()
    start = time.monotonic()
    for step in range(first, first + steps):
        trainer._train_step(step)
    engine.drain()
    ended = time.monotonic() - start
    dist.barrier()
    done: dict[str, float] = {
        "whole": engine.publisher.whole_steps - whole,
        "passes": engine.publisher.partial_passes - passes,
    }
    done["reaction"] = engine.telemetry.timeline.reaction
    return {
        **engine.telemetry.summary(), **done, "mode": mode, "first": first, "steps": steps, "seconds": ended,
        "records": records,
    }  # fmt: skip


def main() -> None:
    """Reads a job, runs it, and writes this rank's stretches and, on rank 0, the recording of the calibration."""
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
    first = step = trainer._start_step
    recorder, stretches = Recorder(engine), []
    # Evidence of every view, caches and connections first: an epoch in the last mode, throughput.
    warm = -(-trainer.runner.plan.views // job["lanes"]) + 2
    calibration = [(job["modes"][-1], warm), *((mode, job["steps"]) for mode in policies)]
    for mode, steps in calibration:
        stretches.append({**stretch(trainer, mode, policies[mode], step, steps), "recorded": True})
        step += steps
    stretches[0]["warm"] = True
    pipeline = trainer.pipeline
    finish_recording(recorder, engine, pipeline.datamanager, pipeline.seed, Path(job["result"]).with_name("recorded"))
    engine.recorder = None  # what is predicted does not pay for recording
    for mode in job["modes"] * job["repeats"]:
        stretches.append(stretch(trainer, mode, policies[mode], step, job["steps"]))
        step += job["steps"]
    plan = trainer.runner.plan
    text = {"stretches": stretches, "views": [plan.views_of_step(s).tolist() for s in range(first, step)]}
    Path(f"{job['result']}.{place.rank}").write_text(json.dumps(text))
    engine.close()


if __name__ == "__main__":
    main()
