"""ONNX files in int8, fp8 and NVFP4: what each keeps, and planted faults that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import int8_bundles
import numpy as np
import nvfp4_bundles
import pytest
from int8_bundles import OBSERVATIONS, int8_bundle, needs_int8
from nvfp4_bundles import nvfp4_bundle
from onnx_bundles import copy_bundle, load_graph, save_graph
from thorough import thorough_but
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_convert.export.onnx.bundle import export_bundle
from vla_convert.export.onnx.verification import check_graphs, verify_onnx
from vla_convert.export.receipt import VerificationError
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.engines.candidates import candidates
from vla_runtime.engines.recorded_cases import BOUNDS
from vla_runtime.policy import Policy


def fp8_bundle(folder: Path) -> Path:
    source = read_bundle(write_tiny_policy(folder / 'source', tiny_spec('smolvla')))
    return export_bundle(source, folder / 'fp8', 'fp8', observations=OBSERVATIONS).folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    'int8': lambda folder: int8_bundle(folder, **int8_bundles.GUIDED),
    'int8 of smolvla': lambda folder: int8_bundle(folder, 'smolvla'),
    'fp8': fp8_bundle,
    'nvfp4': nvfp4_bundle,
    # The last product of its MLP is in 8 bits.
    'nvfp4 and fp8': lambda folder: nvfp4_bundle(folder, mlp_dim=80),
}


def of(kind: str, *values: Any) -> Any:
    """A row of a table; int8 is computed where the CPU has instructions for it."""
    return pytest.param(kind, *values, marks=needs_int8 if 'int8' in kind else ())


@pytest.fixture(scope='module')
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A bundle of a kind, made once."""
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = MAKERS[kind](tmp_path_factory.mktemp('bundle'))
        return made[kind]

    return find


@pytest.mark.parametrize(
    ('kind', 'least', 'most'),
    thorough_but(
        [of('int8', 1e-7, 0.15), of('nvfp4', 1e-4, 0.3)],
        [of('int8', 1e-7, 0.15), of('nvfp4', 1e-4, 0.3), of('int8 of smolvla', 1e-7, 0.15)],
    ),
)
def test_chunks_are_near_those_of_float32_and_the_receipt_says_how_near(
    bundle_of, kind: str, least: float, most: float
):
    bundle, precision = bundle_of(kind), kind.split()[0]
    receipt = json.loads((bundle / 'verification.json').read_text())['onnx']
    assert receipt['precision'] == precision
    assert receipt['bounds']['chunk'] == BOUNDS[precision].chunk
    assert [case['observation'] for case in receipt['cases']] == [0, 8, 16][: len(receipt['cases'])]
    assert [one['unit'] for one in receipt['actions']] == ['rad'] * 3
    assert max(one['max_error'] for one in receipt['actions']) > 0.0
    chunks = []
    for backend, of_backend in (('torch', 'float32'), ('onnxruntime', precision)):
        policy = Policy.load(bundle, backend, precision=of_backend, threads=1)
        chunks.append(policy.infer(observation(99))[0].normalised)
        policy.close()
    error = np.abs(chunks[0] - chunks[1]).max() / max(1.0, np.abs(chunks[0]).max())
    assert least < error < most
    # The recorded cases give the same comparison again.
    again = verify_onnx(bundle, read_bundle(bundle).spec).figures()
    assert again['chunks'] == receipt['chunks']


IN_8, IN_4 = int8_bundles, nvfp4_bundles
SCALE_NOT_ABOVE_0, OTHER_SCALE = 'has a scale that is not above 0', 'widens by another scale than'
INT8_FAULTS = [
    (IN_8.widened_by_twice_the_scale, r'\(DequantizeLinear\) widens by another scale'),
    (IN_8.zero_point_of_one, r'\(QuantizeLinear\) needs a signed zero point of 0'),
    (IN_8.unsigned_input, 'uint8, which no part of a policy is computed in'),
    (IN_8.scales_along_the_rows, 'needs a scale for every column of its matrix, along axis 1'),
    (IN_8.one_scale_for_a_matrix, 'needs a scale for every column of its matrix'),
    (IN_8.input_that_is_not_rounded, r'\(MatMul\) multiplies a number in 8 bits by one that is'),
    (IN_8.scale_of_zero, SCALE_NOT_ABOVE_0),
]
NVFP4_FAULTS = [
    (IN_4.input_widened_by_twice_the_scale, OTHER_SCALE),
    (IN_4.input_that_is_not_rounded, 'multiplies a number in 4 bits by one that is not'),
    (IN_4.blocks_of_32, 'is to round the last axis in blocks of 16'),
    (IN_4.blocks_along_the_columns, 'needs blocks of 16 rows of its matrix'),
    (IN_4.scale_of_zero, SCALE_NOT_ABOVE_0),
    (IN_4.scales_of_another_input, 'widens by the scales of another input'),
    (IN_4.norm_of_rounded_numbers, r"'planted' \(Add\) computes with"),
]
# The rules of 8 bits hold beside 4.
BESIDE_FAULTS = [
    (IN_4.eight_bits_of_twice_the_scale, OTHER_SCALE),
    (IN_4.eight_bit_input_that_is_not_rounded, r'\(MatMul\) computes with'),
]


@pytest.mark.parametrize(
    ('kind', 'name', 'fault', 'text'),
    [
        of(kind, name, *row)
        for kind, names, rows in (
            ('int8', ('vision.onnx', 'expert_rows.onnx'), INT8_FAULTS),
            ('int8', ('vision.onnx',), [(IN_8.norm_of_rounded_numbers, r"'planted' \(Add\)")]),
            ('nvfp4', ('prefix.onnx', 'prefix_rows.onnx'), NVFP4_FAULTS),
            ('nvfp4 and fp8', ('prefix.onnx', 'prefix_rows.onnx'), BESIDE_FAULTS),
        )
        for name in names
        for row in rows
    ],
)
def test_a_product_that_another_runtime_would_read_otherwise_is_refused(
    bundle_of, tmp_path: Path, kind: str, name: str, fault, text: str
):
    planted = copy_bundle(bundle_of(kind), tmp_path / 'planted')
    model = load_graph(planted, name)
    fault(model, planted / ONNX_FOLDER)
    save_graph(model, planted, name)
    with pytest.raises(VerificationError, match=rf'{name}: .*{text}'):
        check_graphs(planted)


@pytest.mark.parametrize(
    ('kind', 'name', 'fault'),
    [
        of('int8', 'vision.onnx', IN_8.matrix_of_twice_the_scale),
        of('nvfp4', 'prefix.onnx', IN_4.matrix_of_twice_the_scale),
        of('nvfp4', 'prefix.onnx', IN_4.halves_of_bytes_swapped),
        of('nvfp4 and fp8', 'prefix.onnx', IN_4.eight_bit_matrix_of_twice_the_scale),
    ],
)
def test_verify_tells_a_matrix_that_is_not_the_bundles(
    bundle_of, tmp_path: Path, kind: str, name: str, fault
):
    planted = copy_bundle(bundle_of(kind), tmp_path / 'planted')
    model = load_graph(planted, name)
    fault(model, planted / ONNX_FOLDER)
    save_graph(model, planted, name)
    assert check_graphs(planted) == (kind.split()[0], 'float32')
    wrong = (
        "vision.onnx: '.*/int8' is not the bundle's matrix in 8 bits" if kind == 'int8' else None
    )
    with pytest.raises(VerificationError, match=wrong):
        verify_onnx(planted, read_bundle(planted, verify=False).spec)


@pytest.mark.parametrize('kind', [of('int8'), of('fp8'), of('nvfp4')])
def test_auto_never_takes_them_unjudged(bundle_of, kind: str):
    read = read_bundle(bundle_of(kind), verify=False)
    assert [one.precision for one in candidates(read, 'auto', 'cpu', 'auto')] == ['float32']
    assert [str(one) for one in candidates(read, 'auto', 'cpu', kind)] == [f'onnxruntime in {kind}']
    with pytest.raises(ValueError, match=kind):
        Policy.load(bundle_of(kind), 'torch', precision=kind)


@pytest.mark.parametrize('kind', [of('int8'), of('nvfp4')])
def test_files_of_another_precision_are_refused_by_name(bundle_of, kind: str):
    with pytest.raises(ValueError, match="'float32'"):
        Policy.load(bundle_of(kind), 'onnxruntime', precision='float32')
