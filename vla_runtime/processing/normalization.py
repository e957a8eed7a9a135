"""States and actions to the networks' scale and back, in the arithmetic of the training code.

| kind | scale s | normalise | denormalise |
|---|---|---|---|
| `quantiles_openpi` | q99 - q01 + 1e-6 | (x - q01) / s * 2 - 1 | (x + 1) / 2 * s + q01 |
| `quantiles_lerobot` | q99 - q01, or 1e-8 where 0 | 2 * (x - q01) / s - 1 | (x + 1) * s / 2 + q01 |
| `quantiles_clipped` | likewise | likewise, clipped to [-1, 1] | x clipped, then likewise |
| `mean_std_openpi` | std + 1e-6 | (x - mean) / s | x * s + mean |
| `mean_std_lerobot` | std | (x - mean) / (s + 1e-8) | x * s + mean |
| `min_max` | max - min, or 1e-8 where 0 | 2 * (x - min) / s - 1 | (x + 1) / 2 * s + min |
| `min_max_flat` | max - min | as `min_max`; 0 where s is 0 | (x + 1) / 2 * s + min |
| `clipped_range` | high - low | as `min_max_flat`, clipped to [-1, 1] | x clipped, then likewise |

`clipped_range` alone clips, and alone may have a row of statistics for each step of a chunk; `low`
and `high` are what maps to -1 and 1. LeRobot computes in float32 and so do its kinds, the `min_max`
ones and `clipped_range` here. openpi's statistics are float64 numpy arrays, which lifts its
arithmetic to float64; its kinds do the same and round once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vla_runtime.processing.words import check_word
from vla_runtime.types import NormaliserKind

_Formula = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
_EPS_LEROBOT = 1e-8
_EPS_OPENPI = 1e-6


class _Kind(NamedTuple):
    """The two statistics a kind reads, the scale it derives, and its two formulas of
    (x, offset, scale)."""

    first: str
    second: str
    dtype: type[np.floating]
    scale: Callable[[np.ndarray, np.ndarray], np.ndarray]
    normalise: _Formula
    denormalise: _Formula


def _span_or_eps(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    span = high - low
    return np.where(span == 0, span.dtype.type(_EPS_LEROBOT), span)


def _twice_before_division(x: np.ndarray, low: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return 2.0 * (x - low) / scale - 1.0


def _clipped(x: np.ndarray, low: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(_zero_where_flat(x, low, scale), -1.0, 1.0)


def _zero_where_flat(x: np.ndarray, low: np.ndarray, scale: np.ndarray) -> np.ndarray:
    flat = scale == 0
    return np.where(flat, 0.0, 2.0 * (x - low) / np.where(flat, 1.0, scale) - 1.0)


# Order of operations is kept per source: it decides the last bits.
_KINDS: dict[str, _Kind] = {
    'quantiles_openpi': _Kind(
        'q01',
        'q99',
        np.float64,
        lambda low, high: high - low + _EPS_OPENPI,
        lambda x, low, scale: (x - low) / scale * 2.0 - 1.0,
        lambda x, low, scale: (x + 1.0) / 2.0 * scale + low,
    ),
    'quantiles_lerobot': _Kind(
        'q01',
        'q99',
        np.float32,
        _span_or_eps,
        _twice_before_division,
        lambda x, low, scale: (x + 1.0) * scale / 2.0 + low,
    ),
    'quantiles_clipped': _Kind(
        'q01',
        'q99',
        np.float32,
        _span_or_eps,
        lambda x, low, scale: np.clip(_twice_before_division(x, low, scale), -1.0, 1.0),
        lambda x, low, scale: (np.clip(x, -1.0, 1.0) + 1.0) * scale / 2.0 + low,
    ),
    'mean_std_openpi': _Kind(
        'mean',
        'std',
        np.float64,
        lambda mean, std: std + _EPS_OPENPI,
        lambda x, mean, scale: (x - mean) / scale,
        lambda x, mean, scale: x * scale + mean,
    ),
    'mean_std_lerobot': _Kind(
        'mean',
        'std',
        np.float32,
        lambda mean, std: std,
        lambda x, mean, std: (x - mean) / (std + std.dtype.type(_EPS_LEROBOT)),
        lambda x, mean, std: x * std + mean,
    ),
    'min_max_flat': _Kind(
        'min',
        'max',
        np.float32,
        lambda low, high: high - low,
        _zero_where_flat,
        lambda x, low, scale: (x + 1.0) * 0.5 * scale + low,
    ),
    'clipped_range': _Kind(
        'low',
        'high',
        np.float32,
        lambda low, high: high - low,
        _clipped,
        lambda x, low, scale: (np.clip(x, -1.0, 1.0) + 1.0) * 0.5 * scale + low,
    ),
    'min_max': _Kind(
        'min',
        'max',
        np.float32,
        _span_or_eps,
        _twice_before_division,
        lambda x, low, scale: (x + 1.0) / 2.0 * scale + low,
    ),
}


class Normalizer:
    """Normalises vectors of `size` numbers; None: any (`identity` without names)."""

    def __init__(
        self,
        kind: NormaliserKind,
        statistics: Mapping[str, np.ndarray],
        names: Sequence[str] = (),
    ) -> None:
        """Check the statistics and prepare the scale.

        Args:
            statistics: name (`mean`, `std`, `min`, `max`, `q01`, `q99`, `low`, `high`) to (n,)
                floats, or (steps, n) for `clipped_range`; those the kind does not read are ignored.
            names: n names of the dimensions.

        Raises:
            ValueError: an unknown kind; statistics that are missing, of the wrong length, not
                finite, or impossible (negative std, lower bound above the upper one).
        """
        check_word('normaliser', kind, NormaliserKind)
        self.kind = kind
        self.size: int | None = len(names) if names else None
        self._names = tuple(names)
        self._formulas: _Kind | None = None
        if kind == 'identity':
            return
        formulas = _KINDS[kind]
        offset, second = (
            self._statistic(statistics, name, formulas.dtype)
            for name in (formulas.first, formulas.second)
        )
        self._check_plausible(formulas, offset, second)
        self._formulas = formulas
        self._offset = offset
        self._scale = formulas.scale(offset, second)

    def normalise(self, x: np.ndarray) -> np.ndarray:
        """Convert robot units (..., n) to network scale, a new float32 array.

        A padded vector is a ValueError: pad after normalising.
        """
        return self._apply(x, lambda formulas: formulas.normalise)

    def denormalise(self, x: np.ndarray) -> np.ndarray:
        """Convert network scale to robot units; else as `normalise`."""
        return self._apply(x, lambda formulas: formulas.denormalise)

    def _apply(self, x: np.ndarray, direction: Callable[[_Kind], _Formula]) -> np.ndarray:
        x = np.asarray(x)
        if x.ndim == 0 or (self.size is not None and x.shape[-1] != self.size):
            listed = f' ({", ".join(self._names)})' if self._names else ''
            raise ValueError(
                f'normaliser {self.kind!r} has statistics for {self.size} numbers{listed}, got an '
                f'array of shape {x.shape}; cut padding off before'
            )
        if self._formulas is None:
            return x.astype(np.float32)
        formula = direction(self._formulas)
        offset, scale = self._offset, self._scale
        if offset.ndim == 2:
            steps = x.shape[-2] if x.ndim > 1 else 1
            if steps > len(offset):
                raise ValueError(
                    f'normaliser {self.kind!r} has statistics for {len(offset)} steps, got {steps}'
                )
            offset, scale = offset[:steps], scale[:steps]
        result = formula(x.astype(self._formulas.dtype), offset, scale)
        return result.astype(np.float32, copy=False)

    def _statistic(
        self, statistics: Mapping[str, np.ndarray], name: str, dtype: type[np.floating]
    ) -> np.ndarray:
        if name not in statistics:
            found = ', '.join(sorted(statistics)) or 'none'
            raise ValueError(
                f'normaliser {self.kind!r} needs the statistic {name!r}, which is missing (there '
                f'are: {found})'
            )
        values = np.array(statistics[name], dtype=dtype)
        by_step = self.kind == 'clipped_range' and values.ndim == 2
        if not (values.ndim == 1 or by_step) or values.size == 0:
            raise ValueError(
                f'statistic {name!r} must be one row of numbers, got shape {values.shape}'
            )
        width = values.shape[-1]
        if self.size is None:
            self.size = width
        if width != self.size:
            raise ValueError(
                f'statistic {name!r} has {width} numbers, expected {self.size}'
                + (f' ({", ".join(self._names)})' if self._names else '')
            )
        self._refuse(~np.isfinite(values), f'statistic {name!r} is not finite', values)
        return values

    def _check_plausible(self, formulas: _Kind, first: np.ndarray, second: np.ndarray) -> None:
        if formulas.second == 'std':
            self._refuse(second < 0, "statistic 'std' is negative", second)
        else:
            self._refuse(
                second < first,
                f'statistic {formulas.second!r} is below {formulas.first!r}',
                second,
            )

    def _refuse(self, bad: np.ndarray, what: str, values: np.ndarray) -> None:
        """Raise a ValueError naming the first few bad dimensions, if there are any."""
        if bad.ndim == 2:
            # By step: the first one that is wrong.
            step = int(np.argmax(bad.any(axis=1)))
            bad, values = bad[step], values[step]
        indices = np.flatnonzero(bad)
        if not indices.size:
            return
        shown = ', '.join(
            f'{self._names[i] if self._names else f"index {i}"}: {values[i]}' for i in indices[:5]
        )
        more = f' and {indices.size - 5} more' if indices.size > 5 else ''
        raise ValueError(f'{what} for {shown}{more}')
