"""One rank of scripts/bench_sync.py: alternates modes in one run and measures each stretch. Not for direct use."""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nerfstudio.configs.method_configs import all_methods
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig

from odin_nerfstudio.glue.launch import Place, divide_threads, join_group
from odin_nerfstudio.glue.odin_trainer import OdinTrainer
from odin_nerfstudio.runtime.barrier_estimate import estimate, pack_timeline
from odin_nerfstudio.runtime.gate import GatePolicy
from odin_nerfstudio.runtime.keyed import keyed_generator
from odin_nerfstudio.runtime.patience import BLOCK
from odin_nerfstudio.runtime.policies import make_policy
from odin_nerfstudio.runtime.trace import pack_spans, write_chrome_trace


def base_config(job: dict[str, Any]) -> Any:
    """odin-splatfacto, or the job's method, at one resolution, without evaluation and saving."""
    config: Any = copy.deepcopy(all_methods[job.get("method", "odin-splatfacto")])
    scene = Path(job["scene"])
    model = next(p for p in ("sparse/0", "colmap/sparse/0") if (scene / p).is_dir())
    config.pipeline.datamanager.dataparser = ColmapDataParserConfig(
        data=scene, colmap_path=Path(model), downscale_factor=1, load_3D_points=True
    )
    config.pipeline.datamanager.camera_res_scale_factor = job.get("scale", 1.0)
    config.pipeline.model.num_downscales = job["downscales"]
    config.pipeline.model.resolution_schedule = 10**9
    config.pipeline.odin.order = job["order"]
    config.output_dir = Path(job["outputs"])
    config.timestamp = "bench"
    config.vis = "tensorboard"
    config.viewer.quit_on_train_completion = True
    config.steps_per_save = 10**9
    config.steps_per_eval_image = config.steps_per_eval_all_images = config.steps_per_eval_batch = 10**9
    config.logging.steps_per_log = 10**9
    return config


def config_for(job: dict[str, Any]) -> Any:
    """Goes on from a checkpoint for ever, with the schedule of one view per step."""
    config = base_config(job)
    config.pipeline.odin.views_per_step = job["lanes"]
    config.pipeline.odin.scale_schedule = False
    config.pipeline.odin.trace = Path(job["traces"]) if job.get("traces") else None
    config.max_num_iterations = 10**9
    config.load_checkpoint = Path(job["checkpoint"])
    return config


def stretch(
    trainer: OdinTrainer, policy: GatePolicy, first: int, steps: int, trace: Path | None = None
) -> dict[str, Any]:
    """Trains some steps in a mode; wall time and this rank's telemetry. trace: file to write a trace to."""
    engine = trainer.runner.engine
    engine.drain()
    engine.frontier.evidence = None  # modes that need none do not pay for learning it
    engine.use_policy(policy)
    engine.telemetry.reset()
    engine.telemetry.spans.clear()
    if dist.is_initialized():
        dist.barrier()
    start = time.monotonic()
    for step in range(first, first + steps):
        trainer._train_step(step)
    engine.drain()
    if dist.is_initialized():
        dist.barrier()
    seconds = time.monotonic() - start
    summary = {"mode": policy.name, "seconds": seconds, "steps": steps, **engine.telemetry.summary()}
    parts = engine.gather(pack_timeline(engine.telemetry))
    if parts is not None and (found := estimate(parts)) is not None:
        summary["estimated_gain"] = found.gain
    if trace is not None and (spans := engine.gather(pack_spans(engine.telemetry))) is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(trace, spans)
    return summary


def add_skew(trainer: OdinTrainer, mean_ms: float) -> None:
    """Has every task sleep, by an exponential draw that depends on its step and lane only."""
    model = trainer.runner.model
    image_loss = model.image_loss

    def slower(outputs: Any, batch: Any) -> torch.Tensor:
        seed, step, lane = model.task
        draw = torch.empty(1).exponential_(generator=keyed_generator(seed, "skew", step, lane))
        time.sleep(1e-3 * mean_ms * float(draw))
        return image_loss(outputs, batch)

    model.image_loss = slower  # type: ignore[method-assign]


def start_rank() -> Place:
    """Joins the other ranks, with one thread each."""
    place = Place.of_torchrun() or Place(0, 0, 1, 1)
    divide_threads(place.ranks)
    torch.set_num_threads(1)
    if place.ranks > 1:
        join_group(place, "cpu")
    return place


def main() -> None:
    """Reads a job, runs it, and writes this rank's stretches."""
    job = json.loads(Path(sys.argv[1]).read_text())
    place = start_rank()
    config = config_for(job)
    config.set_timestamp()
    trainer = OdinTrainer(config, place.local_rank, place.ranks)
    trainer.setup()
    # Structural steps belong to training, not to a comparison of synchronization.
    trainer.runner.engine.is_structural = lambda step: False
    trainer.runner.model.strategy.acts_at = lambda step: False  # type: ignore[method-assign]
    if job["skew_ms"]:
        add_skew(trainer, job["skew_ms"])
    trainer.runner.engine.frontier.linger(job["linger"])
    policies = {mode: make_policy(mode) for mode in job["modes"]}
    step, results = trainer._start_step, []
    # Before anything is measured, every mode warms up for an epoch: after it the evidence of all views is known.
    # They have compared whole steps with parts, too, and know what is cheaper.
    epoch = max(-(-len(trainer.pipeline.datamanager.train_dataset) // job["lanes"]), 2 * BLOCK + 1)
    for policy in policies.values():
        stretch(trainer, policy, step, epoch)
        step += epoch
    for mode in job["modes"] * job["repeats"]:
        trace = Path(f"{job['traces']}-{mode}.json") if job.get("traces") else None
        results.append(stretch(trainer, policies[mode], step, job["steps"], trace))
        step += job["steps"]
    Path(f"{job['result']}.{place.rank}").write_text(json.dumps(results))
    trainer.runner.engine.close()


if __name__ == "__main__":
    main()
