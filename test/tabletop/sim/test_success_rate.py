"""Wilson's interval, against values worked out elsewhere."""

from __future__ import annotations

import pytest

from vla_tabletop.sim.success_rate import SuccessRate


@pytest.mark.parametrize(
    ('successes', 'episodes', 'low', 'high'),
    # Newcombe 1998, table I (81/263, 15/148, 0/20, 1/29).
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_interval_is_wilsons(successes: int, episodes: int, low: float, high: float) -> None:
    assert SuccessRate(successes, episodes).interval() == pytest.approx((low, high), abs=1e-4)


def test_it_prints_what_a_table_needs() -> None:
    assert str(SuccessRate(95, 100)) == '95/100 [89, 98]%'
