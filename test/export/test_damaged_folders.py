"""Damaged checkpoint folders: any JSON that is not what it should be is an ExportError."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import (
    copy_lerobot_folder,
    openpi_statistics,
    tiny_tensors,
    write_openpi_folder,
    write_shards,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_runtime.export.checkpoint import read_tensors
from vla_runtime.export.errors import ExportError
from vla_runtime.export.folder import FolderFacts
from vla_runtime.export.lerobot_folder import read_lerobot_folder
from vla_runtime.export.options import read_dataset_info
from vla_runtime.families.pi.checkpoint import READER
from vla_runtime.families.pi.openpi_folder import read_openpi_folder
from vla_runtime.files.json_file import JsonError

PI05 = READER.lerobot[0]
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
    survives(lambda: read_lerobot_folder(lerobot, PI05), path, document)


@pytest.mark.parametrize('name', ['config.json', 'assets/lab/arm/norm_stats.json'])
@reuse
@given(data=st.data())
def test_a_damaged_openpi_folder(openpi, name, data):
    path = openpi / name
    document = data.draw(damage(json.loads(path.read_text())))
    survives(lambda: read_openpi_folder(openpi, 'pi05'), path, document)


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


def test_an_undamaged_folder_reads(lerobot, openpi):
    assert isinstance(read_lerobot_folder(lerobot, PI05), FolderFacts)
    assert isinstance(read_openpi_folder(openpi, 'pi05'), FolderFacts)
