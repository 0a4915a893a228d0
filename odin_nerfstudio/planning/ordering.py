"""Searching an epoch's order: annealing that lowers predicted conflicts between ranks, and the imbalance of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odin_nerfstudio.planning.graph import ONE, PairGraph
from odin_nerfstudio.planning.shuffle import keyed_bits
from odin_nerfstudio.planning.slots import EpochSlots

PROFILE_LIMIT = 1 << 25
"""Entries (views times steps) up to which an epoch's search keeps the cost of every view in every step: 256 MiB."""
BALANCE = 1.5
"""Conflict weight that a rank's cost in a step deviating by 100 % from the mean rank's is worth, for each lane."""
LOAD_UNIT = 64
"""Mean of the integer loads in the search; small, so that their squares stay far from overflow."""
REPEAT = 8
"""Weight of a view twice in one step, which can happen only where two epochs meet."""


@dataclass(frozen=True)
class Settled:
    """The order of a neighbouring epoch.

    Attributes:
        order: View of each slot. (V,) int64
        slots: The slots.
    """

    order: np.ndarray
    slots: EpochSlots


@dataclass
class Search:
    """What the search minimises.

    Attributes:
        graph: Edges between views.
        load: Cost of each view. (V,) int64 with a mean of about ``LOAD_UNIT``
        lag_weight: Integer weight of a conflict by distance in steps, 0 to max_delay + 1. (D + 1,) int64
        balance: Integer weight of balance, see :func:`kernels_order.anneal_slots`.
    """

    graph: PairGraph
    load: np.ndarray
    lag_weight: np.ndarray
    balance: int

    @property
    def one(self) -> int:
        """Integer that stands for weight 1."""
        return ONE

    @staticmethod
    def make(graph: PairGraph, load: np.ndarray, lag_weight: np.ndarray, lanes: int) -> Search:
        """From loads with a mean of about 1,000."""
        scaled = np.rint(load * (LOAD_UNIT / 1000.0)).astype(np.int64)
        # With R ranks of m lanes of mean load U, m * sum over ranks of ((load - mean load) / (m U))² is
        # (R * sum of loads² - (sum of loads)²) / (L U²).
        balance = round(BALANCE * int(lag_weight[1]) * ONE / (LOAD_UNIT * LOAD_UNIT * lanes))
        return Search(graph, scaled, lag_weight, balance)

    def place(self, order: np.ndarray, slots: EpochSlots) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step (V,) and rank (V,) of each view, load of each step (steps,) and of each rank in it (steps, R)."""
        step_of, rank_of = np.empty(len(order), np.int64), np.empty(len(order), np.int32)
        step_of[order], rank_of[order] = slots.step, slots.rank
        first = int(slots.step[0])
        cell_load = np.zeros((int(slots.step[-1]) - first + 1, int(slots.rank.max()) + 1), np.int64)
        np.add.at(cell_load, (slots.step - first, slots.rank), self.load[order])
        return step_of, rank_of, cell_load.sum(axis=1), cell_load

    def cost(self, order: np.ndarray, slots: EpochSlots, period: int = 0) -> int:
        """The objective of one epoch by itself (or repeated with a period, in steps), in units of
        1 / (ONE lag_weight[1])."""
        from odin_nerfstudio.planning import kernels_order

        step_of, rank_of, step_load, cell_load = self.place(order, slots)
        g = self.graph
        return int(
            kernels_order.total_cost(
                g.indptr,
                g.neighbours,
                g.written,
                step_of,
                rank_of,
                gap_weights(self.lag_weight, len(step_load), period),
                step_load,
                cell_load,
                self.balance,
            )
        )

    def anneal(
        self,
        order: np.ndarray,
        slots: EpochSlots,
        *,
        proposals: int,
        heat: float,
        key: tuple[int, ...],
        free_ranks: bool = False,
        period: int = 0,
        before: Settled | None = None,
        after: Settled | None = None,
    ) -> np.ndarray:
        """Improve an order by exchanging views between slots of one rank, or of any.

        Args:
            order: View of each slot to start from. (V,) int64
            slots: The epoch's slots.
            proposals: Exchanges to try.
            heat: Temperature at the start, in units of the mean change of cost by an exchange.
            key: Keys the random choices.
            free_ranks: Whether views may change rank.
            period: Steps after which the epoch repeats itself, 0 for never. Only with ``free_ranks``.
            before: The epoch before, if it is settled.
            after: The epoch after, if it is settled.

        Returns:
            View of each slot. (V,) int64
        """
        from odin_nerfstudio.planning import kernels_order

        order = order.copy()
        if len(order) < 2 or proposals < 1:
            return order
        step_of, rank_of, step_load, cell_load = self.place(order, slots)
        by_rank = np.argsort(slots.rank, kind="stable")
        rank_start = np.searchsorted(slots.rank[by_rank], np.arange(int(slots.rank.max()) + 2))
        g = self.graph
        edges = (g.indptr, g.neighbours, g.written, g.read)
        near = self._near(slots, rank_of, before, after)
        state = keyed_bits(1, *key)
        first = -round(heat * 1024)
        exponential = exponential_table(kernels_order.TABLE)
        common = (order, slots.step, slots.rank)
        lists = (rank_start, by_rank, step_load, cell_load, self.load, self.balance)
        if free_ranks or len(order) * len(step_load) > PROFILE_LIMIT:
            gap_weight = gap_weights(self.lag_weight, len(step_load), period)
            kernels_order.anneal_slots(*common, free_ranks, *lists, *edges, step_of, rank_of, gap_weight, near,
                                       exponential, proposals, first, state)  # fmt: skip
        else:
            profile = self._profile(near, len(step_load))
            kernels_order.fill_profile(profile, int(slots.step[0]), *edges, step_of, rank_of, self.lag_weight)
            kernels_order.anneal_profile(*common, *lists, *edges, step_of, rank_of, self.lag_weight, profile,
                                         exponential, proposals, first, state)  # fmt: skip
        return order

    def _near(
        self, slots: EpochSlots, rank_of: np.ndarray, before: Settled | None, after: Settled | None
    ) -> np.ndarray:
        """Cost of each view in the first and last e steps by what settled neighbouring epochs do. (V, 2 e) int64,
        column c < e is c steps after the first, column e + c is c steps before the last."""
        from odin_nerfstudio.planning import kernels_order

        edge = len(self.lag_weight)
        if before is None and after is None:
            return np.zeros((self.graph.views, 0), np.int64)
        g = self.graph
        out = np.zeros((self.graph.views, 2 * edge), np.int64)
        for settled, first_step, columns in (
            (before, int(slots.step[0]), np.arange(edge)),
            (after, int(slots.step[-1]) - edge + 1, np.arange(2 * edge - 1, edge - 1, -1)),
        ):
            if settled is None:
                continue
            close = np.abs(settled.slots.step - (first_step + edge // 2)) <= 2 * edge
            cost = np.zeros((self.graph.views, edge), np.int64)
            repeat = REPEAT * ONE * int(self.lag_weight[1])
            kernels_order.edge_cost(
                settled.order[close], settled.slots.step[close], settled.slots.rank[close],
                g.indptr, g.neighbours, g.written, g.read, rank_of, first_step, self.lag_weight, repeat, cost,
            )  # fmt: skip
            out[:, columns] = cost
        return out

    def _profile(self, near: np.ndarray, steps: int) -> np.ndarray:
        profile = np.zeros((self.graph.views, steps), np.int64)
        edge = min(near.shape[1] // 2, steps)
        for c in range(edge):
            profile[:, c] += near[:, c]
            profile[:, steps - 1 - c] += near[:, near.shape[1] // 2 + c]
        return profile


def gap_weights(lag_weight: np.ndarray, steps: int, period: int) -> np.ndarray:
    """Weight of a conflict by how many steps its reader runs after its writer.

    Args:
        lag_weight: Weight by distance, see :class:`Search`.
        steps: Steps of the epoch.
        period: Steps after which the epoch repeats itself, 0 for never. A pair then meets at every distance that is
            congruent to its gap: in short epochs, more than once.

    Returns:
        Entry ``steps - 1 + gap``. (2 steps - 1,) int64
    """
    weight = np.zeros(2 * steps - 1, np.int64)
    for at, gap in enumerate(range(1 - steps, steps)):
        if period:
            weight[at] = lag_weight[gap % period :: period].sum()
        elif 0 <= gap < len(lag_weight):
            weight[at] = lag_weight[gap]
    return weight


def exponential_table(size: int) -> np.ndarray:
    """Quantiles of the exponential distribution with mean ``size``, as integers. (size,) int64"""
    return np.rint(-np.log((np.arange(size) + 0.5) / size) * size).astype(np.int64)
