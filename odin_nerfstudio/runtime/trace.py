"""A run as a Chrome/Perfetto trace: one process per rank, one row for its main thread and one for its network threads.

Open the file in https://ui.perfetto.dev or chrome://tracing. Ranks on one machine share a clock; between machines, rows
are as well aligned as the machines' wall clocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from odin_nerfstudio.runtime.telemetry import Telemetry

_ROWS = {"main": 0, "network": 1}


def pack_spans(telemetry: Telemetry) -> bytes:
    """A rank's spans as bytes, for `Engine.gather`."""
    spans = [[s.name, s.lane, s.start + telemetry.epoch, s.end - s.start, dict(s.args)] for s in telemetry.spans]
    return json.dumps({"rank": telemetry.rank, "spans": spans}).encode()


def write_chrome_trace(path: Path, parts: Sequence[bytes]) -> None:
    """Write all ranks' spans.

    Args:
        path: File to write; its folder must exist.
        parts: What `pack_spans` gave on each rank.
    """
    ranks = [json.loads(part) for part in parts]
    starts = [span[2] for rank in ranks for span in rank["spans"]]
    origin = min(starts, default=0.0)
    events: list[dict[str, object]] = []
    for rank in ranks:
        pid = rank["rank"]
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"rank {pid}"}})
        for name, tid in _ROWS.items():
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
        for name, row, start, length, args in rank["spans"]:
            events.append(
                {
                    "name": f"wait: {args['hazard']}" if name == "wait" else name,
                    "cat": name,
                    "ph": "X",
                    "pid": pid,
                    "tid": _ROWS[row],
                    "ts": (start - origin) * 1e6,
                    "dur": length * 1e6,
                    "args": args,
                }
            )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def summary_table(totals: Sequence[dict[str, float]]) -> str:
    """All ranks' totals (`Engine.collect`) as a table of text: where each rank's time went, and its traffic."""
    header = ("rank", "tasks", "elapsed", "compute", "acquire", "contribute", "publish", "wait", "hidden", "MB sent")
    lines = ["".join(f"{h:>11}" for h in header)]
    for t in totals:
        whole = max(t["elapsed"], 1e-9)
        shares = [
            f"{100 * t.get(k, 0.0) / whole:.1f} %" for k in ("compute", "acquire", "contribute", "publish", "wait")
        ]
        hidden = f"{100 * t.get('hidden', 0.0) / whole:.1f} %"
        cells = [f"{t['rank']:.0f}", f"{t.get('tasks', 0):.0f}", f"{whole:.1f} s", *shares, hidden]
        lines.append("".join(f"{c:>11}" for c in [*cells, f"{t.get('sent', 0.0) / 1e6:.1f}"]))
    waits: dict[str, float] = {}
    for t in totals:
        for key, seconds in t.items():
            if key.startswith("wait."):
                _, hazard, peer = key.split(".")
                label = f"{hazard} of rank {peer}"
                waits[label] = waits.get(label, 0.0) + seconds
    worst = sorted(waits.items(), key=lambda item: -item[1])[:6]
    if worst:
        lines.append("longest waits for " + ", ".join(f"{label}: {seconds:.1f} s" for label, seconds in worst))
    return "\n".join(lines)
