"""What a simulated rank says to its peers, and what it makes of their answers (`runtime.exchange` without values)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime.frontier import Frontier
from odin_nerfstudio.runtime.messages import FRAME_WORDS, Contribution, Section
from odin_nerfstudio.runtime.reduction import OwnerReducer, share_for
from odin_nerfstudio.runtime.shadow import Task
from odin_nerfstudio.simulation.clock import Clock
from odin_nerfstudio.simulation.fabric import FabricNetwork
from odin_nerfstudio.simulation.network import Network
from odin_nerfstudio.simulation.scene import Scene

_HEADER = 4.0 * (FRAME_WORDS + 12)
"""Bytes of a message without rows: frame, body and one table."""


@dataclass(frozen=True)
class Arrival:
    """A message in a rank's inbox; an integer is a step that a rank without a task has passed."""

    peer: int
    message: Contribution | int


class SimulatedExchange:
    """One rank's side of all messages."""

    def __init__(
        self,
        number: int,
        ranks: int,
        scene: Scene,
        frontier: Frontier,
        clock: Clock,
        network: Network | FabricNetwork,
    ) -> None:
        self.number, self._ranks, self._scene = number, ranks, scene
        self._frontier, self._clock, self._network = frontier, clock, network
        self._peers = [r for r in range(ranks) if r != number]
        self._inbox: deque[Arrival] = deque()
        self.sent = 0.0
        """Bytes sent to all peers."""
        plan = frontier.plan
        lanes = range(plan.views_per_step)
        self._reducer = OwnerReducer(
            number, ranks, lambda step: sum(plan.view(step, lane) >= 0 for lane in lanes), self._send_sums
        )
        frontier.on_retire = self._reducer.forget

    @property
    def waiting(self) -> bool:
        """Something has arrived and is not taken in."""
        return bool(self._inbox)

    def deliver(self, peer: int, message: Contribution | int) -> None:
        """A message has arrived."""
        if isinstance(message, Contribution) and message.share:
            self._reducer.add(message)  # in the receiving thread, as in `runtime.exchange`
        self._inbox.append(Arrival(peer, message))
        self._clock.wake(self.number)

    def poll(self) -> int:
        """Take in everything that has arrived; returns the rank that the last message came from."""
        peer = -1
        while self._inbox:
            arrival = self._inbox.popleft()
            peer = arrival.peer
            if isinstance(arrival.message, int):
                self._frontier.staging(arrival.message).settle(peer)
            else:
                self._frontier.stage(arrival.message)
        return peer

    def contribute(self, task: Task, first: Tensor | None) -> None:
        """Stage a task's contribution and send it. first: rows to send in message 1 [rows] uint8; None: all."""
        scene, sets = self._scene, self._scene.sets[task.view]
        in_front = np.ones(len(sets.active), bool) if first is None else first.numpy()[sets.active] != 0
        order = np.concatenate((np.flatnonzero(in_front), np.flatnonzero(~in_front)))
        front, counts = int(in_front.sum()), sets.counts[order].astype(float)
        ids = torch.from_numpy(sets.active[order])
        whole = Contribution(task.step, task.lane, [self._section(ids, front, len(ids) - front)], None)
        statistics = 12.0 * sets.visible if scene.statistics else 0.0
        if self._frontier.reduced:
            self._contribute_shares(whole, counts, statistics)
            return
        row, ids_bytes = 4.0 * scene.columns, 4.0 * counts.sum()
        front_bytes, rest_bytes = row * counts[:front].sum(), row * counts[front:].sum()
        if front == len(ids):
            self._send(self._peers, _HEADER + ids_bytes + front_bytes + statistics, whole)
        else:
            one = Contribution(task.step, task.lane, [self._section(ids, front, 0)], None, has_rest=False)
            two = Contribution(
                task.step, task.lane, [self._section(ids[:0], front, len(ids) - front)], None, has_first=False
            )
            self._send(self._peers, _HEADER + ids_bytes + front_bytes, one)
            self._send(self._peers, _HEADER + rest_bytes + statistics, two)
        self._frontier.stage(whole)

    def _contribute_shares(self, whole: Contribution, counts: np.ndarray, statistics: float) -> None:
        ids = whole.tables[0].ids
        owner = ids.numpy() % self._ranks
        for peer in self._peers:
            rows = 4.0 * self._scene.columns * counts[owner == peer].sum()
            share = share_for(whole, peer, self._ranks)
            self._send([peer], _HEADER + 4.0 * counts.sum() + rows + statistics, share)
        mine = share_for(whole, self.number, self._ranks)
        self._frontier.stage(mine)
        self._reducer.add(mine)

    def _send_sums(self, sums: Contribution) -> None:
        # of a block, all primitives count: how many of them some view touched is not recorded
        primitives = float(self._scene.row_sizes[sums.tables[0].ids.numpy()].sum())
        self._send(self._peers, _HEADER + primitives * (4.0 + 4.0 * self._scene.columns), sums)
        self._inbox.append(Arrival(self.number, sums))
        self._clock.wake(self.number)

    def send_progress(self, step: int) -> None:
        """Say that this rank has nothing to render at a step."""
        self._send(self._peers, _HEADER, step)

    def _send(self, peers: list[int], size: float, message: Contribution | int) -> None:
        for peer in peers:
            self.sent += size
            self._network.send(self.number, peer, size, message)

    def _section(self, ids: Tensor, first: int, rest: int) -> Section:
        front = first if ids.shape[0] or not rest else 0
        return Section(ids, first, torch.empty(front, 0), torch.empty(rest, 0), self._scene.rows)
