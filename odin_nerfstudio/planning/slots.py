"""The stream of slots: which (step, lane) belongs to which epoch and planned rank.

Slots are numbered step by step, lane by lane: slot q is step q // L, lane q % L. Epoch e takes slots e V to
(e + 1) V - 1, so an epoch that does not fill its last step is continued there by the next one. Every step has L tasks,
and every view comes once an epoch, also where there are fewer views than lanes (a step then spans several epochs).

Lane l is planned for rank l R // L: contiguous lanes, L / R of them for each rank, give or take one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def rank_of_lanes(lanes: int, ranks: int) -> np.ndarray:
    """Rank of each lane. (L,) int32"""
    return (np.arange(lanes, dtype=np.int64) * ranks // lanes).astype(np.int32)


@dataclass(frozen=True)
class EpochSlots:
    """Slots of one epoch, in order.

    Attributes:
        step: Step of each slot. (V,) int64, ascending
        lane: Lane of each slot. (V,) int32
        rank: Planned rank of each slot. (V,) int32
    """

    step: np.ndarray
    lane: np.ndarray
    rank: np.ndarray


def epoch_slots(epoch: int, views: int, lanes: int, ranks: int) -> EpochSlots:
    """Slots of an epoch."""
    slot = epoch * views + np.arange(views, dtype=np.int64)
    lane = (slot % lanes).astype(np.int32)
    return EpochSlots(slot // lanes, lane, rank_of_lanes(lanes, ranks)[lane])


def fixed_capacity(views: int, lanes: int, ranks: int) -> np.ndarray:
    """Slots that each rank has in *every* epoch: V // L full rounds of its lanes. (R,) int64

    The other V % L slots fall on other ranks from epoch to epoch; they are filled with views that belong to no rank.
    """
    return np.bincount(rank_of_lanes(lanes, ranks), minlength=ranks).astype(np.int64) * (views // lanes)
