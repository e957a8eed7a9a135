"""`vla_runtime build`: its output and its exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tensorrt_machine import Machine, linked_copy, write_exported_policy
from tiny_policy import tiny_spec

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.writer import seal
from vla_runtime.cli.main import main
from vla_runtime.files.atomic_write import file_sha256
from vla_tools.cli._comparison import compare_engines

COMPARED = "compared with PyTorch's recorded chunks"


@pytest.fixture(scope='module')
def exported(tmp_path_factory) -> Path:
    return write_exported_policy(tmp_path_factory.mktemp('cli_build') / 'policy')


@pytest.fixture
def machine(monkeypatch, exported, tmp_path):
    def make(**options) -> Machine:
        bundle = tmp_path / 'policy'
        return Machine(
            monkeypatch, bundle if bundle.exists() else linked_copy(exported, bundle), **options
        )

    return make


def build(here: Machine, *options: str, precision: str = 'float32') -> int:
    return main(['build', str(here.bundle), '--precision', precision, *options])


def engines(here: Machine) -> Path:
    (folder,) = (here.bundle / 'engines').iterdir()
    return folder


def test_building_shows_plan_and_engines_and_keeps_the_receipt_of_their_comparison(machine, capsys):
    here = machine()
    assert build(here) == 0
    out = capsys.readouterr().out
    assert 'Orin, TensorRT 11.4.0.106, float32' in out
    assert out.count('to build') == 3 and out.count(' layers') == 3
    assert 'needs about' in out
    assert f'built {here.bundle / "engines" / "orin-16sm-trt11.4.0.106"}' in out
    assert "compared with PyTorch's recorded chunks: they differ by" in out
    here.load().close()
    folder = engines(here)
    receipt = json.loads((folder / 'verification.json').read_text())
    names = ('vision', 'prefix', 'expert')
    compared = [folder / f'{name}.engine' for name in names]
    digests = {path.name: file_sha256(path) for path in compared}
    for name in ('weights.safetensors', 'onnx/cases.npz'):
        digests[name] = file_sha256(here.bundle / name)
    assert receipt['files'] == digests
    assert receipt['versions']['tensorrt'] == '11.4.0.106' and receipt['gpu'] == 'Orin'
    assert len(receipt['chunks']) == 6
    assert all(item['max_error'] <= 5e-5 for item in receipt['tensors'] + receipt['chunks'])
    places = {(item['file'], item['tensor']) for item in receipt['tensors']}
    assert {
        ('vision', 'image_tokens'),
        ('prefix, 1 row(s)', 'past_key'),
        ('prefix, 2 row(s)', 'past_value'),
        ('expert, 2 row(s)', 'velocity'),
    } <= places
    steps = tiny_spec().denoise_steps
    assert [len(item['growth']) for item in receipt['chunks']] == [steps] * 6


def test_the_builders_memory_is_free_when_engines_are_compared(machine, monkeypatch):
    here = machine()
    held: list[bool] = []

    def compare(*arguments: object) -> object:
        held.extend(builder() is not None for builder in here.trt.builders)
        return compare_engines(*arguments)

    monkeypatch.setattr('vla_tools.cli.build.compare_engines', compare)
    assert build(here) == 0
    assert held == [False]


def test_engines_that_compute_something_else_are_not_kept(machine, capsys):
    here = machine()
    assert build(here) == 0
    here.trt.distort = ('velocity', 1e-3)
    assert build(here, '--force') == 1
    error = capsys.readouterr().err
    assert "FAILED: expert, 1 row(s): tensor 'velocity' differs from PyTorch" in error
    assert 'image_tokens' not in error
    folder = engines(here)
    assert f'what was found is in {folder / "rejected.json"}' in error
    assert {path.name for path in folder.iterdir()} == {'rejected.json', 'timing.cache'}
    found = json.loads((folder / 'rejected.json').read_text())
    assert all('velocity' in line or 'chunk' in line for line in found['failures'])
    assert len(found['chunks']) == 6
    with pytest.raises(ValueError, match=r'rejected\.json'):
        here.load()
    here.trt.distort = ('', 0.0)
    assert build(here) == 0
    assert (folder / 'verification.json').exists() and not (folder / 'rejected.json').exists()


@pytest.mark.parametrize('fault', ['freeze_outputs', 'poison_outputs'])
def test_engines_that_give_no_numbers_are_removed_so_that_the_next_build_mends_them(
    machine, capsys, fault
):
    here = machine()
    setattr(here.trt, fault, True)
    assert build(here) == 1
    assert 'FAILED: the denoise engine gives' in capsys.readouterr().err
    folder = engines(here)
    assert {path.name for path in folder.iterdir()} == {'rejected.json', 'timing.cache'}
    setattr(here.trt, fault, False)
    assert build(here) == 0
    here.load().close()


def test_a_receipt_covers_the_engines_that_were_compared_only(machine, capsys):
    here = machine()
    assert build(here) == 0
    receipt = engines(here) / 'verification.json'
    first = receipt.read_text()
    capsys.readouterr()
    for text in (first.replace(file_sha256(engines(here) / 'expert.engine'), '0' * 64), '{}', '['):
        receipt.write_text(text)
        assert build(here) == 0
        out = capsys.readouterr().out
        assert 'up to date' in out and COMPARED in out
        assert json.loads(receipt.read_text())['files'] == json.loads(first)['files']
    assert build(here) == 0
    assert COMPARED not in capsys.readouterr().out


def test_engines_that_were_not_compared_are_not_loaded_and_the_next_build_compares(machine, capsys):
    here = machine()
    here.build(passed=False)
    with pytest.raises(ValueError, match="field 'passed"):
        here.load()
    assert build(here) == 0
    out = capsys.readouterr().out
    assert 'up to date' in out and COMPARED in out
    here.load().close()


def test_engines_compared_with_other_weights_are_not_loaded(machine):
    here = machine()
    assert build(here) == 0
    files = {**read_bundle(here.bundle, verify=False).spec.files, 'weights.safetensors': '0' * 64}
    with pytest.raises(ValueError, match='compared'):
        here.load(files=files)


def test_a_bundle_without_recorded_cases_is_told(machine, capsys):
    here = machine()
    (here.bundle / 'onnx' / 'cases.npz').unlink()
    assert build(here) == 2
    assert 'cases.npz: is missing' in capsys.readouterr().err


def test_a_receipt_of_another_networks_weights_is_refused(machine, capsys):
    here = machine()
    assert build(here) == 0
    weights = here.bundle / 'weights.safetensors'
    tensors = {name: value * 1.5 for name, value in load_file(weights).items()}
    weights.unlink()
    save_file(tensors, weights)
    spec = read_bundle(here.bundle, verify=False).spec
    kept = {name: value for name, value in spec.files.items() if name != weights.name}
    seal(here.bundle, replace(spec, files=kept))
    assert build(here) == 1
    assert 'differs from PyTorch' in capsys.readouterr().err


def test_changed_onnx_files_are_not_built(machine, capsys):
    here = machine()
    graph = here.bundle / 'onnx' / 'expert_rows.onnx'
    data = graph.read_bytes()
    graph.unlink()
    graph.write_bytes(data.replace(b'vla_runtime', b'vla_rantime'))
    assert build(here) == 2
    assert 'expert_rows.onnx: has changed' in capsys.readouterr().err
    assert here.trt.configs == [] and not (here.bundle / 'engines').exists()


def test_what_is_there_is_kept(machine, capsys):
    here = machine()
    build(here)
    builds = len(here.trt.configs)
    capsys.readouterr()
    assert build(here) == 0
    out = capsys.readouterr().out
    assert out.count('is there') == 3 and 'up to date' in out and 'needs about' not in out
    assert len(here.trt.configs) == builds
    assert build(here, '--force') == 0
    assert len(here.trt.configs) == 2 * builds


def test_a_dry_run_builds_nothing(machine, capsys):
    here = machine()
    assert build(here, '--dry-run') == 0
    assert 'dry run: nothing was built' in capsys.readouterr().out
    assert not (here.bundle / 'engines').exists() and here.trt.configs == []


def test_a_policy_without_advantage_tags_is_built_for_one_row(machine, capsys):
    here = machine()
    spec = here.bundle / 'policy.yaml'
    text, count = re.subn(r',? *\n? *advantage: task_newline', '', spec.read_text())
    assert count == 1
    spec.unlink()
    spec.write_text(text)
    assert build(here) == 0
    assert '"rows": 1' in (engines(here) / 'engine.json').read_text()


def test_options_reach_the_build(machine):
    here = machine()
    assert build(here, '--rows', '1', '--workspace', '64', '--autotune', '7') == 0
    assert [config._limits for config in here.trt.configs] == [{'WORKSPACE': 64 << 20}] * 3
    folder = engines(here)
    assert '"captures": 7' in (folder / 'engine.json').read_text()


@pytest.mark.parametrize(
    ('options', 'cuda', 'told'),
    [
        (['--precision', 'float16'], {}, 'are float32, and float16 was asked for'),
        (['--device', 'cpu'], {}, "device 'cpu' is not supported by backend 'tensorrt'"),
        (['--device', 'cuda:3'], {}, 'there are 1 CUDA devices here'),
        ([], {'devices': None}, 'no CUDA device answers here'),
        (['--workspace', '9999999'], {}, 'Nothing was built'),
    ],
)
def test_what_is_not_possible_is_told_with_exit_code_2(machine, capsys, options, cuda, told):
    here = machine(**cuda)
    assert build(here, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: ') and told in error


def test_bfloat16_is_the_default_where_tensorrt_has_it_and_float32_is_asked_for(machine, capsys):
    here = machine(release='10.3.0')
    assert main(['build', str(here.bundle)]) == 2
    assert 'are float32, and bfloat16 was asked for by default' in capsys.readouterr().err
    assert main(['build', '--precision', 'fp8', str(here.bundle)]) == 2
    told = capsys.readouterr().err
    assert 'are float32, and fp8 was asked for:' in told and 'by default' not in told
    assert '--onnx-precision fp8 and --calibration BAG' in told
    here = machine(release='8.6.1')
    assert main(['build', str(here.bundle), '--dry-run']) == 0


def test_a_failed_build_is_told_with_exit_code_2(machine, capsys):
    here = machine()
    here.trt.fail_build = 'no implementation for Softmax'
    assert build(here) == 2
    assert 'no implementation for Softmax' in capsys.readouterr().err
