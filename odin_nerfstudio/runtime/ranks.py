"""What concerns all ranks of a run beside the hooks: announcements, pauses, exchanges at a drain, the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from odin_nerfstudio.runtime.exchange import Exchange
from odin_nerfstudio.runtime.faults import RankFailure
from odin_nerfstudio.runtime.frontier import Frontier
from odin_nerfstudio.runtime.status import StatusBoard
from odin_nerfstudio.runtime.store import PublishedStore
from odin_nerfstudio.runtime.telemetry import Telemetry, now
from odin_nerfstudio.runtime.transport import Activity, Transport


class Rank:
    """This rank as one of several; the engine adds the hooks."""

    transport: Transport
    frontier: Frontier
    telemetry: Telemetry
    store: PublishedStore
    lookahead: int
    knows_barrier = True
    """What a barrier would have cost can be estimated from the telemetry's timeline."""
    _exchange: Exchange

    @property
    def board(self) -> StatusBoard:
        """What the other ranks are doing, if asked."""
        return self._exchange.board

    def announce(self, word: str) -> int:
        """Tell every rank a word that takes effect at the same step on all; returns that step."""
        step = self.frontier.current + self.lookahead + 3
        self._exchange.announce(word, step)
        return step

    def announced(self, word: str) -> bool:
        """Whether some rank, as far as this one has heard, announced a word that has not taken effect yet."""
        return self._exchange.announced(word)

    def due(self, step: int) -> list[str]:
        """Announced words that take effect at the start of a step, in alphabetical order."""
        self._exchange.poll()
        return self._exchange.due(step)

    @contextmanager
    def busy(self, activity: Activity = Activity.BUSY) -> Iterator[None]:
        """Let peers wait without limit meanwhile: evaluation, checkpoints, a pause."""
        self.transport.report(self.frontier.current, activity)
        begin, timeline = now(), self.telemetry.timeline
        inside, doing = timeline.inside(), self.telemetry.doing
        self.telemetry.enter("paused" if activity == Activity.PAUSED else "busy", self.frontier.current)
        try:
            yield
        finally:
            self.telemetry.doing = doing
            spent = now() - begin - (timeline.inside() - inside)
            timeline.spend("paused" if activity == Activity.PAUSED else "after", spent)
            self.transport.report(self.frontier.current, Activity.TRAINING)

    def idle(self, seconds: float) -> None:
        """Take in messages for some time, as a paused rank does. Raises RankFailure if a rank fails."""
        self._exchange.idle(seconds)

    def collect(self) -> list[dict[str, float]] | None:
        """All ranks' telemetry totals on rank 0, None elsewhere; collective, at a drain."""
        return self._exchange.gather_summaries(self.telemetry.summary())

    def gather(self, data: bytes) -> list[bytes] | None:
        """All ranks' data on rank 0, None elsewhere; collective, at a drain."""
        return self._exchange.gather(data)

    def exchange(self, data: bytes) -> list[bytes]:
        """All ranks' data on every rank; collective, before the first step or at a drain."""
        return self._exchange.gather_everywhere(data)

    def close(self) -> None:
        """Leave in good order; returns when every rank has called it."""
        self.transport.close()

    def abort(self, error: BaseException) -> None:
        """Tell the peers that this rank cannot go on."""
        if isinstance(error, RankFailure):
            self.transport.abort(error.reason, error.rank)
        else:
            self.transport.abort(f"raised {type(error).__name__} at its step {self.frontier.current}: {error}")

    def check_ranks(self) -> None:
        """Compare all ranks' states; collective, at a drain.

        Raises:
            RuntimeError: They differ; names the tensors and the ranks.
        """
        self._exchange.compare(self.store.digests(), self.frontier.current)
