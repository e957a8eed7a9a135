"""A setting's default, range and words stand in its field, and are read from there alone."""

from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from vla_runtime.files.setting_fields import (
    check_settings,
    from_values,
    setting,
    settings_of,
    values_of,
)

Way = Literal['blend', 'switch']


@dataclass(frozen=True)
class Inner:
    way: Way = setting('blend', 'how', name='inner_way')
    count: int = setting(3, 'how many', 1, 9)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class Plain:
    """No settings: what is inside stays as it is."""

    secret: int = 1


@dataclass(frozen=True)
class Outer:
    steps: int | None = setting(None, 'steps', 0, 100)
    inner: Inner = field(default_factory=Inner)
    plain: Plain = field(default_factory=Plain)
    rate_hz: float = setting(2.0, 'rate', 0.5, 4.0)
    hidden: str = 'as it is'


def test_rows_come_in_the_order_of_the_fields_with_those_inside_at_their_places():
    rows = settings_of(Outer)
    assert [row.name for row in rows] == ['steps', 'inner_way', 'count', 'rate_hz']
    assert [row.default for row in rows] == [0, 'blend', 3, 2.0]
    assert rows[1].words == ('blend', 'switch')
    assert (rows[3].minimum, rows[3].maximum, rows[3].description) == (0.5, 4.0, 'rate')


def test_values_go_in_and_come_out_by_the_names_of_the_parameters():
    values = {'steps': 7, 'inner_way': 'switch', 'count': 9, 'rate_hz': 4.0}
    made = from_values(Outer, {**values, 'of_another_node': 1})
    assert made == Outer(steps=7, inner=Inner('switch', 9), rate_hz=4.0)
    assert values_of(made) == values


def test_none_is_zero_in_a_parameter():
    assert values_of(Outer())['steps'] == 0
    assert from_values(Outer, {**values_of(Outer(steps=5)), 'steps': 0}) == Outer()


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        ({'way': 'leap'}, 'inner_way'),
        ({'count': 0}, 'count is 0: it must be 1 to 9'),
        ({'count': 10}, 'count is 10: it must be 1 to 9'),
        ({'count': float('nan')}, 'count is nan'),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_the_name_of_its_parameter(change, words):
    with pytest.raises(ValueError, match=words):
        replace(Inner(), **change)


def test_the_ends_of_a_range_are_allowed():
    assert (Inner(count=1).count, Inner(count=9).count) == (1, 9)
