"""Randomness depends on its key and on nothing else."""

from __future__ import annotations

import random

import numpy as np
import torch

from odin_nerfstudio.glue.checkpoint import to_plain
from odin_nerfstudio.glue.global_random import generator_states, restore_generators
from odin_nerfstudio.runtime.keyed import derive_seed, keyed_generator


def test_same_key_same_numbers_and_other_keys_others() -> None:
    first = torch.rand(3, generator=keyed_generator(1, "background", 5, 0))
    torch.rand(100)  # the global generator has no part in it
    assert torch.equal(first, torch.rand(3, generator=keyed_generator(1, "background", 5, 0)))
    seeds = {derive_seed(s, "background", t, lane) for s in range(3) for t in range(20) for lane in range(3)}
    assert len(seeds) == 180
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_global_generators_are_restored_exactly() -> None:
    states = to_plain(generator_states())
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    restore_generators(states)
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))
