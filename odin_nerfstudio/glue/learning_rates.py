"""The learning rate of any step, known ahead of it.

A step is published when its contributions are in, perhaps while later steps are already being rendered; it must use its
own learning rates, and candidate sets need those of the steps in between.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from nerfstudio.engine.optimizers import Optimizers


class LearningRates:
    """Plays nerfstudio's schedulers forward on copies, so that every kind of scheduler gives its own numbers."""

    def __init__(self, optimizers: Optimizers, start_step: int) -> None:
        """Starts from the optimizers' and schedulers' present state, which is that of ``start_step``."""
        self._start = start_step
        self._known: dict[str, list[float]] = {}
        self._players: dict[str, Any] = {}
        for group, optimizer in optimizers.optimizers.items():
            self._known[group] = [float(optimizer.param_groups[0]["lr"])]
            if group in optimizers.schedulers:
                self._players[group] = _copy_of_scheduler(optimizers, group)

    def at(self, group: str, step: int) -> float:
        """Learning rate of a parameter group at a step; before the start, that of the start."""
        index = max(0, step - self._start)
        known = self._known[group]
        player = self._players.get(group)
        if player is None:
            return known[0]
        while len(known) <= index:
            player.optimizer.step()  # no gradients: only keeps torch from warning about the order of calls
            player.step()
            known.append(float(player.get_last_lr()[0]))
        return known[index]


def _copy_of_scheduler(optimizers: Optimizers, group: str) -> Any:
    """The group's scheduler in its present state, bound to an optimizer of a dummy parameter."""
    original = optimizers.optimizers[group].param_groups[0]
    initial = float(original.get("initial_lr", original["lr"]))
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=initial)
    config = optimizers.config[group]["scheduler"]
    player = config.setup().get_scheduler(optimizer=dummy, lr_init=optimizers.config[group]["optimizer"].lr)
    player.load_state_dict(copy.deepcopy(optimizers.schedulers[group].state_dict()))
    dummy.param_groups[0]["lr"] = float(original["lr"])
    return player
