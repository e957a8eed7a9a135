"""Names of dimensions in all forms that data sets and config.json have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vla_convert.checkpoints.feature_names import feature_names
from vla_convert.checkpoints.options import read_dataset_info

NAMES = ('pan', 'lift', 'gripper')


@pytest.mark.parametrize(
    'written',
    [
        list(NAMES),
        [list(NAMES)],
        [['pan', 'lift'], ['gripper']],
        {'motors': list(NAMES)},
        {'motors': [list(NAMES)]},
        {'axes': list(NAMES)},
        {'arm': ['pan', 'lift'], 'gripper': ['gripper']},
        {'pan': 0, 'lift': 1, 'gripper': 2},
        {'gripper': 2, 'pan': 0, 'lift': 1},
        {'0': 'pan', '1': 'lift', '2': 'gripper'},
        {'2': 'gripper', '0': 'pan', '1': 'lift'},
        {'arm': {'pan': 0, 'lift': 1}, 'hand': {'gripper': 0}},
    ],
    ids=str,
)
def test_a_form_that_names_every_dimension(written):
    assert feature_names(written, 3) == NAMES
    assert feature_names(written, None) == NAMES


@pytest.mark.parametrize(
    'written',
    [
        None,
        'state',
        ['state'],
        ['motors'],
        [],
        {},
        ['x', 'x', 'y'],
        ['x', ' ', 'y'],
        [0, 1, 2],
        {'motors': None},
        {'arm': {'start': 0, 'end': 3}},
        {'pan': 0, 'lift': 1, 'gripper': 3},
        {'pan': 0, 'lift': 0, 'gripper': 1},
        {'pan': 'rad', 'lift': 'rad', 'gripper': 'm'},
        {'pan': True, 'lift': 1, 'gripper': 2},
        4.5,
    ],
    ids=str,
)
def test_what_names_no_dimension_is_none(written):
    assert feature_names(written, 3) is None


def data_set(folder: Path, features: dict[str, Any], **more: Any) -> Path:
    (folder / 'meta').mkdir(parents=True)
    (folder / 'meta' / 'info.json').write_text(
        json.dumps({'fps': 30, 'features': features, **more})
    )
    return folder


@pytest.mark.parametrize('names', [['state'], 7, {'a': {}}, [['x', 'x', 'y']], None], ids=str)
def test_names_that_cannot_be_understood_do_not_cost_the_rate(tmp_path, names):
    feature = {'dtype': 'float32', 'shape': [3], 'names': names}
    info = read_dataset_info(data_set(tmp_path / 'd', {'observation.state': feature}))
    assert (info.state_names, info.rate_hz) == (None, 30.0)


@pytest.mark.parametrize('feature', [None, [], 'x', {'shape': 3}, {}], ids=str)
def test_a_feature_of_another_form_does_not_cost_the_rate(tmp_path, feature):
    info = read_dataset_info(data_set(tmp_path / 'd', {'action': feature}))
    assert (info.action_names, info.rate_hz) == (None, 30.0)


def test_openpis_keys_are_read_too(tmp_path):
    feature = {'dtype': 'float32', 'shape': [3], 'names': list(NAMES)}
    info = read_dataset_info(data_set(tmp_path / 'd', {'state': feature, 'actions': feature}))
    assert info.state_names == info.action_names == NAMES


def test_tasks_of_both_versions_are_read(tmp_path):
    folder = data_set(tmp_path / 'lines', {})
    assert read_dataset_info(folder).tasks == ()
    rows = [{'task_index': 0, 'task': 'pick'}, {'task_index': 1, 'task': ''}]
    for ending in ('', '\n', '\n\n', '\n  \n'):
        (folder / 'meta' / 'tasks.jsonl').write_text('\n'.join(map(json.dumps, rows)) + ending)
        assert read_dataset_info(folder).tasks == ('pick', '')
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    folder = data_set(tmp_path / 'table', {})
    table = pyarrow.table({'task_index': [0, 1], '__index_level_0__': ['pick', '']})
    parquet.write_table(table, folder / 'meta' / 'tasks.parquet')
    assert read_dataset_info(folder).tasks == ('pick', '')
