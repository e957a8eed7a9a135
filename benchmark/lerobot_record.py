"""Figures of the turns, and what they say of each target."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from lerobot_sides import Turn
from measurement import Target, median_interval


class Goal(NamedTuple):
    """Most that ours may take of LeRobot's time, by turns.

    Attributes:
        name: for people.
        most: part of the time.
        ours: columns; the fastest counts.
        theirs: columns; the fastest counts.
    """

    name: str
    most: float
    ours: tuple[str, ...]
    theirs: tuple[str, ...]


_FLOAT32 = ('torch float32', 'onnxruntime float32')
_ALL = (*_FLOAT32, 'torch bfloat16', 'onnxruntime int8', 'auto')
_SMALL = (
    Goal('float32', 0.8, _FLOAT32, ('lerobot',)),
    Goal('best', 0.5, _ALL, ('lerobot',)),
)
_BFLOAT16 = 'lerobot bfloat16'
# Not `auto`, which may take float32.
_REDUCED = ('torch bfloat16', 'onnxruntime int8')
_ON_CUDA = ('torch bfloat16', 'torch bfloat16 triton')
GOALS: dict[str, dict[str, tuple[Goal, ...]]] = {
    'cpu': {
        'act': _SMALL,
        'smolvla': _SMALL,
        'pi05': (
            Goal('float32', 1 / 2.5, _FLOAT32, ('lerobot',)),
            Goal('float32 hit', 1 / 11, tuple(f'{name} hit' for name in _FLOAT32), ('lerobot',)),
            Goal('16 or 8 bits, of lerobot bfloat16', 1 / 2.2, _REDUCED, (_BFLOAT16,)),
        ),
    },
    'cuda': {
        'act': (),
        'smolvla': (),
        'pi05': (
            Goal('bfloat16, of LeRobot eager', 1 / 6, _ON_CUDA, (_BFLOAT16,)),
            Goal(
                "bfloat16, of LeRobot's best torch.compile",
                1 / 2,
                _ON_CUDA,
                (f'{_BFLOAT16} default', f'{_BFLOAT16} max-autotune'),
            ),
        ),
    },
}


def targets(goals: Sequence[Goal], figures: Mapping[str, Any]) -> list[Target]:
    """Return every target with what was found; None where it was not measured.

    Args:
        goals: goals of the family.
        figures: figures as `Record.figures` gives them.
    """
    return [Target(goal.name, goal.most, _found(goal, figures)) for goal in goals]


def _found(goal: Goal, figures: Mapping[str, Any]) -> float | None:
    """Return the least part of the reference that is hardest to beat."""
    parts = []
    for reference in goal.theirs:
        ratios = [_ratio(figures.get(name, {}), reference) for name in goal.ours]
        measured = [ratio for ratio in ratios if ratio is not None]
        parts += [min(measured)] if measured else []
    return max(parts, default=None)


def _ratio(column: Mapping[str, Any], reference: str) -> float | None:
    compared = column if reference == 'lerobot' else column.get(f'of {reference}', {})
    return compared.get('ratio_by_turns')


class Record:
    """Turns of every side, and the figures of them."""

    def __init__(self, theirs: Sequence[str], ours: Sequence[str]) -> None:
        self._theirs, self._ours = tuple(theirs), tuple(ours)
        self._turns: dict[str, list[Turn]] = {}
        self._load: list[float] = []

    def add(self, turns: Mapping[str, Turn]) -> None:
        """Take the turns of one round; a hit of ours is called `NAME hit`."""
        for name, turn in turns.items():
            self._turns.setdefault(name, []).append(turn)
        self._load.append(round(os.getloadavg()[0], 1))

    def figures(self) -> dict[str, Any]:
        """Medians, and ratios to LeRobot by turns with their 95% intervals."""
        found: dict[str, Any] = {'rounds': len(self._load), 'load_1min': self._load}
        for name in self._turns:
            found[name] = {'ms': self._median(name, 'ms'), 'cpu_ms': self._median(name, 'cpu_ms')}
        for name in self._ours:
            found[name] |= self._compared(name, self._theirs[0])
            found[name]['largest_relative_difference'] = self._difference(name)
            if f'{name} hit' in found:
                found[f'{name} hit'] |= self._compared(f'{name} hit', self._theirs[0])
            for other in self._theirs[1:]:
                found[name][f'of {other}'] = self._compared(name, other)
        for other in self._theirs[1:]:
            found[other] |= self._compared(other, self._theirs[0])
            found[other]['largest_relative_difference'] = self._difference(other)
        return found

    def _values(self, name: str, clock: str) -> np.ndarray:
        return np.array([getattr(turn, clock) for turn in self._turns[name]])

    def _median(self, name: str, clock: str) -> float:
        return float(np.median(self._values(name, clock)))

    def _compared(self, name: str, reference: str) -> dict[str, Any]:
        ratio, cpu_ratio = (
            self._values(name, clock) / self._values(reference, clock) for clock in ('ms', 'cpu_ms')
        )
        return {
            'ratio_of_medians': self._median(name, 'ms') / self._median(reference, 'ms'),
            'ratio_by_turns': float(np.median(ratio)),
            'ratio_by_turns_95': median_interval(ratio),
            'cpu_ratio_by_turns': float(np.median(cpu_ratio)),
            'cpu_ratio_by_turns_95': median_interval(cpu_ratio),
        }

    def _difference(self, name: str) -> float:
        return max(
            float(
                np.abs(mine.chunk - expected.chunk).max() / max(1.0, np.abs(expected.chunk).max())
            )
            for mine, expected in zip(self._turns[name], self._turns[self._theirs[0]], strict=True)
        )


def show(figures: Mapping[str, Any], ours: Sequence[str]) -> None:
    """Print the figures as a table, what was left out, and each target."""
    theirs = figures['lerobot']
    print(f'LeRobot: {theirs["ms"]:.0f} ms a chunk, {theirs["cpu_ms"]:.0f} ms of processor time')
    print('| | ms a chunk | of LeRobot | of its processor time | largest difference |')
    print('|---|---:|---:|---:|---:|')
    for name, one in figures.items():
        if isinstance(one, dict) and 'ratio_by_turns' in one:
            difference = one.get('largest_relative_difference')
            print(
                f'| {name} | {one["ms"]:.0f} | {one["ratio_by_turns"]:.3f} '
                f'| {one["cpu_ratio_by_turns"]:.3f} '
                f'| {"" if difference is None else f"{difference:.1e}"} |'
            )
    for name in ours:
        for key, one in figures[name].items():
            if key.startswith('of '):
                print(f'{name} {key}: {one["ratio_by_turns"]:.3f} {one["ratio_by_turns_95"]}')
    for name, reason in figures.get('left_out', {}).items():
        print(f'left out: {name}: {reason}')
    for target in figures['targets']:
        print(f'target: {Target(**target).line}')
