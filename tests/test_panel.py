"""The tab "Odin": what it says, and what is counted for it; in a browser with what test_viewer.py leaves out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser, wait_until
from test_viewer import CHROMIUM, PATIENCE, Command, open_viewer, picture, shows_a_scene
from training import sample_scene

from odin_nerfstudio.glue import panel_text
from odin_nerfstudio.glue.panel_text import Position, Rates
from odin_nerfstudio.runtime.row_watch import CONFLICTS, KINDS, LAG, WRITER, RowWatch
from odin_nerfstudio.runtime.sharded.watch import SPAN, OwnerWatch
from odin_nerfstudio.runtime.status import RankStatus, StatusBoard
from odin_nerfstudio.runtime.store import RowTable, ViewRow
from odin_nerfstudio.runtime.telemetry import Telemetry
from odin_nerfstudio.runtime.transport import Kind, Received, bytes_message


def table_of(count: int) -> RowTable:
    parameter = torch.nn.Parameter(torch.zeros(count, 3))
    adam = torch.optim.Adam([parameter])
    return RowTable("gaussians", {"means": parameter}, {"means": adam}, ViewRow(), lambda _: {"means": 0.1})


def test_rows_are_counted_on_request_and_follow_surgery() -> None:
    table = table_of(4)
    watch = RowWatch(table)
    watch.begin()
    assert watch.values(CONFLICTS) is None and CONFLICTS not in table.arrays  # nobody asked
    watch.wanted = True
    watch.begin()
    table.versions.copy_(torch.tensor([5, 4, 5, 3]))
    ids = torch.tensor([0, 1, 2], dtype=torch.int32)
    refused = watch.behind(ids, 5)
    assert refused.tolist() == [False, True, False]
    table.versions[1] = 5  # it came in while the task waited
    watch.read(ids, 5, refused)
    watch.wrote(torch.tensor([1, 3], dtype=torch.int32), 1)
    assert watch.values(CONFLICTS).tolist() == pytest.approx([0, 0.1, 0, 0])  # type: ignore[union-attr]
    assert watch.values(LAG).tolist() == pytest.approx([0, 0, 0, 0.4])  # type: ignore[union-attr]
    table.arrays.resize(torch.tensor([1, 1, 3]), {"versions": 6})
    assert watch.values(WRITER).tolist() == [1, 1, 1]  # type: ignore[union-attr]
    assert watch.values(CONFLICTS).tolist() == pytest.approx([0.1, 0.1, 0])  # type: ignore[union-attr]
    watch.wanted = False
    watch.begin()
    assert not {CONFLICTS, LAG, WRITER} & set(table.arrays.names())


def test_owners_count_while_they_are_asked() -> None:
    table = table_of(4)
    watch, ids = OwnerWatch(table), torch.tensor([0, 1, 2], dtype=torch.int32)
    watch.step(5)
    watch.refused(5, 0, ids)  # costs nothing while nobody has asked
    assert not watch.active and watch.values(CONFLICTS, 5) is None  # that was the first question
    watch.step(6)
    table.versions.copy_(torch.tensor([6, 5, 6, 4]))
    watch.refused(6, 1, ids)
    table.versions[1] = 6
    watch.refused(6, 1, ids)  # still closed, for another reason
    watch.projected(6, 1, ids)
    watch.returned(ids[1:], 3)
    values = {kind: watch.values(kind, 6) for kind in KINDS}
    assert values[CONFLICTS].tolist() == pytest.approx([0, 0.1, 0, 0])  # type: ignore[union-attr]
    assert values[LAG].tolist() == pytest.approx([0, 0, 0, 0.4])  # type: ignore[union-attr]
    assert values[WRITER].tolist() == [-1, 3, 3, -1]  # type: ignore[union-attr]
    watch.restart()
    assert not watch.active and CONFLICTS not in table.arrays  # other rows
    watch.step(7)
    assert watch.active
    watch.step(6 + SPAN)
    assert watch.active
    watch.step(7 + SPAN)
    assert not watch.active


def boards() -> tuple[list[StatusBoard], list[Telemetry]]:
    """Two boards that hear each other at once."""
    telemetries = [Telemetry(rank) for rank in range(2)]
    both: list[StatusBoard] = []

    def sender(rank: int) -> Any:
        def send(peers: Any, data: bytes) -> None:
            for peer in peers:
                both[peer].take(Received(rank, Kind.STATUS, bytes_message(data), 0.0))

        return send

    both += [StatusBoard(telemetries[r], [1 - r], sender(r), lambda step, lane: lane % 2) for r in range(2)]
    return both, telemetries


def test_rank_0_learns_what_the_others_do() -> None:
    (board, _), telemetries = boards()
    telemetries[1].enter("waiting", 7, "raw", ((6, 0), (6, 2)))
    telemetries[1].totals["tasks"] = 12.0
    assert list(board.statuses()) == [0]  # nobody has asked
    board.ask()
    status = board.statuses()[1]
    assert (status.step, status.what, status.totals["tasks"]) == (7, "waiting", 12.0)
    assert panel_text.doing_of(status) == "waiting for rank 0, step 6 (raw)"
    assert board.estimate() is None
    board.ask(with_timeline=True)
    assert board.estimate() is None  # nothing has been done yet


def test_text_of_the_tab() -> None:
    old = RankStatus(1, 40, "computing", clock=10.0, totals={"tasks": 30, "compute": 5.0, "wait": 1.0})
    new = RankStatus(1, 44, "paused", clock=12.0, totals={"tasks": 34, "compute": 6.0, "wait": 1.5, "conflicts": 3})
    rates = Rates.between(old, new)
    assert rates is not None and rates == Rates(0.5, 0.25, 2.0, 1.5, 0.0)
    assert Rates.between(new, new) is None
    table = panel_text.rank_table({1: new}, {1: rates})
    assert "rank 1" in table and "paused" in table and "50 % computing, 25 % waiting" in table
    assert "conflicts per second" in panel_text.figures([rates], None, "quality", 2)
    assert "hidden" not in panel_text.figures([rates], None, "quality", 2, estimates=False)
    assert "conflicts" not in panel_text.figures([rates], None, "quality", 1)  # one rank has none to conflict with
    head = panel_text.header(Position("quality", 7, 100, 1, 14, 57, 2, "rlg"))
    assert "epoch 1, view 14 of 57" in head and "step 7 of 100" in head and "whole steps" not in head
    assert "waits for whole steps" in panel_text.header(Position("quality", 7, 100, 1, 14, 57, 2, "rlg", lingers=True))
    for text in (table, head, panel_text.legend(2)):  # viser takes it for MDX: one line, balanced braces
        assert "\n" not in text and text.count("{") == text.count("}") == text.count("{{") * 2


def small_training(scene: Path, folder: Path, method: str, *arguments: object) -> Command:
    """A job of two ranks with a viewer."""
    folder.mkdir()
    return Command(
        "train",
        folder / "log",
        *(method, "--data", scene, "--output-dir", folder, "--timestamp", "run", "--vis", "viewer"),
        *("--machine.device-type", "cpu", "--machine.num-devices", 2, "--logging.steps-per-log", 1),
        *("--logging.local-writer.max-log-size", 0, "--pipeline.model.num-downscales", 0),
        *("--pipeline.model.warmup-length", 100_000, *arguments),
    )


def ranks_in(text: str) -> list[str]:
    """What the tab says that each rank is doing."""
    return re.findall(r"rank \d\s+step \d+\s+(computing|updating|waiting|paused|finished)", text)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (or set CHROMIUM to its path)")
@pytest.mark.timeout(900)
def test_other_methods_modes_and_placements_in_a_browser(tmp_path: Path) -> None:
    """2DGS in mode throughput, whose primitives are coloured; and sharded primitives, looked at after the end."""
    assert CHROMIUM is not None
    scene = sample_scene(tmp_path, "city", views=12, size="64x48", points=400)
    late = ("--pipeline.odin.mode", "throughput", "--pipeline.odin.max-overlap", 1e9, "--pipeline.odin.max-impact", 1e9)
    late = (*late, "--pipeline.odin.linger", "False")
    surfels = small_training(scene, tmp_path / "2dgs", "odin-2dgs", "--max-num-iterations", 100_000, *late)
    spread = ("--max-num-iterations", 60, "--pipeline.odin.placement", "sharded")
    sharded = small_training(scene, tmp_path / "sharded", "odin-splatfacto", *spread)
    with surfels, sharded, Browser(CHROMIUM, 900, 800) as browser:
        surfels.wait(lambda: surfels.step() > 40, "steps beyond the first epoch")
        open_viewer(browser, surfels.url)
        browser.click("Odin", PATIENCE)
        surfels.wait(lambda: len(ranks_in(browser.text())) == 2, "both ranks in the tab")
        assert "throughput, rlg order" in browser.text()
        rate = r"delayed reads per second\s+(?!0\.00)\d+\.\d"
        surfels.wait(lambda: re.search(rate, browser.text()), "delayed reads")
        browser.click("Control")
        wait_until(lambda: shows_a_scene(picture(browser)), PATIENCE, "a frame of the scene")
        for shown, output in (("rgb", "odin_conflicts"), ("odin_conflicts", "odin_writer")):
            frame = picture(browser).astype(int)
            browser.choose(shown, output)
            surfels.wait(lambda: np.abs(picture(browser) - frame).mean() > 3, output)  # noqa: B023
        assert surfels.interrupt(120) == 0

        sharded.wait(lambda: "ctrl+c to quit" in sharded.output(), "the end of the training")
        open_viewer(browser, sharded.url)
        wait_until(lambda: shows_a_scene(picture(browser)), PATIENCE, "a frame after the end")
        browser.click("Odin", PATIENCE)
        assert ranks_in(browser.text()) == ["finished"] * 2
        assert [line for line in browser.console if line.startswith("exception")] == []
        assert sharded.interrupt(120) == 0
        assert "Stopping" not in sharded.output()  # there was nothing left to save
