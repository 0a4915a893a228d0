"""One rank of bench_modes.py or bench_quality.py: trains a scene in one mode and evaluates it. Not for direct use."""

from __future__ import annotations

import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sync_worker import add_skew, base_config, start_rank

from odin_nerfstudio.glue.launch import Place
from odin_nerfstudio.glue.odin_trainer import OdinTrainer
from odin_nerfstudio.runtime.barrier_estimate import pack_timeline


@torch.no_grad()
def save_held_out_view(pipeline: Any, file: Path) -> None:
    """The first held-out image, what the model makes of it, and its normals if it has any, side by side as PNG."""
    camera, data = pipeline.datamanager.fixed_indices_eval_dataloader[0]
    outputs = pipeline.model.eval().get_outputs_for_camera(camera)
    truth = pipeline.model.get_gt_img(data["image"])[..., :3]
    images = [truth, *(outputs[name] for name in ("rgb", "normal", "surface_normal") if name in outputs)]
    pixels = (255 * torch.cat(images, dim=1).clamp(0, 1)).round().byte()
    Image.fromarray(pixels.cpu().numpy()).save(file)


def train(job: dict[str, Any], place: Place) -> dict[str, Any]:
    """One training: this rank's figures; those of rank 0 have the metrics of the held-out views."""
    config = base_config(job)
    config.max_num_iterations = job["views"]
    config.machine.seed = job["seed"]
    for name, value in job["odin"].items():
        setattr(config.pipeline.odin, name, value)
    for name, value in job.get("model", {}).items():
        setattr(config.pipeline.model, name, value)
    if job.get("short"):  # learning rates fall within the run, as in a long one
        config.optimizers["means"]["scheduler"].max_steps = job["views"]
    config.set_timestamp()
    trainer = OdinTrainer(config, place.local_rank, place.ranks)
    trainer.setup()
    points = trainer.pipeline.splats.num_points
    if job["skew_ms"]:
        add_skew(trainer, job["skew_ms"])
    start = time.monotonic()
    trainer.train()
    telemetry = trainer.runner.engine.telemetry
    figures: dict[str, Any] = {"seconds": time.monotonic() - start, **telemetry.summary()}
    figures |= {"points": points, "timeline": base64.b64encode(pack_timeline(telemetry)).decode()}
    if place.rank == 0:
        pipeline = trainer.pipeline
        metrics = pipeline.get_average_eval_image_metrics(step=config.max_num_iterations - 1)
        figures |= {name: metrics[name] for name in ("psnr", "ssim", "lpips") if name in metrics}
        figures["gaussians"] = pipeline.splats.num_points
        if job.get("render"):
            save_held_out_view(pipeline, Path(job["render"]))
    return figures


def main() -> None:
    """Reads a job, trains, and writes this rank's figures; those of each of ``runs``, if the job has several."""
    job = json.loads(Path(sys.argv[1]).read_text())
    place = start_rank()
    figures = [train({**job, **run}, place) for run in job.get("runs", [{}])]
    Path(f"{job['result']}.{place.rank}").write_text(json.dumps(figures if "runs" in job else figures[0]))


if __name__ == "__main__":
    main()
