"""ONNX files in NVFP4: 4-bit floats in blocks of 16, emulated in float32 on a CPU."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import nvfp4_bundles as faults
import onnx
import pytest
import torch
from fake_tensorrt import RELEASES
from onnx import TensorProto
from onnx_bundles import copy_bundle, load_graph
from tensorrt_machine import Machine

from vla_convert.export.onnx.four_bits import FourBits, four_bit_codes
from vla_convert.export.onnx.graph import FLOAT4_OPSET, GraphWriter
from vla_convert.export.onnx.precision import precision_of, type_faults
from vla_convert.export.onnx.quantised_products import Matrix
from vla_convert.export.onnx.verification import check_graphs
from vla_convert.export.onnx.weights import WeightFile
from vla_runtime.bundle.onnx_files import FP4_VALUES, ONNX_FOLDER, read_graph_facts
from vla_runtime.cli.main import main
from vla_runtime.engines.onnx.four_bit_emulation import emulated
from vla_runtime.engines.onnx.session import SKIPPED_REWRITES, Placement, Session, session_options

GRAPHS = ('prefix.onnx', 'prefix_rows.onnx')


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.nvfp4_bundle(tmp_path_factory.mktemp('nvfp4'))


@pytest.fixture(scope='module')
def with_8_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the last product of an MLP in 8 bits."""
    return faults.nvfp4_bundle(tmp_path_factory.mktemp('with_8_bits'), mlp_dim=80)


def test_numbers_are_rounded_as_the_type_is_defined():
    numbers = np.linspace(-8, 8, 1601, dtype=np.float32)
    codes = four_bit_codes(torch.from_numpy(numbers)).numpy()
    table = np.array([*FP4_VALUES, *(-value for value in FP4_VALUES)], np.float32)
    expected = np.clip(numbers, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(table[codes], expected)


def in_blocks(x: np.ndarray, unit: np.float32) -> np.ndarray:
    """Numbers of the last axis as NVFP4 has them, by the library of the types."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    scales = (np.abs(blocks).max(-1, keepdims=True) / np.float32(6) / unit).clip(max=448)
    scales = scales.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * unit
    with np.errstate(divide='ignore', invalid='ignore'):
        units = np.nan_to_num(np.clip(blocks / scales, -6, 6))
    numbers = units.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (numbers * scales).reshape(x.shape)


def product(
    folder: Path, matrix: torch.Tensor, x: np.ndarray, largest: float, folded: bool
) -> np.ndarray:
    """x by a matrix in NVFP4, on a CPU, where calibration saw numbers up to `largest`."""
    with WeightFile(folder) as file:
        graph = GraphWriter('product', file, FLOAT4_OPSET)
        given = graph.input('x', torch.float32, x.shape)
        named = Matrix('some', torch.float32, tuple(matrix.shape), lambda: matrix)
        ranges = {'some': (-largest, 1.0)}
        (y,) = FourBits(ranges, 'float32').products(graph, given, 'some', [named])
        graph.output('y', y)
    path = folder / 'graph.onnx'
    onnx.save_model(graph.model(), path)
    skipped = [*SKIPPED_REWRITES['nvfp4'], *([] if folded else ['ConstantFolding'])]
    options = session_options(1)
    session = Session(
        path, Placement.of('cpu'), options, emulated(path), disabled_optimizers=skipped
    )
    return session.run({'x': x})['y']


BOTH_WAYS = pytest.mark.parametrize(
    'folded', [True, False], ids=['as the engine', 'as the receipt']
)


@BOTH_WAYS
def test_an_input_halfway_between_two_numbers_goes_to_the_even_one(tmp_path: Path, folded: bool):
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    # The largest sets the block's scale, a power of two as the unit is: nothing else is rounded.
    numbers = [6.0, *halfway, -6.0, *(-value for value in halfway)]
    expected = [6.0, *even, -6.0, *(-value for value in even)]
    scale, unit = 2.0**-3, 2.0**-10
    x = np.array([numbers], np.float32) * np.float32(scale)
    np.testing.assert_array_equal(in_blocks(x, np.float32(unit))[0] / scale, expected)
    # The diagonal of a square matrix shows each number alone.
    y = product(tmp_path, torch.eye(16), x, 6 * 448 * unit, folded)
    np.testing.assert_allclose(y[0] / scale, expected, rtol=1e-5)


@BOTH_WAYS
def test_a_product_is_that_of_the_rounded_numbers(tmp_path: Path, folded: bool):
    random = np.random.default_rng(0)
    inner, columns, largest = 48, 24, 4.0
    matrix = torch.from_numpy(random.standard_normal((inner, columns), dtype=np.float32))
    # A block of zeros, and one that is nothing beside the others.
    matrix[:16, 0], matrix[16:32, 1] = 0.0, matrix[16:32, 1] * 1e-9
    x = random.standard_normal((2, 5, inner)).astype(np.float32)
    # Beyond what calibration saw, and zeros.
    x[0, 0, 3], x[1, 2, 16:32] = 9.0, 0.0
    y = product(tmp_path, matrix, x, largest, folded)
    unit = np.float32(np.abs(matrix.numpy()).max() / np.float32(6 * 448))
    right = in_blocks(matrix.numpy().T, unit).T
    expected = in_blocks(x, np.float32(largest / (6 * 448))) @ right
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - x @ matrix.numpy()).max() > 0.05


def test_both_factors_are_4_bit_floats_with_a_scale_for_16(bundle: Path):
    for name in GRAPHS:
        path = bundle / ONNX_FOLDER / name
        assert precision_of(path) == 'nvfp4'
        assert type_faults(path, 'nvfp4') == []
        model = load_graph(bundle, name)
        stored = {item.name: item for item in model.graph.initializer}
        products = faults.products_of(model)
        # The last layer hands on keys and values alone: one MLP is left.
        assert [matrix.input[0].split('.')[-2] for *_, matrix, _ in products] == ['up', 'down']
        for _, _, _, scales, matrix, _ in products:
            numbers, blocks = stored[matrix.input[0]], stored[scales.input[0]]
            assert numbers.data_type == TensorProto.FLOAT4E2M1
            assert blocks.data_type == TensorProto.FLOAT8E4M3FN
            rows, columns = numbers.dims
            assert [*blocks.dims] == [rows // 16, columns]
            place = {entry.key: entry.value for entry in numbers.external_data}
            assert int(place['length']) == rows * columns // 2
    onnx.checker.check_model(bundle / ONNX_FOLDER / 'vision.onnx')


def test_a_width_that_is_no_multiple_of_16_stays_beside(bundle: Path):
    """The tiny vision tower is 24 wide, and its MLP 32 within."""
    ((*_, matrix, _),) = faults.products_of(load_graph(bundle, 'vision.onnx'))
    assert matrix.input[0] == 'vision.blocks.0.mlp.fc2.weight/nvfp4'


def test_the_last_product_of_an_mlp_is_in_8_bits_beside(with_8_bits: Path):
    model = load_graph(with_8_bits, 'prefix.onnx')
    kinds = {item.name: item.data_type for item in model.graph.initializer}
    rounded = [node for node in model.graph.node if node.op_type == 'QuantizeLinear']
    assert [kinds[node.input[2]] for node in rounded] == [TensorProto.FLOAT8E4M3FN]
    downs = [name for name in kinds if name.endswith('.down.weight/fp8')]
    assert [kinds[name] for name in downs] == [TensorProto.FLOAT8E4M3FN]
    facts = read_graph_facts(with_8_bits / ONNX_FOLDER, GRAPHS).graphs
    assert {one.int8_products for one in facts.values()} == {2}


def test_the_head_is_in_no_bits_that_its_chunks_would_not_bear(bundle: Path):
    for name in ('expert.onnx', 'expert_rows.onnx'):
        assert faults.products_of(load_graph(bundle, name)) == []
        assert precision_of(bundle / ONNX_FOLDER / name) == 'float32'


def test_what_nvfp4_leaves_out_is_in_the_half_that_was_asked_for(tmp_path: Path):
    bundle = faults.nvfp4_bundle(tmp_path, 'bfloat16')
    assert check_graphs(bundle) == ('nvfp4', 'bfloat16')


@pytest.mark.parametrize(
    ('release', 'capability', 'text'),
    [
        (
            '10.3.0',
            (11, 0),
            'the files are nvfp4, which TensorRT 10.3.0 cannot run (it reads 4-bit floats from',
        ),
        (RELEASES[-1], (8, 7), 'has no products in 4-bit floating point (nvfp4)'),
    ],
)
def test_a_release_or_a_gpu_without_4_bits_is_refused_by_name(
    monkeypatch, bundle: Path, tmp_path: Path, capsys, release, capability, text
):
    assert release in RELEASES
    copy = copy_bundle(bundle, tmp_path / 'copy')
    Machine(monkeypatch, copy, release, capability=capability)
    assert main(['build', '--precision', 'nvfp4', str(copy)]) == 2
    assert text in capsys.readouterr().err
