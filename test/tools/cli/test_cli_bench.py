"""`vla_runtime bench`: a table for people, JSON with device and versions, errors without traces."""

from __future__ import annotations

import json
import re

import pytest
import torch
import yaml
from onnx_bundles import copy_bundle, tiny_onnx_bundle
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.writer import seal
from vla_runtime.cli.main import main
from vla_runtime.engines.devices import cpu_threads
from vla_tools.cli.bench import describe
from vla_tools.performance import bench as bench_module
from vla_tools.performance import cost_sweep, device_rates
from vla_tools.performance.devices import DEVICES


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp('cli_bench') / 'bundle'
    return str(write_tiny_policy(folder, tiny_spec(advantage='in_task_space')))


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    monkeypatch.setattr(device_rates, '_SIDE', 32)
    monkeypatch.setattr(device_rates, '_ARRAY_BYTES', 2**16)


def bench(*arguments: str) -> int:
    return main(['bench', *arguments, '--repeats', '2'])


def test_the_table_has_every_phase_of_every_kind(bundle, capsys):
    assert bench(bundle, '--rows', '2') == 0
    text = capsys.readouterr().out
    threads = cpu_threads(None)
    assert text.splitlines()[:2] == [
        'tiny pi05: torch on cpu, float32, 2 view(s), 2 row(s), 3 denoise steps, '
        f'{threads} thread(s), 2 of each kind',
        'chosen: nothing else may run this bundle here',
    ]
    for kind in ('miss', 'one new view', 'hit'):
        assert re.search(rf'^{kind}, ms +median +p95 +p99 +least +of least$', text, re.MULTILINE)
    assert len(re.findall(r'^  denoise +[\d.]+ +[\d.]+ +[\d.]+ +\S+ +[\d.]+$', text, re.M)) == 3
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


def test_half_precision_on_a_cpu_has_no_column_of_floors_and_says_why(bundle, capsys):
    assert bench(bundle, '--precision', 'bfloat16') == 0
    text = capsys.readouterr().out
    assert re.search(r'^miss, ms +median +p95 +p99$', text, re.MULTILINE)
    assert "no 'least': on a CPU every library computes bfloat16 in its own way" in text
    assert 'of least' not in text


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
        'repeats': 30,
        'threads': 1,
        'why': '',
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
        'power': {'before': {}, 'after': {}},
        'notes': ['closing the policy: so'],
    }
    lines = describe(figures).splitlines()
    assert 'tensorrt on NVIDIA H200' in lines[0]
    assert any(line.startswith("no 'least'") for line in lines)
    assert lines[-2:] == ['device memory: 3,072 MiB in use', 'note: closing the policy: so']
    figures['memory'] |= {'resident_peak': None, 'device': None, 'device_is': 'not known: why'}
    lines = describe(figures).splitlines()
    assert 'resident memory: not known at most, 1 MiB before loading' in lines
    assert lines[-2] == 'device memory: not known: why'


def test_the_table_is_shown_where_the_file_cannot_be_written(bundle, tmp_path, monkeypatch, capsys):
    def fail() -> None:
        raise OSError('the disk is full')

    monkeypatch.setattr('vla_runtime.files.machine.machine', fail)
    assert bench(bundle, '--json', str(tmp_path / 'bench.json')) == 2
    told = capsys.readouterr()
    assert re.search(r'^miss, ms +median', told.out, re.MULTILINE)
    assert told.err == 'error: the disk is full\n'


def test_the_file_is_written_where_the_table_cannot_be_shown(bundle, tmp_path, monkeypatch):
    def fail(figures: object) -> str:
        raise OSError('nobody reads')

    monkeypatch.setattr('vla_tools.cli.bench.describe', fail)
    out = tmp_path / 'bench.json'
    assert bench(bundle, '--json', str(out)) == 2
    assert json.loads(out.read_text())['figures']['milliseconds']['hit']['total']['count'] == 2


@pytest.mark.parametrize(
    ('arguments', 'device'),
    [
        ([], 'cpu'),
        (['--backend', 'onnxruntime'], 'cpu'),
        (['--backend', 'tensorrt'], 'cuda'),
        (['--backend', 'tensorrt', '--device', 'cuda:1'], 'cuda:1'),
    ],
)
def test_a_device_that_is_not_named_follows_from_the_backend(
    bundle, arguments, device, monkeypatch, capsys
):
    def fail(folder: object, options: bench_module.BenchOptions, progress: object) -> None:
        raise RuntimeError(f'on {options.device}')

    monkeypatch.setattr(bench_module, 'run_bench', fail)
    assert bench(bundle, *arguments) == 2
    assert capsys.readouterr().err == f'error: on {device}\n'


def test_an_inference_that_fails_is_an_error_without_a_trace(bundle, monkeypatch, capsys):
    def fail(*arguments: object, **more: object) -> None:
        raise RuntimeError('CUDA error: out of memory')

    monkeypatch.setattr('vla_runtime.policy.Policy.infer', fail)
    assert bench(bundle) == 2
    assert capsys.readouterr().err == 'error: CUDA error: out of memory\n'


@pytest.mark.thorough
def test_plot_writes_a_page_with_measurement_and_paper(bundle, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cost_sweep, 'preset_names', lambda: ('act',))
    page, out = tmp_path / 'cost.html', tmp_path / 'cost.json'
    assert bench(bundle, '--plot', str(page), '--json', str(out)) == 0
    text = page.read_text()
    assert f'wrote {page}' in capsys.readouterr().out
    figures = json.loads(out.read_text())['figures']
    axes = figures['cost']['axes']
    assert text.count('<svg') == len(axes) == 5
    for title in ('denoise steps', 'tokens of the padded prompt'):
        assert title in text
    measured = axes['steps'][0]['measured_ms']['hit']['median']
    assert f'<td>{measured:.3g}</td>' in text
    for device in DEVICES.values():
        assert f'<td class="name">{device.name}</td>' in text
    # Nothing is fetched: names of formats are no links.
    assert not re.search(r'(src|href)="http', text)


def test_it_recommends_the_fastest_of_what_runs_here(tmp_path, capsys, monkeypatch):
    folder = copy_bundle(tiny_onnx_bundle(), tmp_path / 'bundle')
    spec = read_bundle(folder, verify=False).spec
    (folder / 'verification.json').write_text(json.dumps({'onnx': {'precision': 'float32'}}))
    seal(folder, spec)
    times = {'onnxruntime': 8.0, 'torch': 4.0}

    def measured(bundle, options, progress):
        if options.backend not in times:
            raise ValueError('no such library')
        return {'milliseconds': {'miss': {'total': {'median': times[options.backend]}}}}

    monkeypatch.setattr(bench_module, 'run_bench', measured)
    assert bench(str(folder), '--device', 'cpu', '--recommend') == 0
    text = capsys.readouterr().out
    assert '# 2.00 times as fast as onnxruntime in float32 on cpu' in text
    told = yaml.safe_load(text[text.index('/**/vla_policy:') :])['/**/vla_policy']
    assert told['ros__parameters'] == {'backend': 'torch', 'device': 'cpu', 'precision': 'float32'}
    del times['torch']
    assert bench(str(folder), '--device', 'cpu', '--recommend') == 0
    text = capsys.readouterr().out
    assert 'torch in float32 on cpu cannot: no such library' in text
    assert 'backend: onnxruntime' in text
    assert bench(str(folder), '--recommend', '--json', '-') == 2


def test_a_recommendation_measures(bundle, capsys):
    assert bench(bundle, '--device', 'cpu', '--recommend') == 0
    assert re.match(r'torch in float32 on cpu +[\d.]+ ms\n', capsys.readouterr().out)
