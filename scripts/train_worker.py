"""One rank of scripts/bench_modes.py: trains a scene in one mode and evaluates it. Not for direct use."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sync_worker import add_skew, base_config, start_rank

from odin_nerfstudio.glue.odin_trainer import OdinTrainer


def main() -> None:
    """Reads a job, trains, and writes this rank's figures; those of rank 0 have the metrics of the held-out views."""
    job = json.loads(Path(sys.argv[1]).read_text())
    place = start_rank()
    config = base_config(job)
    config.max_num_iterations = job["views"]
    config.machine.seed = job["seed"]
    for name, value in job["odin"].items():
        setattr(config.pipeline.odin, name, value)
    config.set_timestamp()
    trainer = OdinTrainer(config, place.local_rank, place.ranks)
    trainer.setup()
    if job["skew_ms"]:
        add_skew(trainer, job["skew_ms"])
    start = time.monotonic()
    trainer.train()
    figures: dict[str, float] = {"seconds": time.monotonic() - start, **trainer.runner.engine.telemetry.summary()}
    if place.rank == 0:
        pipeline = trainer.pipeline
        metrics = pipeline.get_average_eval_image_metrics(step=config.max_num_iterations - 1)
        figures |= {name: metrics[name] for name in ("psnr", "ssim", "lpips") if name in metrics}
        figures["gaussians"] = pipeline.splats.num_points
    Path(f"{job['result']}.{place.rank}").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
