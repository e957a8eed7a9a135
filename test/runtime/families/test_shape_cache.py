"""Shapes of a network are those of its code, remembered or not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_policy import tiny_dims

from vla_runtime.families import shape_cache, traced_shapes
from vla_runtime.families.flow_network import FlowNetwork, empty_network
from vla_runtime.families.shape_cache import remember, remembered, shapes_file, weight_shapes
from vla_runtime.families.traced_shapes import TracedShapes, trace_shapes


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return tmp_path / 'vla_runtime' / 'shapes'


@pytest.mark.parametrize('family', ['pi05', 'smolvla', 'act'])
def test_what_is_remembered_is_what_was_built(cache, family, monkeypatch):
    built = weight_shapes(family, tiny_dims(family))
    monkeypatch.delattr('vla_runtime.families.flow_network.empty_network')
    assert weight_shapes(family, tiny_dims(family)) == built
    assert len(list(cache.iterdir())) == 1


def test_other_dimensions_are_built_anew(cache):
    dims = tiny_dims('pi05')
    shapes = weight_shapes('pi05', dims)
    other = weight_shapes('pi05', replace(dims, action_dim=dims.action_dim + 1))
    assert other['action_out.bias'] != shapes['action_out.bias']


def test_other_code_has_another_file(tmp_path):
    module = tmp_path / 'networks.py'

    def file() -> Path | None:
        return shapes_file('pi05', tiny_dims('pi05'), [tmp_path])

    module.write_text('WIDTH = 1\n')
    before = file()
    assert before == file()
    module.write_text('WIDTH = 2\n')
    assert file() not in (before, None)


def test_code_that_cannot_be_read_is_not_known_again(tmp_path):
    def file() -> Path | None:
        return shapes_file('pi05', tiny_dims('pi05'), [tmp_path])

    # Compiled modules alone: an upgrade would be taken for what was there before.
    assert file() is None
    (tmp_path / 'networks.py').write_text('WIDTH = 1\n')
    assert file() is not None
    # Of an editor that has a file open.
    (tmp_path / '.#networks.py').symlink_to('somebody@somewhere.1')
    assert file() is None


DAMAGES = [
    lambda path: path.write_text(''),
    lambda path: path.write_text('[1, 2]'),
    lambda path: path.write_text('{"action_out.bias": 6}'),
    lambda path: path.write_text('{"image_tokens": [4, 8], "token_counts": [[1]]}'),
    lambda path: path.write_bytes(b'\xff'),
    lambda path: path.write_text('[' * 100_000),
    lambda path: path.write_text('{"action_out.bias": [1e999]}'),
]


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_file_is_written_anew(cache, damage: Callable[[Path], object]):
    shapes = weight_shapes('pi05', tiny_dims('pi05'))
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    damage(path)
    assert weight_shapes('pi05', tiny_dims('pi05')) == shapes
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_to_costs_time_only(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    (tmp_path / 'vla_runtime').write_text('a file, where a folder is to be')
    dims = tiny_dims('pi05')
    assert weight_shapes('pi05', dims)['action_out.bias']
    assert traced_anew(monkeypatch, empty_network('pi05', dims)).past


def traced_anew(monkeypatch, network: FlowNetwork) -> TracedShapes:
    """As in a process that has traced nothing yet."""
    monkeypatch.setattr(traced_shapes, '_TRACED', {})
    return trace_shapes(network)


@pytest.mark.parametrize('family', ['pi05', 'smolvla', 'act', 'groot_n17', 'evo1'])
def test_a_network_is_traced_once_a_machine(cache, family, monkeypatch):
    network = empty_network(family, tiny_dims(family))
    traced = traced_anew(monkeypatch, network)
    monkeypatch.delattr(traced_shapes, '_trace')
    assert traced_anew(monkeypatch, network) == traced
    assert len(list(cache.iterdir())) == 1


def test_another_precision_is_traced_anew(cache, monkeypatch):
    network = empty_network('pi05', tiny_dims('pi05'))
    dtypes = {str(tensor.dtype) for tensor in traced_anew(monkeypatch, network).past.values()}
    network.bfloat16()
    halves = {str(tensor.dtype) for tensor in traced_anew(monkeypatch, network).past.values()}
    assert halves != dtypes


def test_a_network_of_other_code_than_the_families_is_not_remembered(cache, monkeypatch):
    network = empty_network('pi05', tiny_dims('pi05'))
    network.__class__ = type('Mine', (type(network),), {'__module__': 'mine'})
    traced_anew(monkeypatch, network)
    assert not cache.exists()


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_traced_shapes_are_written_anew(cache, damage, monkeypatch):
    network = empty_network('act', tiny_dims('act'))
    shapes = traced_anew(monkeypatch, network)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    damage(path)
    assert traced_anew(monkeypatch, network) == shapes
    assert path.read_bytes() == whole


def test_the_oldest_files_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(shape_cache, '_MOST_KEPT', 3)
    for index in range(5):
        path = tmp_path / f'{index}.json'
        remember(path, {'index': index})
        os.utime(path, ns=(index, index))
    remember(tmp_path / 'new.json', {'index': 5})
    assert {path.stem for path in tmp_path.iterdir()} == {'3', '4', 'new'}
    assert remembered(tmp_path / 'new.json', lambda content: content['index']) == 5
