"""`vla_runtime verify --backend tensorrt`: built engines, compared again, and left as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_cuda import CUresult
from onnx_bundles import reseal
from tensorrt_machine import Machine, linked_copy, write_exported_policy

from vla_convert.export.tensorrt.verification import verify_built
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.files.atomic_write import file_sha256


@pytest.fixture(scope='module')
def exported(tmp_path_factory) -> Path:
    return write_exported_policy(tmp_path_factory.mktemp('cli_verify_engines') / 'policy')


@pytest.fixture
def here(monkeypatch, exported, tmp_path) -> Machine:
    return Machine(monkeypatch, linked_copy(exported, tmp_path / 'policy'))


def verify(here: Machine, *options: str) -> int:
    return main(['verify', str(here.bundle), '--backend', 'tensorrt', *options])


def contents(folder: Path) -> dict[str, str]:
    return {str(path): file_sha256(path) for path in folder.rglob('*') if path.is_file()}


def test_built_engines_are_compared_with_pytorch_and_nothing_is_changed(here, tmp_path, capsys):
    here.build()
    before = contents(here.bundle)
    assert verify(here, '--json', str(tmp_path / 'receipt.json')) == 0
    out = capsys.readouterr().out
    assert 'float32 on Orin (TensorRT 11.4.0.106), 6 cases' in out
    assert 'all within the bounds' in out and 'note: CUDA graphs: vision captured' in out
    receipt = json.loads((tmp_path / 'receipt.json').read_text())
    assert receipt['gpu'] == 'Orin' and len(receipt['chunks']) == 6
    (folder,) = (here.bundle / 'engines').iterdir()
    assert receipt['files']['vision.engine'] == file_sha256(folder / 'vision.engine')
    assert contents(here.bundle) == before
    assert here.cuda.live == (0, 0)


def test_wrong_numbers_are_exit_code_1_and_the_engines_stay(here, capsys):
    here.build()
    before = contents(here.bundle)
    here.trt.distort = ('velocity', 1e-3)
    assert verify(here) == 1
    captured = capsys.readouterr()
    assert "FAILED: expert, 2 row(s): tensor 'velocity' differs from PyTorch" in captured.err
    assert 'all within' not in captured.out
    assert contents(here.bundle) == before


def test_a_comparison_that_is_stopped_says_so_also_where_closing_fails(here):
    metadata = here.build()

    def stop(_: int) -> None:
        here.cuda.broken = CUresult.CUDA_ERROR_LAUNCH_FAILED
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_built(read_bundle(here.bundle), metadata, device='cuda', advance=stop)


def test_engines_for_one_row_are_compared_on_the_cases_of_one_row(here, capsys):
    here.build(rows=1)
    assert verify(here) == 0
    assert '11.4.0.106), 3 cases' in capsys.readouterr().out


def test_engines_that_cannot_be_compared_are_exit_code_2(here, capsys):
    assert verify(here) == 2
    assert f'run: vla_runtime build {here.bundle}' in capsys.readouterr().err
    here.build()
    assert verify(here, '--device', 'cpu') == 2
    assert "device 'cpu' is not supported by backend 'tensorrt'" in capsys.readouterr().err
    graph = here.bundle / 'onnx' / 'vision.onnx'
    data = graph.read_bytes()
    graph.unlink()
    graph.write_bytes(data.replace(b'vla_runtime', b'vla_rantime'))
    assert verify(here) == 2
    assert 'vision.onnx: has changed' in capsys.readouterr().err
    reseal(here.bundle)
    assert verify(here) == 2
    assert 'was built from another onnx/vision.onnx' in capsys.readouterr().err


def test_no_gpu_is_exit_code_2(monkeypatch, exported, capsys):
    here = Machine(monkeypatch, exported, devices=None)
    assert verify(here) == 2
    assert 'no CUDA device answers here' in capsys.readouterr().err
