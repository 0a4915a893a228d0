"""Trace, summary table and comparison of runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from odin_nerfstudio.runtime.messages import FIRST, FRAME_WORDS
from odin_nerfstudio.runtime.telemetry import Telemetry
from odin_nerfstudio.runtime.trace import network_spans, pack_spans, summary_table, write_chrome_trace
from odin_nerfstudio.runtime.transport import Kind


def load_script(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare_runs = load_script("compare_runs")


def save(folder: Path, step: int, means: torch.Tensor) -> None:
    folder.mkdir(exist_ok=True)
    state = {"step": step, "pipeline": {"means": means}, "generators": {"torch": torch.rand(3)}}
    torch.save(state, folder / f"step-{step:09d}.ckpt")


def test_compare_runs_names_step_field_and_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    means = torch.rand(20, 3)
    other = means.clone()
    other[7, 1] += 1e-6
    for step in (10, 20, 30):
        save(tmp_path / "a", step, means)
        save(tmp_path / "b", step, means if step < 20 else other)
    assert compare_runs.main([str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "3 checkpoints" in capsys.readouterr().out
    assert compare_runs.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    text = capsys.readouterr().out
    assert "step-000000020.ckpt" in text and "step-000000030" not in text
    assert "pipeline.means: 1 of 20 rows differ" in text and "first row 7, column 1" in text
    assert compare_runs.main([str(tmp_path / "none"), str(tmp_path / "b")]) == 2


def test_trace_and_summary(tmp_path: Path) -> None:
    parts, totals = [], []
    for rank in range(2):
        telemetry = Telemetry(rank, trace=True)
        telemetry.record(3).tasks = 1
        telemetry.waited(3, "raw", 1 - rank, 100.0, 100.5)
        with telemetry.timed(3, "publish"):
            pass
        record = telemetry.finish(3)
        assert record is not None and record.waited == pytest.approx(0.5)
        parts.append(pack_spans(telemetry))
        totals.append(telemetry.summary())
    write_chrome_trace(tmp_path / "trace.json", parts)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    waits = [e for e in events if e["name"] == "wait: raw"]
    assert [(e["pid"], e["args"]["peer"]) for e in waits] == [(0, 1), (1, 0)]
    assert waits[0]["dur"] == pytest.approx(0.5e6)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert totals[0]["wait"] == pytest.approx(0.5)
    table = summary_table(totals)
    assert len(table.splitlines()) == 4 and "raw of rank 1: 0.5 s" in table


def test_arrows_lead_from_sending_to_arrival(tmp_path: Path) -> None:
    words = torch.zeros(FRAME_WORDS + 8, dtype=torch.int32)
    words[1] = int(Kind.CONTRIBUTION)
    words[FRAME_WORDS : FRAME_WORDS + 3] = torch.tensor([7, 1, FIRST])
    beat = torch.zeros(FRAME_WORDS, dtype=torch.int32)
    beat[1] = int(Kind.HEARTBEAT)
    both = [Telemetry(rank, trace=True) for rank in range(2)]
    network_spans(both[1])("send", 0, words, 10.0, 10.5)
    network_spans(both[1])("send", 0, beat, 10.6, 10.7)
    network_spans(both[0])("receive", 1, words, 10.6, 10.6)
    write_chrome_trace(tmp_path / "trace.json", [pack_spans(telemetry) for telemetry in both])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = {rows[e["pid"], e["tid"]]: e for e in events if e["ph"] == "X"}  # the heartbeat is not there
    assert set(spans) == {"to rank 0", "from rank 1"} and spans["to rank 0"]["dur"] == pytest.approx(0.5e6)
    assert spans["from rank 1"]["args"] == {"bytes": 96, "peer": 1, "step": 7, "lane_number": 1, "part": "first"}
    start, end = [e for e in events if e["ph"] in "sf"]
    start, end = (start, end) if start["ph"] == "s" else (end, start)
    assert start["id"] == end["id"] and (start["pid"], end["pid"]) == (1, 0)
