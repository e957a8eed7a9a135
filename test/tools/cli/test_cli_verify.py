"""`vla_runtime export` with ONNX files and `verify`, as their users run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint_folders import lerobot_arguments, lerobot_folder
from fake_cuda import CUresult
from onnx_bundles import copy_bundle, load_graph, reseal, save_graph, tiny_onnx_bundle
from onnx_faults import change_weight, norm_in_half, position_in_half
from tensorrt_machine import Machine, linked_copy, write_exported_policy

from vla_convert.export.receipt import ChunkComparison, Receipt
from vla_convert.export.tensorrt.verification import verify_built
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.files.atomic_write import file_sha256
from vla_tools.cli._comparison import show_receipt


def test_a_bundle_made_by_export_is_verified_and_its_receipt_written(tmp_path, capsys):
    bundle = tmp_path / 'bundle'
    arguments = ['export', str(lerobot_folder()), '--out', str(bundle), *lerobot_arguments()]
    assert main([*arguments, '--onnx-precision', 'float16']) == 0
    assert 'onnx/expert_r2.onnx' in read_bundle(bundle).spec.files
    told = capsys.readouterr().out
    made = json.loads((bundle / 'verification.json').read_text())['onnx']
    assert main(['verify', str(bundle), '--json', str(tmp_path / 'receipt.json')]) == 0
    text = capsys.readouterr().out
    # The export has told the same, and how to ask again.
    assert text in told
    assert told.endswith(f'verify {bundle}\n')
    assert 'float16 on cpu (CPUExecutionProvider), 6 cases' in text
    assert 'all within the bounds' in text
    again = json.loads((tmp_path / 'receipt.json').read_text())
    assert again['cases'] == made['cases']
    assert again['tensors'] == made['tensors']


@pytest.mark.parametrize('worst', [(0.02, 0.03), (float('nan'), 0.1)])
def test_of_the_chunks_the_one_nearest_to_its_own_bound_is_shown(capsys, worst):
    def chunk(case: int, largest: float, bound: float) -> ChunkComparison:
        return ChunkComparison(
            'prefix.onnx', 'vision and prefix.onnx', case, 1.0, largest, 1e-3, bound, 'gain'
        )

    # The largest error and the largest bound are those of others.
    chunks = [chunk(0, 0.04, 0.09), chunk(1, *worst), chunk(2, 1e-3, 0.01)]
    show_receipt(Receipt('float16', 'cpu', [{}] * 3, [], chunks, []))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if 'prefix' in line)
    assert line.split()[1:] == [
        'chunk',
        'of',
        'case',
        '1',
        *(f'{x:.2g}' for x in worst[:1]),
        '0.001',
        f'{worst[1]:.2g}',
    ]


@pytest.mark.parametrize(
    ('fault', 'message'),
    [
        (norm_in_half, 'ReduceMean'),
        (position_in_half, 'must not be in half'),
    ],
)
def test_a_planted_precision_fault_is_exit_code_1_and_named(tmp_path, capsys, fault, message):
    bundle = copy_bundle(tiny_onnx_bundle('pi05', 'float16'), tmp_path / 'planted')
    model = load_graph(bundle, 'prefix.onnx')
    fault(model)
    save_graph(model, bundle, 'prefix.onnx')
    # Whoever made the file also hashed it: the hash says nothing about what is in it.
    reseal(bundle)
    assert main(['verify', str(bundle)]) == 1
    text = capsys.readouterr().err
    assert text.startswith('FAILED: ')
    assert 'prefix.onnx' in text
    assert message in text


def test_other_numbers_are_exit_code_1_and_the_tensor_is_named(tmp_path, capsys):
    bundle = copy_bundle(tiny_onnx_bundle(), tmp_path / 'changed')
    change_weight(bundle, 'expert.blocks.0.mlp', 1.01)
    reseal(bundle)
    assert main(['verify', str(bundle)]) == 1
    captured = capsys.readouterr()
    assert "FAILED: expert.onnx: tensor 'velocity' differs from PyTorch" in captured.err
    assert 'all within' not in captured.out


def test_onnx_files_for_a_bundle_take_only_the_options_that_apply(tmp_path, capsys):
    source = str(tiny_onnx_bundle())
    target = tmp_path / 'made'
    assert main(['export', source, '--out', str(target), '--horizon', '9']) == 2
    said = capsys.readouterr().err
    apply = ('--out', '--force', '--dry-run', '--onnx-precision', '--beside-int8', '--attention')
    assert all(option in said for option in (*apply, '--calibration'))
    assert main(['export', source, '--out', str(target), '--dry-run']) == 0
    assert 'nothing was written' in capsys.readouterr().out
    assert not target.exists()


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
