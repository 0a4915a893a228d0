"""What the viewer's tab "Odin" says, as the MDX that viser shows. No state, no viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from odin_nerfstudio.runtime.barrier_estimate import BarrierEstimate
from odin_nerfstudio.runtime.status import RankStatus

RANK_COLORS = ("#4dabf7", "#ffa94d", "#69db7c", "#f783ac", "#b197fc", "#ffe066", "#66d9e8", "#ff8787")
"""Colour of each rank, in the panel and in the output ``odin_writer``; from the ninth on they repeat."""
COMPUTING, UPDATING, WAITING, IDLE = "#40c057", "#868e96", "#fa5252", "#495057"
CONFLICT_COLORS = ("#ffd43b", "#f03e3e")
LAG_COLORS = ("#4dabf7", "#da77f2")
"""From little to much."""


@dataclass(frozen=True)
class Position:
    """Where the plan stands."""

    mode: str
    step: int
    last_step: int
    epoch: int
    view: int
    """Views of this epoch that have been started."""
    views: int
    lanes: int
    order: str
    lingers: bool = False
    """Rank 0 waits for whole steps, because that is faster."""


@dataclass(frozen=True)
class Rates:
    """What a rank's totals grew by between two answers."""

    computing: float
    """Share of the time."""
    waiting: float
    tasks: float
    """Per second."""
    conflicts: float
    delayed: float

    @staticmethod
    def between(old: RankStatus, new: RankStatus) -> Rates | None:
        """None if too little time has passed to tell. Totals grow when a step is complete, so take a few steps."""
        seconds = new.clock - old.clock
        if seconds < 0.2:
            return None

        def grown(name: str) -> float:
            return max(0.0, new.totals.get(name, 0.0) - old.totals.get(name, 0.0)) / seconds

        return Rates(
            min(1.0, grown("compute")),
            min(1.0, grown("wait")),
            grown("tasks"),
            grown("conflicts"),
            grown("delayed_tasks"),
        )


def color_of(rank: int) -> str:
    """A rank's colour, as ``#rrggbb``."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def doing_of(status: RankStatus) -> str:
    """What a rank is doing, in words."""
    if status.what != "waiting":
        words = {"updating": "updating", "busy": "evaluating or saving"}
        return words.get(status.what, status.what)
    awaited = sorted({(step, rank) for step, rank in status.awaited})
    if not awaited:
        return f"waiting ({status.hazard})"
    whom = ", ".join(f"rank {rank}" for rank in sorted({rank for _, rank in awaited})[:3])
    return f"waiting for {whom}, step {awaited[0][0]} ({status.hazard})"


def header(position: Position) -> str:
    """Mode, step and place in the plan."""
    done = min(1.0, position.view / max(1, position.views))
    lines = [
        _row(
            f"{_bold(position.mode)}, {position.order} order", _right(f"step {position.step} of {position.last_step}")
        ),
        _row(
            f"epoch {position.epoch}, view {position.view} of {position.views}",
            _right(f"{position.lanes} views a step"),
        ),
        _bar([(done, "#ffd369")], height=4),
    ]
    if position.lingers:
        lines.append(_small("waits for whole steps at the moment, which is faster here"))
    return _block("".join(lines))


def rank_table(statuses: Mapping[int, RankStatus], rates: Mapping[int, Rates]) -> str:
    """One row per rank: what it is doing, and how its time was divided lately."""
    lines = []
    for rank, status in statuses.items():
        dot = f'<span style={{{{color: "{color_of(rank)}", marginRight: "0.4em"}}}}>&#9679;</span>'
        lines.append(_row(f"<span>{dot}{_bold(f'rank {rank}')}</span>", _right(f"step {status.step}")))
        color = {"computing": COMPUTING, "waiting": WAITING, "updating": "#ced4da"}.get(status.what, "#adb5bd")
        known = rates.get(rank)
        lines.append(_row(f'<span style={{{{color: "{color}"}}}}>{doing_of(status)}</span>', ""))
        if known is not None:
            rest = max(0.0, 1 - known.computing - known.waiting)
            lines.append(_bar([(known.computing, COMPUTING), (rest, UPDATING), (known.waiting, WAITING)]))
            lines.append(_small(f"{100 * known.computing:.0f} % computing, {100 * known.waiting:.0f} % waiting"))
    return _block("".join(lines))


def figures(
    rates: Sequence[Rates], found: BarrierEstimate | None, mode: str, ranks: int, estimates: bool = True
) -> str:
    """Speed, hidden waits, conflicts and delayed reads. estimates: `found` will be known sooner or later."""
    lines = [_row("views per second", _right(f"{sum(r.tasks for r in rates):.2f}"))]
    if ranks > 1:
        if found is None or found.barrier_wait <= 0:
            hidden = "&#8230;"
        else:
            hidden = f"{100 * max(0.0, min(1.0, found.hidden)):.0f} %"
        if mode != "barrier" and estimates:
            lines.append(_row("waiting hidden", _right(hidden)))
        if found is not None:
            gain = f"{found.gain:.2f} &#215; a barrier" if mode != "barrier" else "1"
            lines.append(_row("speed", _right(gain)))
        lines.append(_row("conflicts per second", _right(f"{sum(r.conflicts for r in rates):.2f}")))
        lines.append(_row("delayed reads per second", _right(f"{sum(r.delayed for r in rates):.2f}")))
    return _block("".join(lines))


def legend(ranks: int) -> str:
    """What the colours of the outputs mean."""
    names = [f"{_chip(color_of(rank))} rank {rank}" for rank in range(min(ranks, len(RANK_COLORS)))]
    lines = [
        _small("Choose these under Control, Output type:"),
        _small(f"{_bold('odin_conflicts')}: read while an update was pending, {_ramp(CONFLICT_COLORS)} rarely, always"),
        _small(f"{_bold('odin_lag')}: steps behind when a view starts, {_ramp(LAG_COLORS)} few, many"),
        _small(f"{_bold('odin_writer')}: last written by {' '.join(names)}"),
    ]
    return _block("".join(lines))


def finished(sentence: str) -> str:
    """The last word of a run."""
    return _block(_small(sentence))


def _block(content: str) -> str:
    style = '{{fontSize: "0.85em", lineHeight: "1.45em", padding: "0.1em 0.4em 0.5em 0.4em"}}'
    return f"<div style={style}>{content}</div>"


def _row(left: str, right: str) -> str:
    style = '{{display: "flex", justifyContent: "space-between", gap: "0.6em"}}'
    return f"<div style={style}><span>{left}</span>{right}</div>"


def _right(text: str) -> str:
    return f'<span style={{{{fontVariantNumeric: "tabular-nums", textAlign: "right"}}}}>{text}</span>'


def _bold(text: str) -> str:
    return f"<b>{text}</b>"


def _small(text: str) -> str:
    return f'<div style={{{{fontSize: "0.9em", opacity: 0.75, marginBottom: "0.35em"}}}}>{text}</div>'


def _chip(color: str) -> str:
    style = f'{{{{display: "inline-block", width: "0.7em", height: "0.7em", background: "{color}"}}}}'
    return f"<span style={style}></span>"


def _ramp(colors: tuple[str, str]) -> str:
    gradient = f"linear-gradient(90deg, #4a4f55, {colors[0]}, {colors[1]})"
    style = f'{{{{display: "inline-block", width: "3em", height: "0.6em", background: "{gradient}"}}}}'
    return f"<span style={style}></span>"


def _bar(parts: Sequence[tuple[float, str]], height: int = 6) -> str:
    """parts: (share, colour) from left to right."""
    outer = (
        f'{{{{display: "flex", height: {height}, borderRadius: 3, overflow: "hidden", background: "{IDLE}", '
        'margin: "0.2em 0"}}'
    )
    inner = "".join(
        f'<div style={{{{width: "{100 * share:.1f}%", background: "{color}"}}}}></div>' for share, color in parts
    )
    return f"<div style={outer}>{inner}</div>"
