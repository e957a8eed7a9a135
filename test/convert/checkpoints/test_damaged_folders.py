"""Damaged checkpoint folders: any JSON that is not what it should be is an ExportError."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import (
    copy_lerobot_folder,
    draft_of,
    edit_config,
    edit_json,
    joints,
    lerobot_folder,
    openpi_statistics,
    tiny_tensors,
    write_openpi_folder,
    write_shards,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import read_dataset_info
from vla_convert.checkpoints.tensors import read_tensors
from vla_runtime.cli.main import main
from vla_runtime.files.json_file import JsonError

VALUES: list[Any] = [None, True, -1, 0, 2.5, float('nan'), '', 'x', [], {}, [1], ['x'], {'x': 1}]
# The folder is restored by hand before every example.
reuse = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def paths_in(document: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a document, its own included."""
    found = [here]
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            found += paths_in(value, (*here, key))
    return found


@st.composite
def damage(draw: Callable, document: Any) -> Any:
    """The document with one value replaced or lost."""
    path = draw(st.sampled_from(paths_in(document)))
    value = draw(st.sampled_from(VALUES))
    if not path:
        return value
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    if draw(st.booleans()):
        parent[path[-1]] = value
    else:
        del parent[path[-1]]
    return copy


def survives(read: Callable[[], object], path: Path, document: Any) -> None:
    """Reading the damaged file answers or says what is wrong, and nothing else."""
    text = path.read_text()
    path.write_text(json.dumps(document))
    try:
        assert read() is not None
    except (ExportError, JsonError) as error:
        assert str(error)
    finally:
        path.write_text(text)


@pytest.fixture(scope='module')
def lerobot(tmp_path_factory) -> Path:
    return copy_lerobot_folder(tmp_path_factory.mktemp('lerobot') / 'policy')


@pytest.fixture(scope='module')
def openpi(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp('openpi') / 'policy'
    return write_openpi_folder(target, tiny_tensors(), openpi_statistics(2))


@pytest.mark.parametrize(
    'name', ['config.json', 'policy_preprocessor.json', 'policy_postprocessor.json']
)
@reuse
@given(data=st.data())
def test_a_damaged_lerobot_folder(lerobot, name, data):
    path = lerobot / name
    document = data.draw(damage(json.loads(path.read_text())))
    survives(lambda: draft_of(lerobot), path, document)


@pytest.mark.parametrize('name', ['config.json', 'assets/lab/arm/norm_stats.json'])
@reuse
@given(data=st.data())
def test_a_damaged_openpi_folder(openpi, name, data):
    path = openpi / name
    document = data.draw(damage(json.loads(path.read_text())))
    survives(lambda: draft_of(openpi), path, document)


@pytest.fixture(scope='module')
def diffusion(tmp_path_factory) -> Path:
    source = lerobot_folder().with_name('diffusion_folder')
    return Path(shutil.copytree(source, tmp_path_factory.mktemp('diffusion') / 'policy'))


def export_of(folder: Path) -> int:
    """Export a folder of seven numbers, but for its files; returns the exit code."""
    names = ','.join(f'joint_{number}' for number in range(7))
    words = ['--out', str(folder / 'no_bundle'), '--dry-run', '--units', '1', '--rate-hz', '10']
    return main(['export', str(folder), *words, '--state-names', names, '--action-names', names])


@pytest.mark.parametrize(
    'name', ['config.json', 'policy_preprocessor.json', 'policy_postprocessor.json']
)
@reuse
@given(data=st.data())
def test_a_damaged_folder_of_diffusion_policy(diffusion, name, data):
    """Sizes, scheduler, crop and history too: whatever is read, a refusal is the package's own."""
    path = diffusion / name
    text = path.read_text()
    path.write_text(json.dumps(data.draw(damage(json.loads(text)))))
    try:
        assert export_of(diffusion) in (0, 2)
    finally:
        path.write_text(text)


@reuse
@given(data=st.data())
def test_a_damaged_dataset_description(tmp_path_factory, data):
    path = tmp_path_factory.mktemp('dataset') / 'info.json'
    path.write_text('{}')
    features = {'action': {'names': ['a']}, 'observation.state': {'names': {'motors': ['a']}}}
    document = data.draw(damage({'fps': 30, 'features': features}))
    survives(lambda: read_dataset_info(path), path, document)


@reuse
@given(data=st.data())
def test_a_damaged_shard_index(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp('shards')
    write_shards(folder, dict(list(tiny_tensors().items())[:4]), count=2)
    path = folder / 'model.safetensors.index.json'
    document = data.draw(damage(json.loads(path.read_text())))
    survives(lambda: read_tensors(folder), path, document)


NOT_COUNTS = [0, -1, -30]
KEYS = {
    'lerobot_pi05_tiny': [
        *('chunk_size', 'num_inference_steps', 'max_action_dim', 'tokenizer_max_length'),
    ],
    'smolvla_folder': ['chunk_size', 'num_steps', 'max_action_dim', 'max_state_dim'],
    'act_folder': ['chunk_size', 'n_heads'],
    'diffusion_folder': [
        *('horizon', 'n_action_steps', 'n_obs_steps', 'num_train_timesteps', 'n_groups'),
        'num_inference_steps',
    ],
}
HEADS = {
    'lerobot_pi05_tiny': ['--vision-heads', '4'],
    'smolvla_folder': ['--vision-heads', '4', '--kv-heads', '2'],
    'act_folder': [],
    'diffusion_folder': [],
}


@pytest.mark.parametrize('value', NOT_COUNTS)
@pytest.mark.parametrize(
    ('case', 'key'), [(case, key) for case, keys in KEYS.items() for key in keys]
)
def test_a_count_that_is_none_is_refused_by_file_and_field(tmp_path, capsys, case, key, value):
    folder = shutil.copytree(lerobot_folder().with_name(case), tmp_path / 'policy')
    edit_config(folder, **{key: value})
    words = ['--out', str(tmp_path / 'b'), '--dry-run', '--units', 'rad', '--rate-hz', '30']
    words += ['--state-names', joints(), '--action-names', joints(), *HEADS[case]]
    assert main(['export', str(folder), *words]) == 2
    assert f'{folder / "config.json"}: field {key}: ' in capsys.readouterr().err


@pytest.mark.parametrize('group', ['input_features', 'output_features'])
def test_a_feature_without_numbers_is_refused(tmp_path, group):
    folder = copy_lerobot_folder(tmp_path / 'policy')
    name = 'observation.state' if group == 'input_features' else 'action'
    edit_json(folder / 'config.json', lambda d: d[group][name].update(shape=[0]))
    with pytest.raises(JsonError, match=rf'{group}\.{name}'):
        draft_of(folder)


@pytest.mark.parametrize('rate', [*NOT_COUNTS, 0.0, float('nan'), float('inf')])
def test_a_rate_that_is_none_is_refused_by_file_and_field(tmp_path, rate):
    path = tmp_path / 'info.json'
    path.write_text(json.dumps({'fps': rate, 'features': {}}))
    with pytest.raises(JsonError):
        read_dataset_info(path)


def test_an_undamaged_folder_reads(lerobot, openpi, diffusion):
    assert export_of(diffusion) == 0
    assert isinstance(draft_of(lerobot), Draft)
    assert isinstance(draft_of(openpi), Draft)
