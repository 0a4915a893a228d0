"""One rank of bench_viewer.py: trains until it is ended, and notes when each step ends. Not for direct use."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sync_worker import base_config, start_rank

from odin_nerfstudio.glue.odin_trainer import OdinTrainer


def main() -> None:
    """Reads a job and trains."""
    job = json.loads(Path(sys.argv[1]).read_text())
    place = start_rank()
    config = base_config({**job, "downscales": 0, "order": "rlg"})
    config.vis = job["vis"]
    config.viewer.websocket_host, config.viewer.websocket_port = "127.0.0.1", job["port"]
    config.max_num_iterations = 10**7
    config.set_timestamp()
    config.save_config()  # makes the folder that the viewer logs into
    trainer = OdinTrainer(config, place.local_rank, place.ranks)
    trainer.setup()
    with Path(job["outputs"], f"times.{place.rank}").open("w", buffering=1) as times:
        train_step = trainer._train_step

        def noted(step: int) -> None:
            train_step(step)
            times.write(f"{time.monotonic()}\n")

        trainer._train_step = noted  # type: ignore[method-assign]
        trainer.train()


if __name__ == "__main__":
    main()
