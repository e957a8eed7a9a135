"""TensorRT for RTX on the GPU: built elsewhere, compared here, loaded. On a stand-in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_tensorrt import RTX
from tensorrt_machine import Machine, linked_copy, write_exported_policy

from vla_runtime.cli.main import main
from vla_runtime.engines.tensorrt.store import COMPILED, METADATA


@pytest.fixture(scope='module')
def exported(tmp_path_factory) -> Path:
    return write_exported_policy(tmp_path_factory.mktemp('rtx') / 'policy')


@pytest.fixture
def here(monkeypatch, exported, tmp_path) -> Machine:
    machine = Machine(
        monkeypatch,
        linked_copy(exported, tmp_path / 'policy'),
        RTX,
        name='NVIDIA GeForce RTX 4090',
        capability=(8, 9),
    )
    monkeypatch.setitem(sys.modules, 'tensorrt', None)
    monkeypatch.setitem(sys.modules, 'tensorrt_rtx', machine.trt)
    return machine


def built(here: Machine, *options: str) -> int:
    return main(['build', str(here.bundle), '--precision', 'float32', *options])


def test_engines_built_for_targets_are_compared_once_on_the_gpu_that_runs_them(here):
    assert built(here, '--target', 'sm86,sm89') == 0
    with pytest.raises(ValueError, match="field 'passed'"):
        here.load()
    # What is there is compared, and not built again.
    builders = len(here.trt.builders)
    assert built(here) == 0
    assert len(here.trt.builders) == builders
    (folder,) = (here.bundle / 'engines').iterdir()
    data = json.loads((folder / METADATA).read_text())
    assert (data['gpu'], data['capability']) == ('NVIDIA GeForce RTX 4090', '8.9')
    assert data['passed'] and data['targets'] == ['sm86', 'sm89']
    assert all(entry['scratch_bytes'] == 1000 for entry in data['engines'].values())
    here.load().close()
    assert here.cuda.live == (0, 0)


def test_another_gpu_of_the_same_targets_compares_for_itself(here, monkeypatch):
    assert built(here, '--target', 'sm86,sm89') == 0 and built(here) == 0
    other = Machine(
        monkeypatch, here.bundle, RTX, name='NVIDIA GeForce RTX 3060', capability=(8, 6)
    )
    monkeypatch.setitem(sys.modules, 'tensorrt', None)
    monkeypatch.setitem(sys.modules, 'tensorrt_rtx', other.trt)
    with pytest.raises(ValueError, match="field 'gpu'"):
        other.load()
    assert built(other) == 0
    other.load().close()


def test_compiled_kernels_are_kept_for_the_next_load(here):
    assert built(here) == 0
    (folder,) = (here.bundle / 'engines').iterdir()
    assert folder.name == f'rtx-sm89-trtrtx{RTX}'
    assert (folder / COMPILED).read_bytes() == b'compiled'
    here.trt.restored.clear()
    here.load().close()
    assert here.trt.restored == [b'compiled']
    (folder / COMPILED).write_bytes(b'elsewhere')
    here.load().close()
    assert (folder / COMPILED).read_bytes() == b'compiled'


def test_one_profile_serves_one_and_two_rows(here):
    assert built(here, '--rows', '2') == 0
    assert all(len(config._profiles) <= 1 for config in here.trt.configs)
    engine = here.load()
    assert engine.max_rows == 2
    engine.close()
