"""How much ranks would send for a scene, against a dense all-reduce, and how tight candidate sets are on it.

    python scripts/bench_traffic.py FOLDER [FOLDER ...] [--ranks 2 3 4] [--steps 600] [--json FILE]

One process renders all lanes of a step, one for each rank, and every contribution is counted as the message that it
would be: active rows, ids, statistics and headers, to each of the other ranks, over the last hundred steps. A dense
all-reduce moves 2 (R - 1) / R times 4 bytes of every column of every primitive. Sums at row owners, which the ranks
switch to where these save bytes, are not counted. Candidate sets are compared with the rows that gsplat's test makes
visible, over all training views at the last step, for state that lags by 0, 1 and 2 steps.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from bench_quality import REPOSITORY, make_trainer, put_between_marks

MARK = "bench_traffic"
COUNTED = 100
"""Steps over which bytes are averaged, the last ones."""
LAGS = (0, 1, 2)


@dataclass
class Options:
    """What to train and where to write."""

    folders: Annotated[list[Path], tyro.conf.Positional]
    """Captures."""
    ranks: list[int] = field(default_factory=lambda: [2, 3, 4])
    """Numbers of ranks; each is a run."""
    method: str = "odin-splatfacto"
    """Method."""
    steps: int = 600
    """Steps of a run."""
    seed: int = 42
    json: Path | None = None
    """Write all figures here."""
    docs: Path | None = REPOSITORY / "docs" / "results.md"
    """Put the table between the marks of this file."""


def measure(folder: Path, ranks: int, steps: int, seed: int, method: str) -> dict[str, Any]:
    """One run in this process."""
    from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation

    from odin_nerfstudio.runtime import messages

    outputs = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the writer may still write
    trainer = make_trainer(folder, steps, seed, Path(outputs.name), ranks, method)
    steps = trainer.config.max_num_iterations  # fewer steps of more views (--pipeline.odin.scale-schedule)
    engine = trainer.runner.engine
    exchange, table = engine._exchange, engine.tables[0]
    sent, active, result, counted_steps = 0, 0, {}, min(COUNTED, steps)
    contribute = exchange.contribute

    def counted(message: Any, *rest: Any) -> Any:
        nonlocal sent, active
        if message.step >= steps - counted_steps:
            sent += 4 * messages.encode(message, first=True, rest=True).shape[0]
            active += message.tables[0].ids.shape[0]
        return contribute(message, *rest)

    def finish(step: int) -> None:
        if step + 1 == steps:
            columns = sum(table.width(name) for name in table.names)
            dense = 2 * (ranks - 1) / ranks * table.count * 4 * columns
            per_rank = sent / counted_steps / ranks * (ranks - 1)
            result.update(
                {"scene": folder.name, "method": method, "ranks": ranks, "steps": steps, "primitives": table.count}
                | {"active_share": active / counted_steps / ranks / table.count, "sent_bytes": per_rank}
                | {"dense_bytes": dense, "ratio": per_rank / dense}
                | tightness(trainer, step + 1)
            )

    exchange.contribute = counted
    trainer.callbacks.append(TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], finish))
    trainer.train()
    outputs.cleanup()
    return result


@torch.no_grad()
def tightness(trainer: Any, step: int) -> dict[str, float]:
    """Candidates above the visible rows over all training views, as a share of these, by lag; visible rows missed."""
    model, table = trainer.pipeline.splats, trainer.runner.engine.tables[0]
    versions, mask = torch.full((table.count,), step, dtype=torch.int32), torch.zeros(table.count, dtype=torch.uint8)
    seen, missed, marked = 0, 0, dict.fromkeys(LAGS, 0)
    model.eval()
    for view in range(len(trainer.pipeline.datamanager.train_dataset.cameras)):
        camera, _ = trainer.pipeline.datamanager.train_view(view)
        camera.metadata = {**(camera.metadata or {}), "cam_idx": view}
        model.get_outputs(camera)
        visible = model.info["radii"].reshape(-1) > 0
        seen += int(visible.sum())
        for lag in LAGS:
            marked[lag] += table.reads.mark(step, view, versions, lag, mask)
            missed += int((visible & (mask == 0)).sum())
    return {f"excess_lag_{lag}": count / seen - 1 for lag, count in marked.items()} | {"missed": missed}


def table_of(rows: list[dict[str, Any]], command: str) -> str:
    """The results as Markdown."""
    lines = [
        f"`{command}`", "",
        "| scene | ranks | primitives | active rows per view | MB sent per rank and step | dense all-reduce, MB | ratio"
        " | candidates above visible, lag 0 / 1 / 2 |",
        "| --- " * 8 + "|",
    ]  # fmt: skip
    for row in rows:
        excess = " / ".join(f"{row[f'excess_lag_{lag}']:.1%}" for lag in LAGS)
        lines.append(
            f"| {row['scene']} | {row['ranks']} | {row['primitives']:,} | {row['active_share']:.0%}"
            f" | {row['sent_bytes'] / 1e6:.2f} | {row['dense_bytes'] / 1e6:.2f} | {row['ratio']:.2f} | {excess} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs everything."""
    options = tyro.cli(Options, description=__doc__)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for folder in options.folders:
            for ranks in options.ranks:
                rows.append(
                    processes.submit(measure, folder, ranks, options.steps, options.seed, options.method).result()
                )
                print(json.dumps(rows[-1]), flush=True)
    names, ranks = " ".join(f.name for f in options.folders), " ".join(map(str, options.ranks))
    method = "" if options.method == "odin-splatfacto" else f" --method {options.method}"
    text = table_of(rows, f"python scripts/bench_traffic.py {names} --ranks {ranks} --steps {options.steps}{method}")
    print(text)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.docs:
        put_between_marks(options.docs, text, MARK)


if __name__ == "__main__":
    main()
