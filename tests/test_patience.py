"""When a rank waits for the whole of a step instead of publishing it in parts."""

from __future__ import annotations

import pytest

from odin_nerfstudio.runtime.patience import Patience


def settled(whole: float, parts: float, rest: float) -> Patience:
    """After many steps that all took the same."""
    patience = Patience()
    for _ in range(100):
        patience.published(whole, False)
        patience.published(parts, True)
        patience.arrived(rest)
    return patience


def test_it_waits_as_long_as_the_price_where_the_rest_comes_sooner_than_half_of_it() -> None:
    assert settled(0.010, 0.014, 0.001).budget == pytest.approx(0.004)


def test_it_does_not_wait_where_the_rest_takes_longer_or_parts_cost_nothing_more() -> None:
    assert settled(0.010, 0.014, 0.003).budget == 0
    assert settled(0.010, 0.009, 0.0).budget == 0


def test_it_does_not_wait_before_it_knows_what_parts_cost_nor_where_it_is_not_wanted() -> None:
    patience = Patience()
    patience.arrived(0.0)
    assert patience.budget == 0
    unwanted = settled(0.010, 0.014, 0.0)
    unwanted.wanted = False
    assert unwanted.budget == 0


def test_it_gives_up_when_the_rest_gets_later_and_comes_back_when_it_gets_sooner() -> None:
    patience = settled(0.010, 0.014, 0.001)
    for _ in range(20):
        patience.arrived(0.050)
    assert patience.budget == 0
    for _ in range(60):
        patience.arrived(0.0)
    assert patience.budget > 0
