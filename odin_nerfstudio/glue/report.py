"""What the runtime measured: scalars while training, one table and perhaps a trace at the end."""

from __future__ import annotations

from pathlib import Path

from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.runtime.engine import Engine
from odin_nerfstudio.runtime.telemetry import StepRecord
from odin_nerfstudio.runtime.trace import pack_spans, summary_table, write_chrome_trace


class StepScalars:
    """Averages the records of published steps into TensorBoard (or W&B) scalars of this rank, which is rank 0's."""

    def __init__(self, every: int) -> None:
        """every: published steps between two entries."""
        self._every = max(1, every)
        self._records: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> None:
        """Takes the record of a step that has been published entirely."""
        self._records.append(record)
        if len(self._records) < self._every:
            return
        count = len(self._records)
        waits: dict[str, float] = {"total": sum(r.waited for r in self._records)}
        for one in self._records:
            for (hazard, peer), seconds in one.wait.items():
                key = f"{hazard} rank {peer}"
                waits[key] = waits.get(key, 0.0) + seconds
        times = {
            name: sum(getattr(r, name) for r in self._records)
            for name in ("acquire", "compute", "contribute", "publish")
        }
        traffic = {name: sum(getattr(r, name) for r in self._records) / count for name in ("sent", "received")}
        for group, values, scale in (("Odin wait ms", waits, 1e3), ("Odin ms", times, 1e3)):
            writer.put_dict(group, {k: scale * v / count for k, v in values.items()}, step=record.step)
        writer.put_dict("Odin bytes per step", traffic, step=record.step)
        self._records.clear()


def report(engine: Engine, trace: Path | None) -> None:
    """Collects what all ranks measured; rank 0 prints it. Collective: every rank calls it, after a drain."""
    totals = engine.collect()
    parts = engine.gather(pack_spans(engine.telemetry)) if trace is not None else None
    if totals is not None and len(totals) > 1:
        CONSOLE.print("Where the ranks' time went")
        CONSOLE.print(summary_table(totals), highlight=False, soft_wrap=True)
    if trace is not None and parts is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(trace, parts)
        CONSOLE.log(f"Trace: {trace} (open it at https://ui.perfetto.dev)", markup=False)
