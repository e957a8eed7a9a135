"""Bundles in int8 and bfloat16: from ONNX files to engines of a TensorRT that computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
from fake_tensorrt import RELEASES
from int8_bundles import GUIDED, int8_bundle, needs_int8
from tensorrt_machine import Machine, write_exported_policy
from thorough import thorough_but
from tiny_policy import observation

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.engines.candidates import Candidate, candidates
from vla_runtime.engines.recorded_cases import BOUNDS
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

pytestmark = needs_int8
BUILD = ['build', '--precision', 'int8']


@pytest.fixture(scope='module')
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return int8_bundle(tmp_path_factory.mktemp('int8'), 'pi05', 'bfloat16', **GUIDED)


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / 'bundle'))


@pytest.mark.parametrize('beside', thorough_but(['bfloat16'], ['float32', 'float16', 'bfloat16']))
def test_int8_engines_pass_their_receipt_and_give_chunks_within_its_bounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundle: Path, beside
):
    if beside != 'bfloat16':
        bundle = int8_bundle(tmp_path, 'pi05', beside, **GUIDED)
    here = Machine(monkeypatch, bundle, RELEASES[1])
    assert main([*BUILD, str(bundle)]) == 0
    (path,) = bundle.glob('engines/*/verification.json')
    receipt = json.loads(path.read_text())
    assert f'matrix products that int8 leaves out are in {beside}' in receipt['notes']
    # Strongly typed: the graph says what is in int8, and no flag of the builder.
    assert not {'INT8', 'FP16'} & {name for config in here.trt.configs for name in config._flags}
    check_chunks(bundle, receipt, 'int8', 1e-4)


def test_bfloat16_engines_pass_their_receipt_and_give_chunks_within_its_bounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    bundle = write_exported_policy(tmp_path / 'policy', 'pi0', 'bfloat16')
    Machine(monkeypatch, bundle)
    assert main(['build', str(bundle)]) == 0
    (path,) = bundle.glob('engines/*/verification.json')
    # Rounded, and no more than that: engines in float32 err by 5e-5 at most.
    check_chunks(bundle, json.loads(path.read_text()), 'bfloat16', 5e-5)


def check_chunks(bundle: Path, receipt: dict[str, Any], precision: str, least: float) -> None:
    """Chunks are rounded, and not more than the bounds allow; so the receipt says."""
    assert receipt['precision'] == precision
    errors = [item['max_error'] for item in receipt['chunks']]
    assert least < max(errors) <= min(item['bound'] for item in receipt['chunks'])
    for settings in (PolicySettings(), PolicySettings(cfg_enabled=True, cfg_beta=2.0)):
        found, expected = (
            _normalised(bundle, *place, settings)
            for place in (('tensorrt', 'cuda', precision), ('torch', 'cpu', 'float32'))
        )
        error = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
        assert (least if precision == 'int8' else 0.0) < error <= BOUNDS[precision].chunk


def test_int8_has_to_be_named(monkeypatch: pytest.MonkeyPatch, bundle: Path, capsys):
    Machine(monkeypatch, bundle, RELEASES[1])
    assert main(['build', str(bundle)]) == 2
    assert 'are int8, and bfloat16 was asked for' in capsys.readouterr().err


def test_8_6_refuses_matrices_in_int8_by_name(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, capsys
):
    Machine(monkeypatch, bundle, RELEASES[0])
    assert main([*BUILD, str(bundle)]) == 2
    said = capsys.readouterr().err
    assert f'the files are int8, which TensorRT {RELEASES[0]} cannot run (it takes no' in said
    assert not list(bundle.glob('engines/*/*.engine'))


def test_a_product_that_the_parser_leaves_out_of_int8_stops_the_build(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, capsys
):
    def without_the_first(trt, path: Path):
        layers = parsed(trt, path)
        kinds = trt.LayerType
        rounding = next(one for one in layers if one.type == kinds.QUANTIZE)
        widened = next(one for one in layers if one.type == kinds.DEQUANTIZE).get_output(0)
        products = [one for one in layers if one.type == kinds.MATRIX_MULTIPLY]
        product = next(one for one in products if one.get_input(0) is widened)
        product.set_input(0, rounding.get_input(0))
        return layers

    parsed = fake_tensorrt._product_layers
    monkeypatch.setattr(fake_tensorrt, '_product_layers', without_the_first)
    Machine(monkeypatch, bundle, RELEASES[1])
    assert main([*BUILD, str(bundle)]) == 2
    said = capsys.readouterr().err
    assert 'vision.onnx: TensorRT 10.3.0 finds ' in said
    assert 'products in int8, and the file has' in said
    assert not list(bundle.glob('engines/*/*.engine'))


def test_engines_with_wrong_numbers_are_removed(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, capsys
):
    here = Machine(monkeypatch, bundle, RELEASES[1])
    here.trt.distort = ('velocity', 0.5)
    assert main([*BUILD, str(bundle)]) == 1
    assert 'the bound for int8 is 0.1' in capsys.readouterr().err
    assert list(bundle.glob('engines/*/rejected.json'))
    assert not list(bundle.glob('engines/*/*.engine'))


def test_auto_leaves_int8_engines_alone(monkeypatch: pytest.MonkeyPatch, bundle: Path):
    Machine(monkeypatch, bundle, RELEASES[1])
    assert main([*BUILD, str(bundle)]) == 0
    read = read_bundle(bundle)
    engines = Candidate('tensorrt', 'int8')
    assert engines not in candidates(read, 'auto', 'cuda', 'auto')
    with pytest.raises(ValueError, match="'auto'"):
        candidates(read, 'tensorrt', 'cuda', 'auto')
    assert candidates(read, 'tensorrt', 'cuda', 'int8') == [engines]


def _normalised(bundle: Path, backend, device, precision, settings) -> np.ndarray:
    """The chunk before it is turned into units, which the bounds are for."""
    policy = Policy.load(bundle, backend, device, precision=precision, settings=settings)
    trace = []
    policy.infer(observation(), on_step=lambda index, x, velocity: trace.append(x))
    policy.close()
    return trace[-1]
