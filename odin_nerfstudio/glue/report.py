"""What the runtime measured: scalars while training, one table, one sentence and perhaps a trace at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.glue.compat import console_columns
from odin_nerfstudio.runtime.barrier_estimate import barrier_sentence, estimate, pack_timeline
from odin_nerfstudio.runtime.engine import Engine
from odin_nerfstudio.runtime.telemetry import StepRecord, now
from odin_nerfstudio.runtime.trace import pack_spans, summary_table, write_chrome_trace

VIEWS, WAIT, HIDDEN, DELAYED = "Views / Sec", "Wait Share", "Hidden Share", "Delayed Reads"
"""Scalars that the console line shows too. Wait: of this rank's time. Hidden: of a barrier's wait, estimated over the
latest steps. Delayed reads: tasks of this rank that read rows late, per task."""
_ESTIMATE_EVERY = 5.0
"""Seconds between two questions to the other ranks, of which the hidden share is estimated."""


class StepScalars:
    """Turns the records of published steps into scalars for TensorBoard, W&B and the console, on rank 0."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records: list[StepRecord] = []
        self._several = engine.transport.world_size > 1
        self._since, self._wait, self._tasks, self._delayed, self._step = now(), 0.0, 0, 0, engine.current
        self._asked, self._hidden = now(), 0.0
        if engine.transport.rank == 0:
            late = [DELAYED] if engine.policy.max_delay else []
            hidden = [HIDDEN] if engine.knows_barrier else []
            console_columns([VIEWS, *([WAIT, *hidden, *late] if self._several else [])])

    def __call__(self, record: StepRecord) -> None:
        """Takes the record of a step that has been published entirely."""
        self._wait += record.waited
        self._tasks += record.tasks
        self._delayed += len(record.delayed)
        self._records.append(record)

    def write(self, step: int) -> None:
        """Writes the figures of the console line, and the details of all steps that were published since the last time;
        when a step is logged. All carry that step, since W&B leaves out what comes with an earlier one."""
        seconds = max(1e-6, now() - self._since)
        views = (self._engine.current - self._step) * self._engine.plan.views_per_step
        writer.put_scalar(VIEWS, views / seconds, step)
        if self._several:
            writer.put_scalar(WAIT, min(1.0, self._wait / seconds), step)
            if self._engine.knows_barrier:
                writer.put_scalar(HIDDEN, self._hidden_share(), step)
            writer.put_scalar(DELAYED, self._delayed / max(1, self._tasks), step)
        self._since, self._wait, self._tasks, self._delayed = now(), 0.0, 0, 0
        self._step = self._engine.current
        if self._records:
            self._write_details(step)

    def _hidden_share(self) -> float:
        """As of the last answers of the other ranks; asks again every few seconds."""
        if now() - self._asked > _ESTIMATE_EVERY:
            found = self._engine.board.estimate()
            if found is not None:
                self._hidden = max(0.0, min(1.0, found.hidden))
            self._engine.board.ask(with_timeline=True)
            self._asked = now()
        return self._hidden

    def _write_details(self, step: int) -> None:
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
        per_step = {
            "sent": sum(r.sent for r in self._records),
            "received": sum(r.received for r in self._records),
        }
        rows = {
            "conflicts": sum(r.conflict_rows for r in self._records),
            "delayed": sum(read.rows for r in self._records for read in r.delayed),
            "deferred": sum(r.deferred_rows for r in self._records),
        }
        for group, values, scale in (("Odin wait ms", waits, 1e3), ("Odin ms", times, 1e3)):
            writer.put_dict(group, {k: scale * v / count for k, v in values.items()}, step=step)
        writer.put_dict("Odin bytes per step", {k: v / count for k, v in per_step.items()}, step=step)
        writer.put_dict("Odin rows per step", {k: v / count for k, v in rows.items()}, step=step)
        self._records.clear()


def waiting_sentence(totals: Sequence[Mapping[str, float]], mode: str) -> str:
    """What waiting cost a run, where nothing says what a barrier would have cost. totals: of each rank."""
    waits = sum(t.get("wait", 0.0) for t in totals) / max(1e-9, sum(t["elapsed"] for t in totals))
    if mode == "barrier":
        return barrier_sentence(waits)
    return (
        f"In {mode} mode {100 * waits:.0f} % of this run was waiting. With sharded primitives what a barrier would have"
        " cost is not estimated: a short run with --pipeline.odin.mode barrier tells."
    )


def report(engine: Engine, trace: Path | None) -> str:
    """Collects what all ranks measured; rank 0 prints it. Collective: every rank calls it, after a drain.

    Returns:
        What Odin brought in this run, in one sentence; empty on other ranks than 0, and where there is nothing to say.
    """
    totals = engine.collect()
    timelines = engine.gather(pack_timeline(engine.telemetry))
    parts = engine.gather(pack_spans(engine.telemetry)) if trace is not None else None
    sentence = ""
    if totals is not None and timelines is not None and len(totals) > 1:
        CONSOLE.print("Where the ranks' time went")
        CONSOLE.print(summary_table(totals), highlight=False, soft_wrap=True)
        found = estimate(timelines) if engine.knows_barrier else None
        if found is not None:
            sentence = found.sentence(engine.policy.name)
        elif not engine.knows_barrier:
            sentence = waiting_sentence(totals, engine.policy.name)
        if sentence:
            CONSOLE.print(sentence, highlight=False, soft_wrap=True)
    if trace is not None and parts is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(trace, parts)
        CONSOLE.log(f"Trace: {trace} (open it at https://ui.perfetto.dev)", markup=False)
    return sentence
