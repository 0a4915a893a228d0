"""How each epoch turns the template: at which step it begins, and whether it runs backwards.

Turning makes epochs differ at no cost within the epoch, since the template is searched as repeating itself. What
turning costs is paid where two epochs meet; so the next turn is drawn among those that follow on the last one no worse
than it would itself, and the best few. A chain of draws is begun anew every ``ERA`` epochs, so that any epoch can be
made without all before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odin_nerfstudio.planning.ordering import Search
from odin_nerfstudio.planning.shuffle import keyed_bits
from odin_nerfstudio.planning.slots import rank_of_lanes

ERA = 16
FEW_STEPS = 64
"""Steps per epoch up to which turns are matched. Where epochs are longer, their ends hardly count."""
BEST_TURNS = 4
"""Turns to draw from, at least: with fewer, all epochs would be much the same."""


@dataclass(frozen=True)
class Turns:
    """Turns of a template with S steps. Turn number shift + S * backwards runs template step (t - shift) mod S, or
    (S - 1 - t - shift) mod S backwards, as its step t.

    Attributes:
        steps: Template steps S.
        seam: Cost of following turn a by turn b. (2 S, 2 S) int64, or empty where seams are not matched.
        seed: Seeds the draws.
    """

    steps: int
    seam: np.ndarray
    seed: int

    def of_epoch(self, epoch: int) -> tuple[int, bool]:
        """Shift and direction (True: backwards) of an epoch."""
        turns = 2 * self.steps
        if not self.seam.size:
            return divmod(self._draw(epoch, turns), 2)[0] % self.steps, bool(self._draw(epoch, turns) % 2)
        first = epoch - epoch % ERA
        turn = self._draw(first, turns)
        for number in range(first + 1, epoch + 1):
            cost = self.seam[turn]
            others = np.delete(np.arange(turns), turn)
            bound = max(int(cost[turn]), int(np.sort(cost[others])[:BEST_TURNS].max()))
            good = others[cost[others] <= bound]
            turn = int(good[self._draw(number, len(good))])
        return turn % self.steps, turn >= self.steps

    def _draw(self, epoch: int, below: int) -> int:
        return int(keyed_bits(1, self.seed, epoch, 2)[0] % np.uint64(below))


def make_turns(
    search: Search, template_step: np.ndarray, order: np.ndarray, lanes: int, ranks: int, steps: int, seed: int
) -> Turns:
    """Turns of a template.

    Args:
        search: The objective.
        template_step: Step of each view in the template. (V,) int64
        order: View of each slot of the template. (V,) int64
        lanes: Lanes per step.
        ranks: Ranks planned for.
        steps: Template steps.
        seed: Seeds the draws.
    """
    if steps > FEW_STEPS or steps < 2:
        return Turns(steps, np.zeros((0, 0), np.int64), seed)
    rank = np.empty(len(order), np.int32)
    rank[order] = rank_of_lanes(lanes, ranks)[np.arange(len(order)) % lanes]
    graph, one = search.graph, search.one
    writer = np.repeat(np.arange(graph.views), np.diff(graph.indptr))
    across = rank[writer] != rank[graph.neighbours]
    # between[x, y]: conflict of tasks of template step y with those of step x before it; a view with itself counts.
    between = np.zeros((steps, steps), np.int64)
    np.add.at(between, (template_step[writer[across]], template_step[graph.neighbours[across]]), graph.written[across])
    np.add.at(between, (template_step, template_step), one)
    t = np.arange(steps)
    shift = np.arange(steps)[:, None]
    at = np.concatenate([(t - shift) % steps, (steps - 1 - t - shift) % steps])  # (turn, t) -> template step
    seam = np.zeros((2 * steps, 2 * steps), np.int64)
    lags = len(search.lag_weight) - 1
    for back in range(1, lags + 1):
        for ahead in range(lags - back + 1):
            end, begin = at[:, (steps - back) % steps], at[:, ahead % steps]
            seam += int(search.lag_weight[back + ahead]) * between[end[:, None], begin[None, :]]
    return Turns(steps, seam, seed)
