"""A run as a Chrome/Perfetto trace: a process per rank, with a row for its main thread and one per link and direction.

Arrows lead from where a message leaves to where it arrives. Open the file in https://ui.perfetto.dev or
chrome://tracing. Ranks on one machine share a clock; between machines, rows are as well aligned as the machines'
wall clocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from odin_nerfstudio.runtime.messages import FIRST, FRAME_WORDS, REST
from odin_nerfstudio.runtime.telemetry import Telemetry
from odin_nerfstudio.runtime.transport import Kind, Observer

_SHORTEST = 50e-6
"""Arrivals are drawn at least this long, to be seen. [s]"""


def network_spans(telemetry: Telemetry) -> Observer:
    """Notes every message that carries rows as a span; for `Transport.observer`."""

    def observe(what: str, peer: int, words: Tensor, begin: float, end: float) -> None:
        kind = Kind(int(words[1]))
        if kind not in (Kind.CONTRIBUTION, Kind.SHARE, Kind.SUMS):
            return
        step, lane, parts = words[FRAME_WORDS : FRAME_WORDS + 3].tolist()
        part = {FIRST: "first", REST: "rest"}.get(parts, "whole") if kind == Kind.CONTRIBUTION else kind.name.lower()
        row = f"to rank {peer}" if what == "send" else f"from rank {peer}"
        name = {"first": "rows read next", "rest": "other rows", "whole": "rows"}.get(part, part)
        size = 4 * words.shape[0]
        telemetry.span(name, begin, end, row, bytes=size, peer=peer, step=step, lane_number=lane, part=part)

    return observe


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
        rows = ["main", *sorted({span[1] for span in rank["spans"]} - {"main"}, reverse=True)]
        for tid, row in enumerate(rows):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": row}})
            events.append({"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        for name, row, start, length, args in rank["spans"]:
            wire = row != "main"
            event = {
                "name": f"wait: {args['hazard']}" if name == "wait" else name,
                "cat": "network" if wire else name,
                "ph": "X",
                "pid": pid,
                "tid": rows.index(row),
                "ts": (start - origin) * 1e6,
                "dur": max(length, _SHORTEST if wire else 0.0) * 1e6,
                "args": args,
            }
            events.append(event)
            if wire:
                events.append(_arrow(event, row.startswith("to ")))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _arrow(event: dict[str, Any], leaves: bool) -> dict[str, object]:
    """The end of an arrow between a message's leaving and its arrival."""
    args, rank = event["args"], event["pid"]
    sender, receiver = (rank, args["peer"]) if leaves else (args["peer"], rank)
    name = f"{sender}-{receiver}-{args['step']}-{args['lane_number']}-{args['part']}"
    common = {"name": "message", "cat": "network", "id": name, "pid": rank, "tid": event["tid"], "ts": event["ts"]}
    return {**common, "ph": "s"} if leaves else {**common, "ph": "f", "bp": "e"}


def summary_table(totals: Sequence[dict[str, float]]) -> str:
    """All ranks' totals (`Engine.collect`) as a table of text: where each rank's time went, and its traffic."""
    header = ("rank", "tasks", "elapsed", "compute", "acquire", "contribute", "publish", "wait", "MB sent")
    lines = ["".join(f"{h:>11}" for h in header)]
    for t in totals:
        whole = max(t["elapsed"], 1e-9)
        shares = [
            f"{100 * t.get(k, 0.0) / whole:.1f} %" for k in ("compute", "acquire", "contribute", "publish", "wait")
        ]
        cells = [f"{t['rank']:.0f}", f"{t.get('tasks', 0):.0f}", f"{whole:.1f} s", *shares]
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
