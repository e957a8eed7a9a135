"""The rules of statistics.safetensors, and notes on valid but unusual numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from vla_runtime.bundle.schema import SPEC_FILE, STATISTICS, STATISTICS_OF, BundleSpec, Unit
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.types import NormaliserKind

# Colour channels of an image.
CHANNELS = ('red', 'green', 'blue')
# Beyond this the normalisers' float32 overflows.
_LARGEST = 1e30
# A dimension with a smaller range, in any unit, was constant in training but for rounding.
_CONSTANT = 1e-6
# A dimension with a smaller range hardly moved in training: to the network, what lies beside it is
# far away. Robots are placed as exactly as `_BESIDE`.
_HARDLY: Mapping[Unit, float] = {
    'rad': 0.01,
    'deg': 0.5,
    'm': 0.002,
    'mm': 2.0,
    'rad/s': 0.01,
    'deg/s': 0.5,
    'm/s': 0.002,
    '1': 0.005,
    'percent': 0.5,
}
_BESIDE = 5.0
# Largest value that a robot reaches: no action of +1 or -1 on the network's scale lies beyond it.
_FURTHEST: Mapping[Unit, float] = {
    # Most joints stay within one turn; a continuous one that is never unwound may have 16.
    'rad': 100.0,
    'deg': 6000.0,
    # An arm reaches 2 m; a rail or a gantry is ten times as long.
    'm': 20.0,
    'mm': 20_000.0,
    # A motor without a gear turns 3000 times a minute.
    'rad/s': 300.0,
    'deg/s': 18_000.0,
    'm/s': 50.0,
    # Encoder ticks, for example.
    '1': 1e6,
    'percent': 1000.0,
}
# Fraction of `_FURTHEST` beyond which a note is given.
_FAR = 0.5
# Ranges of an action and its state are odd that lie further apart than this share of both, and than
# this share of `_FURTHEST`: a command leads a joint that sags.
_GAP, _LEAD = 0.1, 0.002


def check_statistics(spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> None:
    """Check that the statistics fit the spec.

    Args:
        statistics: `state.mean`, `actions.q01` and so on to float arrays of one number a dimension;
            `images.CAMERA.mean` of one number a colour channel, where images are normalised. Those
            of actions may have a row for each action of a chunk, with `clipped_range`.

    Raises:
        FieldError: unknown, missing, wrongly shaped, non-finite or contradictory statistics, or
            actions beyond any robot's reach.
    """
    columns = _columns(spec)
    known = [f'{group}.{name}' for group in columns for name in STATISTICS]
    for key, value in statistics.items():
        if key not in known:
            raise FieldError(key, f'unknown statistic{did_you_mean(key, known)}')
        names = columns[key.rpartition('.')[0]]
        length = len(names)
        shapes: list[tuple[int, ...]] = [(length,)]
        if key.startswith('actions.') and spec.normalisation.actions == 'clipped_range':
            shapes.append((spec.real_horizon, length))
        if value.shape not in shapes or value.dtype not in (np.float32, np.float64):
            raise FieldError(
                key,
                f'{value.dtype} of shape {value.shape} where float32 or float64 of shape '
                f'({length},) is expected, one number for each name in {SPEC_FILE}',
            )
        numbers = [number for row in np.atleast_2d(value).tolist() for number in row]
        for name, number in zip(itertools.cycle(names), numbers, strict=False):
            if not math.isfinite(number):
                raise FieldError(key, f'the number for {quoted(name)} is not finite')
            if abs(number) > _LARGEST:
                raise FieldError(
                    key,
                    f'the number for {quoted(name)} is {number:g}; at most {_LARGEST:g} is read',
                )
    for group in columns:
        _check_group(spec, group, statistics)
    _check_reach(spec, statistics)


def image_group(camera: str) -> str:
    """Name of the statistics of a camera's colour channels: `images.top` of `images.top.mean`."""
    return f'images.{camera}'


def _columns(spec: BundleSpec) -> dict[str, tuple[str, ...]]:
    """Return the groups of statistics, and what each number of a group is for."""
    columns = {'state': spec.state_names, 'actions': spec.action_names}
    if spec.normalisation.images is not None:
        # An earlier frame has those of its camera.
        own = (camera.name for camera in spec.cameras if camera.frame_of is None)
        columns |= {image_group(name): CHANNELS for name in own}
    return columns


def statistics_notes(spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> list[str]:
    """Notes for a person on statistics that `check_statistics` accepts.

    A line for each dimension that hardly moved, and at most one for each: constant actions,
    constant states, actions and states beyond half of `_FURTHEST`, states beyond all of it, and
    actions that are far from their states.
    """
    notes = []
    actions = network_range(spec, 'actions', statistics)
    if names := _constant(spec.action_names, actions):
        notes.append(
            f'actions {names} have no range: the data set never moved them, so the policy always '
            'commands the same number'
        )
    state = network_range(spec, 'state', statistics)
    if names := _constant(spec.state_names, state):
        notes.append(
            f'states {names} have no range: whatever differs from the data set is blown up for the '
            'network, so the robot must hold them where the data set did'
        )
    notes += _hardly_moving(spec, 'actions', actions) + _hardly_moving(spec, 'state', state)
    if actions is not None:
        reach = _reach(actions, [item.unit for item in spec.actions])
        if names := _named(spec.action_names, reach > _FAR):
            notes.append(f'actions {names} reach further than nearly any robot: check their units')
    if state is not None:
        reach = _reach(state, [item.unit for item in spec.state])
        if names := _named(spec.state_names, (reach > _FAR) & (reach <= 1.0)):
            notes.append(f'states {names} reach further than nearly any robot: check their units')
        if names := _named(spec.state_names, reach > 1.0):
            notes.append(
                f'states {names} have a range beyond any robot: the network hardly sees them change'
            )
    if names := ', '.join(map(quoted, apart_from_states(spec, statistics))):
        notes.append(
            f'absolute actions {names} never come near the states of the same names: if they are '
            'velocities or deltas of the data set and no targets, the robot would leave its pose'
        )
    return notes


def _hardly_moving(
    spec: BundleSpec, group: str, found: tuple[np.ndarray, np.ndarray] | None
) -> list[str]:
    if found is None:
        return []
    items = spec.state if group == 'state' else spec.actions
    columns = [(item.name, item.unit) for item in items]
    # Steps are short.
    steps = {name for pose in spec.poses if pose.delta_from == 'step' for name in pose.actions}
    notes = []
    for (name, unit), width in zip(columns, (found[1] - found[0]).tolist(), strict=True):
        least = _HARDLY[unit]
        if not _CONSTANT < width < least or (group == 'actions' and name in steps):
            continue
        off = _BESIDE * least
        # A share has no unit.
        in_unit = '' if unit == '1' else f' {unit}'
        hint = (
            f'{off:g}{in_unit} beside it is {2.0 * off / width:.0f} for the network, where 1 is '
            'the edge: the robot must hold it where the data set did'
            if group == 'state'
            else 'the policy always commands nearly the same number'
        )
        notes.append(
            f'{quoted(name)} ({group}) hardly moved in training, over {width:.2g}{in_unit}; {hint}'
        )
    return notes


def apart_from_states(spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Map each absolute action whose range lies apart from its state's to both ranges in words."""
    actions, state = (seen_range(spec, group, statistics) for group in ('actions', 'state'))
    if actions is None or state is None:
        return {}
    places = {one.name: (index, one.unit) for index, one in enumerate(spec.state)}
    apart = {}
    for index, action in enumerate(spec.actions):
        place, unit = places.get(action.name, (0, None))
        if action.kind != 'absolute' or unit != action.unit:
            continue
        low, high = (values[index] for values in actions)
        state_low, state_high = (values[place] for values in state)
        widths = high - low + state_high - state_low
        gap = max(low - state_high, state_low - high)
        if gap > _GAP * widths + _LEAD * _FURTHEST[unit]:
            apart[action.name] = (
                f'from {low:.3g} to {high:.3g} {unit} and its state from {state_low:.3g} to '
                f'{state_high:.3g}'
            )
    return apart


def seen_range(
    spec: BundleSpec, group: str, statistics: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return where a group's numbers were in training; three spreads around their mean."""
    found = network_range(spec, group, statistics)
    if found is None or not getattr(spec.normalisation, group).startswith('mean_std'):
        return found
    low, high = found
    return 2.0 * low - high, 2.0 * high - low


def _check_reach(spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> None:
    found = network_range(spec, 'actions', statistics)
    if found is None:
        return
    limits = _limits([action.unit for action in spec.actions])
    for values, number in zip(found, ('-1', '+1'), strict=True):
        for index in np.flatnonzero(np.abs(values) > limits)[:1]:
            action = spec.actions[index]
            first, second = STATISTICS_OF[spec.normalisation.actions]
            raise FieldError(
                f'actions.{first}, actions.{second}',
                f"the policy's {number} is {values[index]:g} {action.unit} for "
                f'{quoted(action.name)}, beyond the {limits[index]:g} that any robot reaches; '
                'correct its unit (--units), or export with the statistics of the data set',
            )


def network_range(
    spec: BundleSpec, group: str, statistics: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return -1 and +1 of the network's scale in robot units; None for `identity`."""
    kind: NormaliserKind = getattr(spec.normalisation, group)
    if not STATISTICS_OF[kind]:
        return None
    first, second = (
        statistics[f'{group}.{name}'].astype(np.float64) for name in STATISTICS_OF[kind]
    )
    if first.ndim == 2:
        # Of all steps together.
        first, second = first.min(axis=0), second.max(axis=0)
    return (first - second, first + second) if kind.startswith('mean_std') else (first, second)


def _reach(found: tuple[np.ndarray, np.ndarray], units: Sequence[Unit]) -> np.ndarray:
    """Largest magnitude of each dimension, as a fraction of `_FURTHEST`."""
    furthest: np.ndarray = np.maximum(np.abs(found[0]), np.abs(found[1])) / _limits(units)
    return furthest


def _limits(units: Sequence[Unit]) -> np.ndarray:
    return np.array([_FURTHEST[unit] for unit in units])


def _constant(names: Sequence[str], found: tuple[np.ndarray, np.ndarray] | None) -> str:
    return '' if found is None else _named(names, found[1] - found[0] <= _CONSTANT)


def _named(names: Sequence[str], which: np.ndarray) -> str:
    return ', '.join(quoted(name) for name, chosen in zip(names, which, strict=True) if chosen)


def _check_group(spec: BundleSpec, group: str, statistics: Mapping[str, np.ndarray]) -> None:
    kind: NormaliserKind = getattr(spec.normalisation, group.partition('.')[0])
    for name in STATISTICS_OF[kind]:
        if f'{group}.{name}' not in statistics:
            raise FieldError(f'{group}.{name}', f"is missing; the normaliser '{kind}' reads it")
    std = statistics.get(f'{group}.std')
    if std is not None and (std < 0).any():
        raise FieldError(f'{group}.std', 'has a negative number; a spread is at least 0')
    for low, high in (('q01', 'q99'), ('min', 'max'), ('low', 'high')):
        below, above = statistics.get(f'{group}.{low}'), statistics.get(f'{group}.{high}')
        if below is None or above is None:
            continue
        if below.shape != above.shape:
            text = f'has shape {below.shape}, and {group}.{high} has {above.shape}'
            raise FieldError(f'{group}.{low}', text)
        if (below > above).any():
            raise FieldError(f'{group}.{low}', f'is above {group}.{high} in some dimension')
