"""Statistics that look like another unit's are asked about, but where a person said it by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_policy import JOINTS, tiny_spec

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.unit_doubts import unit_doubts
from vla_runtime.bundle.writer import bundle_notes

ARM = np.array([1.9, 1.7, 0.8])


def spec_of(*units: str, kind: str = 'absolute') -> BundleSpec:
    spec = tiny_spec()
    state = tuple(replace(one, unit=unit) for one, unit in zip(spec.state, units, strict=True))
    anchors = [name if kind == 'delta' else None for name in JOINTS]
    actions = tuple(
        replace(one, unit=unit, kind=kind, relative_to=anchor)
        for one, unit, anchor in zip(spec.actions, units, anchors, strict=True)
    )
    return replace(spec, state=state, actions=actions)


def statistics_of(reach: np.ndarray) -> dict[str, np.ndarray]:
    return {
        'state.q01': -reach,
        'state.q99': reach,
        'actions.mean': np.zeros(len(reach)),
        'actions.std': reach,
    }


@pytest.mark.parametrize(
    ('units', 'reach', 'other'),
    [
        (('deg',) * 3, ARM, 'rad'),
        (('percent',) * 3, ARM, 'rad or 1'),
        (('deg', 'deg', 'percent'), ARM * [1, 1, 100], 'rad'),
        (('rad',) * 3, ARM * 57.3, 'deg'),
        (('rad', 'rad', '1'), ARM * [57.3, 0.5, 1], 'deg'),
        (('m',) * 3, ARM * 1000, 'mm'),
        (('mm',) * 3, ARM, 'm'),
        (('rad',) * 3, ARM, None),
        (('deg',) * 3, ARM * 57.3, None),
        # A base that hardly moves beside an arm that does.
        (('deg',) * 3, ARM * [1, 57.3, 57.3], None),
        (('percent',) * 3, ARM * 50, None),
        (('1',) * 3, ARM * 4096, None),
        # Constant: it says nothing.
        (('deg',) * 3, ARM * 0, None),
    ],
)
def test_only_numbers_that_another_unit_explains_are_doubted(units, reach, other) -> None:
    spec, statistics = spec_of(*units), statistics_of(reach)
    doubts = unit_doubts(spec, statistics)
    assert [doubt.other for doubt in doubts] == ([] if other is None else [other])
    assert any('--units' in note for note in bundle_notes(spec, statistics)) == (other is not None)


def test_differences_may_be_small_but_not_the_state_that_they_are_from() -> None:
    spec = spec_of('deg', 'deg', 'deg', kind='delta')
    statistics = statistics_of(ARM)
    assert len(unit_doubts(spec, statistics)) == 1
    statistics |= {'state.q01': -ARM * 57.3, 'state.q99': ARM * 57.3}
    assert unit_doubts(spec, statistics) == []


def test_what_was_said_by_name_is_not_asked_again() -> None:
    spec, statistics = spec_of('deg', 'deg', 'deg'), statistics_of(ARM)
    sure = {(group, name) for group in ('state', 'actions') for name in JOINTS}
    assert unit_doubts(spec, statistics, sure) == []
    (doubt,) = unit_doubts(spec, statistics, sure - {('state', JOINTS[1])})
    assert doubt.names == (JOINTS[1],) and doubt.reach == pytest.approx(1.7)
