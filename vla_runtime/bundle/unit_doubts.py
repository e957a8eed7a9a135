"""Units of state and actions that the statistics contradict."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_runtime.bundle.schema import ActionSpec, BundleSpec, StateSpec, Unit
from vla_runtime.bundle.statistics import network_range
from vla_runtime.files.quotes import quoted

# Joints in rad stay within a turn, and grippers in '1' within 1: numbers in deg or percent that all
# stay below this are likely to be those.
_SMALL = {'deg': 7.0, 'percent': 7.0, 'mm': 3.0}
# A joint that does not turn freely has no more turns than two, and an arm reaches no further.
_LARGE = {'rad': 4.0 * math.pi, 'm': 5.0}
_WORDS = {
    'deg': ('radians', 'rad'),
    'percent': ('radians, or 0 to 1', 'rad or 1'),
    'mm': ('metres', 'm'),
    'rad': ('degrees', 'deg'),
    'm': ('millimetres', 'mm'),
}
# Share of the dimensions in a unit that have to be small.
_MOST = 0.75
_CONSTANT = 1e-6


@dataclass(frozen=True)
class UnitDoubt:
    """Dimensions whose statistics look like another unit's; `reach` is their largest magnitude."""

    unit: Unit
    names: tuple[str, ...]
    reach: float

    def describe(self) -> str:
        only = 'only ' if self.is_small else ''
        names = ', '.join(map(quoted, self.names))
        return f'{names} reach {only}{self.reach:.3g} {self.unit}: are these {self.meant}?'

    @property
    def is_small(self) -> bool:
        """True where the numbers are too small for their unit; a motor may turn far."""
        return self.unit in _SMALL

    @property
    def meant(self) -> str:
        return _WORDS[self.unit][0]

    @property
    def other(self) -> str:
        """The other unit as an option takes it."""
        return _WORDS[self.unit][1]


def unit_doubts(
    spec: BundleSpec,
    statistics: Mapping[str, np.ndarray],
    sure: Collection[tuple[str, str]] = (),
) -> list[UnitDoubt]:
    """Find dimensions whose statistics look like another unit's.

    `sure` holds `state` or `actions`, and a name: dimensions whose unit was given by name.
    """
    places: dict[Unit, list[tuple[str, float, bool]]] = {}
    groups: dict[str, Sequence[StateSpec | ActionSpec]] = {
        'state': spec.state,
        'actions': spec.actions,
    }
    for group, items in groups.items():
        found = network_range(spec, group, statistics)
        if found is None:
            continue
        for index, item in enumerate(items):
            # Differences and velocities may be as small as they like.
            absolute = getattr(item, 'kind', 'absolute') == 'absolute'
            if absolute and (group, item.name) not in sure:
                low, high = (float(values[index]) for values in found)
                row = (item.name, max(abs(low), abs(high)), high - low > _CONSTANT)
                places.setdefault(item.unit, []).append(row)
    doubts = []
    for unit, rows in places.items():
        if unit in _SMALL:
            moving = [row for row in rows if row[2]]
            chosen = [row for row in moving if row[1] < _SMALL[unit]]
            if len(chosen) < max(1.0, _MOST * len(moving)):
                continue
        else:
            chosen = [row for row in rows if row[1] > _LARGE.get(unit, math.inf)]
        if chosen:
            names = tuple(dict.fromkeys(name for name, _, _ in chosen))
            doubts.append(UnitDoubt(unit, names, max(reach for _, reach, _ in chosen)))
    return doubts


def unit_notes(spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> list[str]:
    """Return a note for a person on each unit that the statistics contradict."""
    return [
        f'{doubt.describe()} The robot would be commanded something else: export again with '
        f'--units {doubt.other}'
        for doubt in unit_doubts(spec, statistics)
    ]
