"""When a rank waits for whole steps instead of publishing them in parts: after it has compared the two."""

from __future__ import annotations

from collections.abc import Callable

from odin_nerfstudio.runtime.patience import BLOCK, Patience


def run(patience: Patience, steps: int, cost: Callable[[int, bool], float], first: int = 0) -> list[bool]:
    """Steps that take ``cost(step, whole)`` each; for each, whether its tasks waited for whole steps."""
    waited, time = [], float(first)
    for step in range(first, first + steps):
        patience.begin(step, time)
        patience.begin(step, time + 0.001)  # of two tasks: a step counts once
        waited.append(patience.waits())
        time += cost(step, waited[-1])
    return waited


def blocks(waited: list[bool]) -> list[bool]:
    """What each block did, in which all steps do the same."""
    found = [waited[at : at + BLOCK] for at in range(0, len(waited), BLOCK)]
    assert all(len(set(block)) == 1 for block in found)
    return [block[0] for block in found]


def test_it_does_what_was_cheaper_between_comparisons() -> None:
    dear_parts = blocks(run(Patience(), 16 * BLOCK, lambda _, whole: 0.010 if whole else 0.014, first=700))
    dear_whole = blocks(run(Patience(), 16 * BLOCK, lambda _, whole: 0.014 if whole else 0.010))
    pairs = {0, 4, 12}  # in parts, and whole in the block that follows
    for block in range(16):
        compared = {block} & pairs or {block - 1} & pairs
        assert dear_parts[block] is (block not in pairs)
        assert dear_whole[block] is bool(compared and block not in pairs)


def test_comparisons_get_rare_but_never_stop() -> None:
    waited = blocks(run(Patience(), 400 * BLOCK, lambda _, whole: 0.010 if whole else 0.014))
    assert [b for b, whole in enumerate(waited) if not whole] == [0, 4, 12, 28, 60, 124, 188, 252, 316, 380]


def test_it_follows_when_it_becomes_cheaper_to_wait_less() -> None:
    patience = Patience()
    run(patience, 6 * BLOCK, lambda _, whole: 0.010 if whole else 0.014)
    assert patience.waits(1)
    later = blocks(run(patience, 60 * BLOCK, lambda _, whole: 0.050 if whole else 0.014, first=6 * BLOCK))
    assert later[:6] == [True] * 6 and not any(later[8:22])  # the comparison at blocks 12 and 13 has found out


def test_a_pause_and_the_steps_after_a_change_do_not_count() -> None:
    def cost(step: int, whole: bool) -> float:
        return 60.0 if step in (BLOCK, BLOCK + 1, BLOCK + 9, 4 * BLOCK + 7) else 0.010 if whole else 0.014

    patience = Patience()
    run(patience, 6 * BLOCK + 1, cost)
    assert patience.price is not None and abs(patience.price - 0.004) < 1e-9


def test_it_can_be_told() -> None:
    assert not any(run(Patience(whole=False), 4 * BLOCK, lambda _, whole: 0.01 if whole else 0.02))
    assert all(run(Patience(whole=True), 4 * BLOCK, lambda _, whole: 0.02 if whole else 0.01))
