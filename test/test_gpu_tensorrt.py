"""`benchmark/gpu_tensorrt.py` as far as a CPU goes: a tiny kit on a fake GPU, and its verdicts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_tensorrt import RELEASES, FakeTensorRT
from int8_bundles import needs_int8
from paths import ROOT

BENCHMARK = ROOT / 'benchmark'


@pytest.fixture(scope='module')
def script():
    sys.path.insert(0, str(BENCHMARK))
    import gpu_tensorrt

    yield gpu_tensorrt
    sys.path.remove(str(BENCHMARK))


@pytest.fixture(scope='module')
def prepared(script, tmp_path_factory) -> Path:
    kit = tmp_path_factory.mktemp('kit') / 'tiny'
    # TensorRT 8.6 knows no bfloat16.
    options = ['--size', 'tiny', '--precision', 'float16']
    assert script.main(['prepare', str(kit), *options]) == 0
    # It does not travel: `run` has to make it again.
    (kit / 'onnx' / 'weights.data').unlink()
    return kit


@pytest.fixture
def kit(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / 'kit'))


@pytest.fixture
def machine(script, monkeypatch) -> FakeTensorRT:
    """A fake GPU with TensorRT 8.6."""
    trt = FakeTensorRT(RELEASES[0], FakeCuda('NVIDIA H200', total_bytes=1 << 33))
    monkeypatch.setitem(sys.modules, 'tensorrt', trt)
    monkeypatch.setitem(sys.modules, 'cuda.bindings.driver', trt.cuda)
    return trt


def run(script, kit: Path, *options: str) -> int:
    return script.main(['run', str(kit), '--repeats', '2', *options])


@pytest.mark.thorough
def test_engines_that_compute_what_onnx_runtime_does_pass(script, kit, machine, tmp_path, capsys):
    out = tmp_path / 'figures.json'
    assert run(script, kit, '--json', str(out)) == 0
    figures = json.loads(out.read_text())['figures']
    assert {check['error'] <= 1e-3 for check in figures['checks'].values()} == {True}
    assert figures['device']['tensorrt'] == RELEASES[0] and figures['precision'] == 'float16'
    assert set(figures['cuda_graph']['graphs'].values()) == {'captured'}
    assert set(figures['cuda_graph']['plain'].values()) == {'eager'}
    assert list(figures['latency_ms']) == [
        'graphs, 1 row(s)',
        'graphs, 2 row(s)',
        'plain, 1 row(s)',
        'plain, 2 row(s)',
    ]
    assert 'whole chunk' in capsys.readouterr().out


def test_weights_are_drawn_again_to_the_same_bytes_and_others_are_refused(script, kit, capsys):
    from gpu_tensorrt import restore

    restored = restore(kit)
    weights = kit / 'onnx' / 'weights.data'
    data = bytearray(weights.read_bytes())
    assert restored.dims.language.width == 32
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match=r'weights\.data'):
        restore(kit)


def test_wrong_numbers_fail(script, kit, machine):
    path = kit / 'reference.npz'
    with np.load(path) as file:
        reference = dict(file)
    reference['past_value_r2'][0, 1, 0, 0] += 0.1 * np.abs(reference['past_value_r2']).max()
    np.savez(path, **reference)
    assert run(script, kit) == 1


def test_graphs_that_could_not_be_captured_fail(script, kit, machine):
    machine.cuda.stale_graphs = True
    assert run(script, kit) == 1


def test_a_machine_without_a_gpu_is_told_before_tensorrt_is_imported(
    script, kit, machine, monkeypatch, capsys
):
    machine.cuda.devices = 0
    monkeypatch.setattr(script, 'import_tensorrt', lambda: pytest.fail('TensorRT is imported'))
    assert run(script, kit) == 2
    assert 'the driver shows no GPU' in capsys.readouterr().err


def test_a_folder_that_was_not_prepared_is_told(script, machine, tmp_path, capsys):
    assert run(script, tmp_path) == 2
    assert 'make the folder with: gpu_tensorrt.py prepare' in capsys.readouterr().err


def test_preparing_over_something_is_refused(script, kit, capsys):
    assert script.main(['prepare', str(kit), '--size', 'tiny']) == 2
    assert f'{kit}: exists already; remove it or give another' in capsys.readouterr().err
    assert (kit / 'manifest.json').is_file()


def test_a_preparation_that_fails_leaves_nothing_behind(script, tmp_path, monkeypatch):
    def fails(*arguments: object) -> None:
        raise ValueError('no reference')

    monkeypatch.setattr('gpu_tensorrt._reference', fails)
    with pytest.raises(ValueError, match='no reference'):
        script.prepare(tmp_path / 'kit', 'tiny', 'float32')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@needs_int8
def test_int8_engines_are_compared_with_the_same_products_in_int8(
    script, tmp_path, monkeypatch, capsys
):
    kit, out = tmp_path / 'kit', tmp_path / 'figures.json'
    prepare = ['prepare', str(kit), '--size', 'tiny', '--precision', 'int8']
    assert script.main(prepare) == 0
    trt = FakeTensorRT(RELEASES[1], FakeCuda('NVIDIA H200', total_bytes=1 << 33))
    monkeypatch.setitem(sys.modules, 'tensorrt', trt)
    monkeypatch.setitem(sys.modules, 'cuda.bindings.driver', trt.cuda)
    assert run(script, kit, '--json', str(out)) == 0
    figures = json.loads(out.read_text())['figures']
    errors = [check['error'] for check in figures['checks'].values() if check['bound']]
    # Half beside against float32 beside: other ranges or matrices would differ by more.
    assert figures['precision'] == 'int8' and 1e-4 < max(errors) < 4e-2
    (kit / 'onnx' / 'weights.data').unlink()
    assert run(script, kit) == 2
    assert 'the weights of a kit in int8 travel with it' in capsys.readouterr().err


@pytest.mark.thorough
def test_bfloat16_engines_are_compared_with_the_same_weights_in_float32(
    script, tmp_path, monkeypatch
):
    kit, out = tmp_path / 'kit', tmp_path / 'figures.json'
    prepared = script.main(['prepare', str(kit), '--size', 'tiny', '--precision', 'bfloat16'])
    assert prepared == 0
    (kit / 'onnx' / 'weights.data').unlink()
    trt = FakeTensorRT(RELEASES[1], FakeCuda('NVIDIA H200', total_bytes=1 << 33))
    monkeypatch.setitem(sys.modules, 'tensorrt', trt)
    monkeypatch.setitem(sys.modules, 'cuda.bindings.driver', trt.cuda)
    assert run(script, kit, '--json', str(out)) == 0
    figures = json.loads(out.read_text())['figures']
    errors = [check['error'] for check in figures['checks'].values() if check['bound']]
    # Rounded, and no more than that: other weights would differ by 1.
    assert figures['precision'] == 'bfloat16' and 1e-3 < max(errors) < 4e-2
