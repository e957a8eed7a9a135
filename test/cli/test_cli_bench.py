"""`vla_runtime bench`: a table for people, JSON with device and versions, errors without traces."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime import rates
from vla_runtime.cli.bench import describe
from vla_runtime.cli.main import main


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp('cli_bench') / 'bundle'
    return str(write_tiny_policy(folder, tiny_spec(advantage='in_task_space')))


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    monkeypatch.setattr(rates, '_SIDE', 32)
    monkeypatch.setattr(rates, '_ARRAY_BYTES', 2**16)


def bench(*arguments: str) -> int:
    return main(['bench', *arguments, '--repeats', '2'])


def test_the_table_has_every_phase_of_every_kind(bundle, capsys):
    assert bench(bundle, '--rows', '2') == 0
    text = capsys.readouterr().out
    assert text.startswith('tiny pi05: torch on cpu, float32, 2 view(s), 2 row(s), 3 denoise steps')
    for kind in ('miss', 'one new view', 'hit'):
        assert re.search(rf'^{kind}, ms +median +p95 +p99 +least$', text, re.MULTILINE)
    assert len(re.findall(r'^  denoise +[\d.]+ +[\d.]+ +[\d.]+ +\S+  \S+ times$', text, re.M)) == 3
    assert "'least' from" in text
    assert 'measured here: PyTorch' in text
    assert 'resident memory:' in text
    assert 'CUDA graphs: vision eager' in text


def test_the_json_names_versions_machine_and_device(bundle, tmp_path):
    out = tmp_path / 'bench.json'
    assert bench(bundle, '--views', '1', '--steps', '2', '--json', str(out)) == 0
    result = json.loads(out.read_text())
    assert result['versions']['torch'] == torch.__version__
    assert result['machine']['cores'] >= 1
    figures = result['figures']
    assert (figures['backend'], figures['device'], figures['precision']) == (
        'torch',
        'cpu',
        'float32',
    )
    assert figures['steps'] == 2
    assert list(figures['milliseconds']) == ['miss', 'hit']
    assert figures['milliseconds']['miss']['total']['count'] == 2


def test_no_floor_is_shown_where_there_is_no_rate(bundle, monkeypatch, capsys):
    monkeypatch.setattr('vla_runtime.bench.rates_of', lambda *arguments: None)
    assert bench(bundle) == 0
    text = capsys.readouterr().out
    assert "no 'least'" in text
    assert 'times' not in text


def test_device_memory_is_shown_where_there_is_a_device():
    figures = {
        'policy': 'p',
        'backend': 'tensorrt',
        'device': 'cuda',
        'device_name': 'NVIDIA H200',
        'precision': 'float16',
        'views': 1,
        'rows': 1,
        'steps': 10,
        'milliseconds': {},
        'floors_ms': {},
        'rates': None,
        'memory': {
            'resident_peak': 2**30,
            'resident_before': 2**20,
            'device': 3 * 2**30,
            'device_is': 'in use',
        },
        'cuda_graph': {'denoise': 'captured'},
    }
    lines = describe(figures).splitlines()
    assert 'tensorrt on NVIDIA H200' in lines[0]
    assert lines[-1] == 'device memory: 3,072 MiB in use'


@pytest.mark.parametrize(
    ('arguments', 'text'),
    [
        (['--device', 'cuda'], "device 'cuda': PyTorch"),
        (['--threads', '0'], '--threads 0: expected at least 1'),
        (['--backend', 'onnxruntime'], 'vision.onnx: is missing'),
        (['--views', '9'], 'this policy has 2 cameras'),
    ],
)
def test_what_cannot_be_measured_here_ends_in_2_with_the_reason(bundle, arguments, text, capsys):
    if arguments == ['--device', 'cuda'] and torch.cuda.is_available():
        pytest.skip('this machine has a GPU')
    assert bench(bundle, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: ')
    assert text in error


def test_help_shows_examples(capsys):
    assert main(['bench', '--help']) == 0
    assert 'vla_runtime bench engines/demo' in capsys.readouterr().out
