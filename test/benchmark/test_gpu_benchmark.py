"""benchmark/gpu.py: runs where torch and numpy are all there is, and keeps what it had found.

There is no GPU here, so everything runs on the CPU at a tiny size; graphs are then 'eager'.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from paths import ROOT

from vla_runtime.engines import preflight

sys.path.insert(0, str(ROOT / 'benchmark'))

import gpu
from parts import gpu_checks, gpu_latency

# What a GPU machine may lack; some of it this project needs elsewhere.
ABSENT = ('cv2', 'sentencepiece', 'tokenizers', 'rclpy', 'mujoco', 'onnx', 'onnxruntime', 'PIL')
TINY = ['--device', 'cpu', '--size', 'tiny']
ONE_CHECK = {'right': lambda device, size: gpu_checks.Finding(True, 'equal')}


def written(path) -> dict:
    return json.loads(path.read_text())['figures']


def test_a_pytorch_that_does_not_see_the_gpu_is_told(monkeypatch, capsys):
    monkeypatch.setattr(preflight, 'driver_devices', lambda: (1, ''))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert gpu.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'error: PyTorch {torch.__version__} (')
    assert 'does not see the GPU that the driver shows' in error


def test_without_pytorch_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'torch', None)
    assert gpu.main([]) == 2
    assert "the Python package 'torch' is not installed" in capsys.readouterr().err


def test_overlapped_chunks_are_compared_with_those_of_one_after_the_other():
    found = gpu_checks.overlap('cpu', 'tiny')
    assert found.passed, found.note


@pytest.mark.thorough
def test_it_runs_from_the_source_tree_without_what_a_gpu_machine_lacks(tmp_path):
    out = tmp_path / 'gpu.json'
    blocked = '; '.join(f'sys.modules[{name!r}] = None' for name in ABSENT)
    code = f'import sys; {blocked}; import runpy; sys.argv = {["gpu.py", *TINY]!r} + sys.argv[1:]; '
    code += f'runpy.run_path({str(ROOT / "benchmark" / "gpu.py")!r}, run_name="__main__")'
    # On a busy machine a tiny policy takes longer than a large one on a GPU.
    command = [sys.executable, '-c', code, '--quick', '--budget-s', '3600', '--json', str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f'wrote {out}'
    result = json.loads(out.read_text())
    assert result['versions']['torch'] == torch.__version__
    assert '--quick' in result['command']
    figures = result['figures']
    assert set(figures['checks']) == set(gpu_checks.CHECKS)
    assert all(check['passed'] for check in figures['checks'].values())
    assert [(r['rows'], r['mode']) for r in figures['latency']] == [
        (1, 'graph'),
        (2, 'graph'),
        (1, 'eager'),
        (2, 'eager'),
    ]


def test_an_exit_code_of_1_says_that_a_check_failed(monkeypatch, capsys):
    failing = {'wrong': lambda device, size: gpu_checks.Finding(False, 'off by 1')}
    monkeypatch.setattr(gpu_checks, 'CHECKS', failing)
    assert gpu.main([*TINY, '--only', 'checks']) == 1
    assert 'FAILED  off by 1' in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize('dies_in', ['checks', 'second configuration', 'table'])
def test_whatever_ends_a_run_all_that_it_had_found_is_written(monkeypatch, tmp_path, dies_in):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    checks = dict(ONE_CHECK)
    if dies_in == 'checks':
        checks['second'] = stop
    measured = []
    real = gpu_latency.measure

    def measure(*arguments, **options):
        if dies_in == 'second configuration' and measured:
            stop()
        measured.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(gpu_checks, 'CHECKS', checks)
    monkeypatch.setattr(gpu_latency, 'measure', measure)
    if dies_in == 'table':
        monkeypatch.setattr(gpu, 'show', stop)
    out = tmp_path / 'gpu.json'
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*TINY, '--quick', '--json', str(out)])
    figures = written(out)
    assert figures['checks'] == {'right': {'passed': True, 'note': 'equal', 'figures': {}}}
    counts = {'checks': 0, 'second configuration': 1, 'table': 4}
    assert len(figures['latency']) == counts[dies_in]
    assert figures['complete'] == (dies_in == 'table')
    assert [path.name for path in tmp_path.iterdir()] == ['gpu.json']


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch, capsys, tmp_path
):
    (tmp_path / 'file').write_text('')
    monkeypatch.setattr(gpu_checks, 'CHECKS', {})
    assert gpu.main([*TINY, '--json', str(tmp_path / 'file' / 'gpu.json')]) == 2
    assert capsys.readouterr().err.startswith('error: ')


def test_a_process_that_waits_for_a_library_ends_all_the_same(tmp_path):
    code = (
        f'import sys; sys.path.insert(0, {str(ROOT / "benchmark")!r}); import signal\n'
        'from parts import gpu_run\n'
        # What Python's own interruption does not reach.
        'signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n'
        'with gpu_run.ended_after(0.5), gpu_run.limited(0.1):\n'
        '    while True: pass'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'Timeout' in done.stderr


@pytest.mark.thorough
def test_every_familys_chunks_are_compared_and_those_of_one_that_is_wrong_fail(monkeypatch):
    found = gpu_checks.families('cpu', 'tiny')
    assert found.passed, found.note
    with tarfile.open(gpu_checks.POLICIES) as archive:
        folders = {
            Path(name).parts[0] for name in archive.getnames() if name.endswith('policy.yaml')
        }
    assert {'act', 'openvla', 'pi05'} <= folders
    for family in folders:
        assert {f'{family} {precision} rows=2' for precision in gpu_checks.BOUNDS} <= set(
            found.figures
        )
    assert {e for name, e in found.figures.items() if 'float32' in name} == {0.0}
    load, loaded = gpu_checks.load_network, []

    def with_a_wrong_weight(family, *of, device, precision):
        network = load(family, *of, device=device, precision=precision)
        loaded.append(family)
        if family == 'groot_n17' and precision == 'float32' and loaded.count(family) == 1:
            # The device's; the next is the CPU's.
            with torch.no_grad():
                max(network.parameters(), key=torch.numel).mul_(2.0)
        return network

    monkeypatch.setattr(gpu_checks, 'load_network', with_a_wrong_weight)
    found = gpu_checks.families('cpu', 'tiny')
    assert not found.passed and found.figures['groot_n17 float32 rows=1'] > 2e-4
    # On a GPU an eager network is a fault; here all are eager.
    monkeypatch.setattr(
        gpu_checks,
        'load_network',
        lambda *of, device, precision: load(*of, device='cpu', precision=precision),
    )
    found = gpu_checks.families('cuda', 'tiny')
    assert not found.passed and 'act float32: vision eager' in found.note
