"""TensorRT for RTX on the GPU: built elsewhere, compared here, loaded. On a stand-in."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from fake_tensorrt import RTX
from tensorrt_machine import Machine, linked_copy, write_exported_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.engines.cuda_runtime import DeviceInfo
from vla_runtime.engines.tensorrt.rtx import check_targets, parse_targets
from vla_runtime.engines.tensorrt.store import COMPILED, METADATA, find_engines, rebuild_command


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


def command_in(text: str, here: Machine) -> list[str]:
    """The last command of a text that builds this bundle, as a shell would split it."""
    _, found, rest = text.rpartition(f'vla_runtime build {here.bundle}')
    assert found
    return shlex.split((found + rest).splitlines()[0].partition(', or ')[0])[1:]


@pytest.mark.parametrize('rows', [[], ['--rows', '1']], ids=['rows of the policy', 'one row'])
def test_the_command_that_is_advised_compares_what_was_built_for_targets(here, capsys, rows):
    assert built(here, '--target', 'sm89', *rows) == 0
    advised = command_in(capsys.readouterr().out, here)
    with pytest.raises(ValueError, match="field 'passed'") as refusal:
        here.load()
    builders = len(here.trt.builders)
    assert main(command_in(str(refusal.value), here)) == 0
    assert main(advised) == 0
    # Nothing was built again by either.
    assert len(here.trt.builders) == builders
    here.load().close()


def folder_of(here: Machine, *targets: str) -> Path:
    return here.bundle / 'engines' / f'rtx-{"-".join(targets)}-trtrtx{RTX}'


def test_targets_in_any_order_have_one_folder(here):
    for targets in ('sm120,sm86', 'sm86,sm120', ' 12.0 , SM_86,sm86'):
        assert built(here, '--target', targets) == 0
        assert [*(here.bundle / 'engines').iterdir()] == [folder_of(here, 'sm86', 'sm120')]
    assert len(here.trt.configs) == 3


def test_engines_of_the_bundles_files_are_taken_before_older_ones_for_several_cards(here):
    assert built(here, '--target', 'sm86,sm89') == 0 and built(here) == 0
    older = folder_of(here, 'sm86', 'sm89')
    data = json.loads((older / METADATA).read_text())
    for entry in data['engines'].values():
        entry['onnx_sha256'] = dict.fromkeys(entry['onnx_sha256'], '0' * 64)
    (older / METADATA).write_text(json.dumps(data))
    assert built(here, '--target', 'sm89') == 0
    builders = len(here.trt.builders)
    assert built(here) == 0
    assert len(here.trt.builders) == builders
    here.load().close()
    assert json.loads((folder_of(here, 'sm89') / METADATA).read_text())['passed']


@pytest.mark.parametrize('state', ['not compared', 'compared on another GPU', 'incomplete'])
def test_engines_that_passed_here_are_taken_before_others_of_the_same_files(here, state):
    assert built(here, '--target', 'sm89') == 0 and built(here) == 0
    own, other = folder_of(here, 'sm89'), folder_of(here, 'sm86', 'sm89')
    shutil.copytree(own, other)
    data = json.loads((other / METADATA).read_text())
    if state == 'not compared':
        data |= {'passed': {}, 'gpu': ''}
    elif state == 'incomplete':
        del data['engines']['expert']
    else:
        data['gpu'] = 'NVIDIA RTX PRO 6000'
    (other / METADATA).write_text(json.dumps(data))
    for path in other.iterdir():
        # Built last.
        os.utime(path, (2e9, 2e9))
    here.load().close()


def test_of_engines_that_never_ran_the_last_built_are_compared(here):
    assert built(here, '--target', 'sm86,sm89') == 0 and built(here, '--target', 'sm89') == 0
    for path in folder_of(here, 'sm86', 'sm89').iterdir():
        os.utime(path, (1e9, 1e9))
    assert built(here) == 0
    assert json.loads((folder_of(here, 'sm89') / METADATA).read_text())['passed']


@pytest.mark.parametrize('capability', ['11.0', '10.1', '9.0', '8.7', '7.5', '10.0'])
def test_a_gpu_that_only_tensorrt_serves_is_told_so(here, capability):
    device = DeviceInfo('NVIDIA Some', capability, 20, 1 << 34, integrated=True)
    served = rf'does not serve this GPU \(NVIDIA Some, {capability}\); install TensorRT'
    files = read_bundle(here.bundle, verify=False).spec.files
    with pytest.raises(ValueError, match=served) as refusal:
        find_engines(here.bundle, device, RTX, files, rtx=True)
    assert '--target' not in str(refusal.value)
    with pytest.raises(ValueError, match='install TensorRT'):
        check_targets((f'sm{capability.replace(".", "")}',))


def test_a_build_on_a_gpu_that_only_tensorrt_serves_is_told_so(here, monkeypatch, capsys):
    hopper = Machine(monkeypatch, here.bundle, RTX, name='NVIDIA H100', capability=(9, 0))
    monkeypatch.setitem(sys.modules, 'tensorrt', None)
    monkeypatch.setitem(sys.modules, 'tensorrt_rtx', hopper.trt)
    assert built(hopper) == 2
    assert 'does not serve this GPU (NVIDIA H100, 9.0)' in capsys.readouterr().err
    assert not (here.bundle / 'engines').exists()


def test_a_build_in_a_precision_that_the_gpu_lacks_is_not_advised(here):
    facts = here.bundle / 'onnx' / 'graphs.json'
    data = json.loads(facts.read_text())
    facts.unlink()
    facts.write_text(json.dumps({**data, 'precision': 'nvfp4'}))
    with pytest.raises(ValueError, match="'sm89'") as refusal:
        here.load()
    assert 'vla_runtime build' not in str(refusal.value)


@pytest.mark.parametrize('precision', ['float32', 'float16', 'bfloat16', 'fp8', 'nvfp4'])
def test_the_command_names_a_precision_that_a_build_does_not_take_by_itself(here, precision):
    facts = here.bundle / 'onnx' / 'graphs.json'
    data = json.loads(facts.read_text())
    facts.unlink()
    facts.write_text(json.dumps({**data, 'precision': precision}))
    words = shlex.split(rebuild_command(here.bundle, 1))
    named = [] if precision == 'bfloat16' else ['--precision', precision]
    assert words == ['vla_runtime', 'build', str(here.bundle), *named, '--rows', '1']


def test_targets_are_read_in_every_form_that_people_write():
    assert parse_targets('sm120, SM89,8.6,sm_80,12.0,sm89') == ('sm80', 'sm86', 'sm89', 'sm120')


@pytest.mark.parametrize(
    ('text', 'told'),
    [
        ('', 'none is named'),
        (' ', 'none is named'),
        (',', 'none is named'),
        ('sm89,', 'a name is missing'),
        (',sm89', 'a name is missing'),
        ('sm89,,sm86', 'a name is missing'),
        ('ada', "target 'ada'"),
        ('9.0', "'sm90'"),
    ],
)
def test_targets_that_are_none_are_told(here, capsys, text, told):
    with pytest.raises(ValueError, match=told):
        parse_targets(text)
    assert built(here, '--target', text) == 2
    assert 'argument --target: ' in capsys.readouterr().err


def shown(here: Machine, capsys) -> dict[str, str]:
    """What `info` says of each folder of engines, and of the ONNX files."""
    capsys.readouterr()
    assert main(['info', '--quick', str(here.bundle)]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    found = {line[0]: line[1] for line in lines if line and line[0] == 'onnx'}
    found |= dict(line[1].split(': ', 1) for line in lines if line and line[0] == 'engine')
    return found


def test_info_tells_what_engines_are(here, capsys):
    assert shown(here, capsys) == {'onnx': 'float32, attention exact'}
    assert built(here, '--target', 'sm89') == 0
    folder = folder_of(here, 'sm89')
    assert shown(here, capsys)[folder.name] == 'float32, 2 prompt row(s), not compared'
    assert built(here) == 0
    passed = 'float32, 2 prompt row(s), passed on NVIDIA GeForce RTX 4090'
    assert shown(here, capsys)[folder.name] == passed
    data = json.loads((folder / METADATA).read_text())

    def after(**changes) -> str:
        (folder / METADATA).write_text(json.dumps({**data, **changes}))
        return shown(here, capsys)[folder.name]

    other = {**data['passed'], 'weights.safetensors': '0' * 64}
    assert 'compared with other weights or cases' in after(passed=other)
    vision = {'vision': data['engines']['vision']}
    assert 'incomplete: 1 of 3 networks' in after(engines=vision)
    stale = {'vision': {**data['engines']['vision'], 'onnx_sha256': {'onnx/vision.onnx': '0' * 64}}}
    assert 'was built from another onnx/' in after(engines={**data['engines'], **stale})
    (folder / METADATA).write_text('{')
    assert 'is damaged' in shown(here, capsys)[folder.name]
    (folder / METADATA).unlink()
    assert shown(here, capsys)[folder.name] == 'incomplete'
    (folder / 'rejected.json').touch()
    assert shown(here, capsys)[folder.name] == 'failed the comparison'
    (folder.parent / 'notes.txt').touch()
    assert shown(here, capsys)['notes.txt'] == 'no folder of engines'


def test_info_tells_what_the_onnx_files_are(here, capsys):
    facts = here.bundle / 'onnx' / 'graphs.json'
    data = json.loads(facts.read_text())
    facts.unlink()
    data |= {'precision': 'int8', 'beside': 'bfloat16'}
    facts.write_text(json.dumps(data))
    assert shown(here, capsys) == {'onnx': 'int8 beside bfloat16, attention exact'}
    data['graphs']['prefix_rows.onnx']['operators']['Attention'] = 2
    facts.write_text(json.dumps(data))
    assert shown(here, capsys) == {'onnx': 'int8 beside bfloat16, attention fused'}


def test_a_folder_that_cannot_be_written_is_named(here, capsys):
    (here.bundle / 'engines').touch()
    assert built(here, '--target', 'sm89') == 2
    told = capsys.readouterr().err
    assert f'error: {folder_of(here, "sm89")}: cannot be written: ' in told
