"""The tab "Odin" of nerfstudio's viewer: what every rank is doing, live.

A thread of its own rewrites the tab twice a second. While no browser is connected it sleeps until one is: nothing is
asked, sent, counted or drawn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.viewer.viewer import Viewer

from odin_nerfstudio.glue import panel_text
from odin_nerfstudio.glue.compat import viewer_tab
from odin_nerfstudio.glue.panel_outputs import ReplicaColors, RowColors, ShardColors
from odin_nerfstudio.glue.panel_text import Position, Rates
from odin_nerfstudio.glue.splats import OdinSplats
from odin_nerfstudio.runtime.barrier_estimate import BarrierEstimate
from odin_nerfstudio.runtime.row_watch import RowWatch
from odin_nerfstudio.runtime.status import RankStatus

if TYPE_CHECKING:
    from odin_nerfstudio.glue.step_runner import StepRunner

PERIOD = 0.5
"""Seconds between two updates."""
PATIENCE = 2.0
"""Seconds within which the other ranks answer at the end of a run."""
SPAN = 8
"""Updates over which rates are averaged."""
ESTIMATE_EVERY = 6
"""Updates between two estimates of what a barrier would have cost."""


class OdinPanel:
    """The tab and the thread that keeps it; on the rank that has the viewer."""

    def __init__(self, viewer: Viewer, runner: StepRunner, last_step: int) -> None:
        """Adds the tab. last_step: where the run will end."""
        self._viewer, self._runner, self._last_step = viewer, runner, last_step
        self._server = viewer.viser_server
        self._board = runner.engine.board
        self._past: deque[dict[int, RankStatus]] = deque(maxlen=SPAN)
        self._estimate: BarrierEstimate | None = None
        self._turn = 0
        self._last_word = ""
        self._connected, self._ended = threading.Event(), False
        ranks = runner.engine.transport.world_size
        with viewer_tab(viewer, "Odin", "AFFILIATE"):
            gui = self._server.gui
            self._parts = [gui.add_markdown(self._header()), *(gui.add_markdown("") for _ in range(2))]
            legend = gui.add_markdown("")
        self._colors: RowColors | None = None
        watch: RowWatch | None = getattr(runner.engine, "row_watch", None)  # where every rank has all primitives
        if isinstance(model := runner.model, OdinSplats):
            if watch is None:
                self._colors = ShardColors(model, viewer)
            else:
                self._colors = ReplicaColors(model, viewer, watch, runner.engine.lookahead)
            model.viewer_outputs = self._colors.add
            legend.content = panel_text.legend(ranks)
        self._server.on_client_connect(lambda _: self._connected.set())
        if self._server.get_clients():
            self._connected.set()
        threading.Thread(target=self._run, name="odin-panel", daemon=True).start()

    def finish(self, sentence: str) -> None:
        """The run is over and the other ranks are about to leave; the tab keeps its last state and says a sentence."""
        ranks, end = self._runner.engine.transport.world_size, time.monotonic() + PATIENCE
        self._board.ask()
        while len(self._board.statuses()) < ranks and time.monotonic() < end:  # nobody may have asked before
            time.sleep(0.02)
        self._last_word = sentence
        self._ended = True
        self._connected.set()

    def _run(self) -> None:
        try:
            while True:
                self._connected.wait()
                ended = self._ended
                watched = bool(self._server.get_clients())
                if self._colors is not None:
                    self._colors.choose(watched)
                if ended or watched:
                    self._update(ended)
                if ended:
                    return
                if watched:
                    time.sleep(PERIOD)
                else:
                    self._past.clear()
                    self._connected.clear()
                    if self._server.get_clients():  # one that came just before the line above
                        self._connected.set()
        except Exception as error:
            CONSOLE.log(f'The tab "Odin" of the viewer stops: {type(error).__name__}: {error}', markup=False)

    def _update(self, ended: bool) -> None:
        runner = self._runner
        ranks, mode = runner.engine.transport.world_size, runner.engine.policy.name
        statuses = self._board.statuses()
        self._past.append(statuses)
        rates = {
            rank: found
            for rank, new in statuses.items()
            if (old := self._past[0].get(rank)) is not None and (found := Rates.between(old, new)) is not None
        }
        if ended:
            statuses = {rank: replace(status, what="finished") for rank, status in statuses.items()}
        else:
            if self._turn % ESTIMATE_EVERY == ESTIMATE_EVERY - 1:
                self._estimate = self._board.estimate() or self._estimate
            self._board.ask(with_timeline=self._turn % ESTIMATE_EVERY == ESTIMATE_EVERY - 2)
            self._turn += 1
        texts = [
            self._header(),
            panel_text.rank_table(statuses, rates),
            panel_text.finished(self._last_word)
            if ended
            else panel_text.figures(list(rates.values()), self._estimate, mode, ranks, runner.engine.knows_barrier),
        ]
        for part, text in zip(self._parts, texts):
            if part.content != text:
                part.content = text

    def _header(self) -> str:
        plan, step = self._runner.plan, max(0, self._runner.engine.current)
        task = step * plan.views_per_step
        epoch = plan.epoch_of(step)
        return panel_text.header(
            Position(
                mode=self._runner.engine.policy.name,
                step=step,
                last_step=self._last_step,
                epoch=epoch + 1,
                view=min(plan.views, max(0, task - epoch * plan.views) + plan.views_per_step),
                views=plan.views,
                lanes=plan.views_per_step,
                order=plan.order,
                lingers=getattr(self._runner.engine, "lingers", False),  # owners of shards never do
            )
        )
