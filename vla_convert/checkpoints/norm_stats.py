"""Statistics of data sets in the form of RLDS training.

`dataset_statistics.json`, or `norm_stats` in config.json: data set to `action` and `proprio`, each
with `q01`, `q99` and a `mask` that says which numbers are scaled to [-1, 1].
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.quotes import join_truncated, quoted

STATISTICS_JSON = 'dataset_statistics.json'


class DataSet(NamedTuple):
    """A data set's statistics; name and entry are None where it was asked for."""

    path: Path
    name: str | None
    statistics: JsonMapping | None


def read_data_set(draft: Draft) -> DataSet:
    """Find the data set's statistics, and write its name; ask where the folder has several.

    Raises ExportError or JsonError: no statistics, damaged ones, or none of that data set.
    """
    folder, unnorm_key = draft.folder, draft.options.unnorm_key
    draft.missing.use('--unnorm-key')
    path = folder / STATISTICS_JSON
    if os.path.lexists(path):
        sets = read_json(path)
    else:
        path = folder / CONFIG_FILE
        sets = read_json(path).mapping('norm_stats', optional=True)
    names = sorted(sets.values)
    if not names:
        raise ExportError(
            f'{folder}: has no statistics of a data set: {STATISTICS_JSON} is missing, and '
            f'{CONFIG_FILE} has no norm_stats; copy {STATISTICS_JSON} from the output folder of '
            'the training'
        )
    listed = join_truncated(names, ', ')
    if unnorm_key is None and len(names) > 1:
        wanted = f'data set whose statistics the actions are in: {listed}'
        draft.missing.ask('--unnorm-key', wanted)
        return DataSet(path, None, None)
    key = names[0] if unnorm_key is None else unnorm_key
    if key not in sets:
        raise ExportError(f'--unnorm-key says {key}, but {path} has {listed}')
    draft.statistics_file = path
    draft.source['unnorm_key'] = key
    return DataSet(path, key, sets.mapping(key))


def read_bounds(
    numbers: JsonMapping, keys: tuple[str, str] = ('q01', 'q99')
) -> tuple[np.ndarray, np.ndarray]:
    """Return each number's values of -1 and 1; -1 and 1 where the mask leaves it unscaled.

    Raises JsonError: numbers missing, not finite, of another count, or in the wrong order.
    """
    count = len(numbers.get(keys[0], list))
    bounds = [finite_numbers(numbers.get(key, list), count) for key in keys]
    mask = numbers.get('mask', list, [True] * count)
    for key, values in zip(keys, bounds, strict=True):
        if not values:
            raise numbers.error(key, f'is no list of {count or "some"} finite numbers')
    if len(mask) != count or any(type(scaled) is not bool for scaled in mask):
        raise numbers.error('mask', f'{quoted(mask)} where {count} of true or false are expected')
    low, high = (np.array(values, dtype=np.float64) for values in bounds)
    scaled = np.array(mask)
    for place in np.flatnonzero(scaled & (low > high)):
        raise numbers.error(
            keys[0],
            f'number {place + 1} is {low[place]:g}, above that of {keys[1]}, {high[place]:g}; take '
            'the statistics that the training wrote',
        )
    return np.where(scaled, low, -1.0), np.where(scaled, high, 1.0)


def finite_numbers(values: object, length: int) -> tuple[float, ...] | None:
    """Finite numbers of a list of that length; None for anything else."""
    if not isinstance(values, Sequence) or len(values) != length:
        return None
    if any(type(value) not in (int, float) or not math.isfinite(value) for value in values):
        return None
    return tuple(float(value) for value in values)
