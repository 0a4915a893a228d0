"""Randomness depends on its key and on nothing else."""

from __future__ import annotations

import torch

from odin_nerfstudio.glue.keyed_random import derive_seed, keyed_generator, seeded_torch


def test_same_key_same_numbers_and_other_keys_others() -> None:
    first = torch.rand(3, generator=keyed_generator(1, "background", 5, 0))
    torch.rand(100)  # the global generator has no part in it
    assert torch.equal(first, torch.rand(3, generator=keyed_generator(1, "background", 5, 0)))
    seeds = {derive_seed(s, "background", t, lane) for s in range(3) for t in range(20) for lane in range(3)}
    assert len(seeds) == 180
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_seeded_block_leaves_the_global_generator_as_it_was() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with seeded_torch(7, "structural", 3):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeded_torch(7, "structural", 3):
        assert torch.equal(torch.rand(2), inside)
