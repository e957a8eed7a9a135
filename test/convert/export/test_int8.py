"""ONNX files in 8 bits: calibrated on observations, compared on others, refused where wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from int8_bundles import (
    GUIDED,
    OBSERVATIONS,
    int8_bundle,
    needs_int8,
    numbers_of,
    products_of,
)
from onnx import TensorProto
from onnx_bundles import load_graph
from thorough import thorough_but

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.onnx.bundle import export_bundle
from vla_convert.export.onnx.calibration import calibration_cases
from vla_convert.export.onnx.export import meta_network
from vla_convert.export.onnx.precision import tensor_types, type_name
from vla_convert.export.onnx.verification import check_graphs
from vla_convert.export.onnx.weights import BundleWeights
from vla_convert.export.receipt import VerificationError
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, ROWS, ROWS_GRAPHS, engine_graphs
from vla_runtime.bundle.schema import WEIGHTS_FILE
from vla_runtime.cli.main import main
from vla_runtime.engines import devices
from vla_runtime.engines.onnx.session import SKIPPED_REWRITES, Placement, Session, session_options
from vla_runtime.models.blocks.layers import query_scales
from vla_runtime.policy import Policy

pytestmark = needs_int8


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return int8_bundle(tmp_path_factory.mktemp('int8'), **GUIDED)


def test_the_large_matrices_are_in_8_bits_and_nothing_else_computes_there(bundle: Path):
    assert check_graphs(bundle) == ('int8', 'float32')
    graph = load_graph(bundle, 'expert.onnx').graph
    made = {node.output[0]: node for node in graph.node}
    kinds = {item.name: item.data_type for item in graph.initializer}
    products = [node for node in graph.node if node.op_type == 'MatMul']
    reduced = [
        node
        for node in products
        if node.input[1] in made and kinds.get(made[node.input[1]].input[0]) == TensorProto.INT8
    ]
    # Two blocks of q, k, v in one, out, gate and up in one; out is 32 to 16 and down too, not more.
    assert len(reduced) == 2 * 4
    assert {kinds.get(node.input[1]) for node in products if 'action' in node.input[1]} == {
        TensorProto.FLOAT
    }
    for node in reduced:
        assert made[node.input[0]].op_type == 'DequantizeLinear'
        weight = made[node.input[1]]
        (scales,) = (item for item in graph.initializer if item.name == weight.input[1])
        assert scales.dims[0] > 1, 'a scale a column'


def test_both_operands_are_signed_with_zero_points_of_0_and_matrices_are_the_bundles(bundle: Path):
    weights, folder = BundleWeights(bundle / WEIGHTS_FILE), bundle / ONNX_FOLDER
    model = load_graph(bundle, 'expert.onnx')
    scales_of_queries = query_scales(meta_network(read_bundle(bundle).spec, torch.float32))
    for rounding, widening, matrix, _ in products_of(model):
        for node in (rounding, widening, matrix):
            zeros = numbers_of(model, node.input[2], folder)
            assert zeros.dtype == np.int8 and not zeros.any()
        found = numbers_of(model, matrix.input[0], folder)
        scales = numbers_of(model, matrix.input[1], folder)
        names = matrix.input[0].removesuffix('/int8').split('+')
        parts = [weights.read(name) * scales_of_queries.get(name, 1.0) for name in names]
        exact = torch.cat(parts).T.numpy()
        assert found.dtype == np.int8 and found.min() >= -127 and found.max() == 127
        assert (np.abs(found * scales - exact) <= scales / 2 * 1.001).all()
        # The scale is the smallest that holds the column.
        np.testing.assert_allclose(np.abs(exact).max(axis=0), scales * 127, rtol=1e-6)


def test_one_row_and_any_number_of_rows_have_the_same_scales(bundle: Path):
    def scales(name: str) -> list[float]:
        model = load_graph(bundle, name)
        places = (rounding.input[1] for rounding, *_ in products_of(model))
        return [float(numbers_of(model, place, bundle / ONNX_FOLDER)) for place in places]

    assert scales('prefix.onnx') == scales('prefix_r2.onnx') == scales('prefix_rows.onnx')
    assert scales('expert.onnx') == scales('expert_r2.onnx') == scales('expert_rows.onnx')
    assert len(set(scales('expert.onnx'))) > 1


def test_the_engine_computes_those_products_in_8_bits(bundle: Path, tmp_path: Path):
    options = session_options(1)
    options.optimized_model_filepath = str(tmp_path / 'as_run.onnx')
    skipped = list(SKIPPED_REWRITES['int8'])
    path = bundle / ONNX_FOLDER / 'vision.onnx'
    Session(path, Placement.of('cpu'), options, disabled_optimizers=skipped)
    run = onnx.load(tmp_path / 'as_run.onnx', load_external_data=False).graph.node
    kinds = [node.op_type for node in run]
    asked = [node.op_type for node in load_graph(bundle, 'vision.onnx').graph.node]
    # One MatMul for two that it reads from: its activation and its weight.
    rounded = asked.count('DequantizeLinear') - asked.count('QuantizeLinear')
    assert kinds.count('MatMulIntegerToFloat') == rounded > 0
    assert 'DequantizeLinear' not in kinds


def test_one_and_two_rows_share_the_weights_and_no_other_graph_is_left(bundle: Path):
    names = {path.name for path in (bundle / ONNX_FOLDER).glob('*.onnx')}
    assert names == {*engine_graphs(ROWS), *ROWS_GRAPHS}
    one, two = (load_graph(bundle, name).graph for name in ('expert.onnx', 'expert_r2.onnx'))
    places = [
        {
            item.name: {entry.key: entry.value for entry in item.external_data}
            for item in graph.initializer
            if item.data_type == TensorProto.INT8 and item.external_data
        }
        for graph in (one, two)
    ]
    assert places[0] and places[0] == places[1]


@pytest.mark.parametrize('beside', thorough_but(['bfloat16'], ['float16', 'bfloat16']))
def test_what_int8_leaves_out_is_in_the_half_that_was_asked_for(tmp_path: Path, beside):
    bundle = int8_bundle(tmp_path, 'pi05', beside)
    assert check_graphs(bundle) == ('int8', beside)
    receipt = json.loads((bundle / 'verification.json').read_text())['onnx']
    assert receipt['precision'] == 'int8'
    assert f'matrix products that int8 leaves out are in {beside}' in receipt['notes']
    types = tensor_types(bundle / ONNX_FOLDER / 'prefix.onnx', load_graph(bundle, 'prefix.onnx'))
    assert type_name(types['past_key']) == type_name(types['past_value']) == beside
    # Keys and values of the last layer are all that the head reads of it.
    assert {name: type_name(types[name]) for name in types if '.down.weight' in name} == {
        'language.blocks.0.mlp.down.weight': beside
    }
    # Inputs are rounded once: from float32, not from half.
    model = load_graph(bundle, 'prefix.onnx')
    assert {type_name(types[one.input[0]]) for one, *_ in products_of(model)} == {'float'}


def test_half_beside_int8_is_refused_without_int8(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked = ['--out', str(tmp_path / 'out'), '--beside-int8', 'bfloat16']
    assert main(['export', str(bundle), *asked]) == 2
    assert (
        '--beside-int8 bfloat16 is for --onnx-precision int8, fp8 and nvfp4'
        in capsys.readouterr().err
    )


def test_files_of_another_precision_device_or_cpu_are_refused(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match="'float32'"):
        Policy.load(bundle, 'onnxruntime', precision='float32')
    monkeypatch.setattr(devices, 'cpu_flags', lambda: {'avx2'})
    with pytest.raises(ValueError, match='instructions'):
        Policy.load(bundle, 'onnxruntime', precision='int8')
    source = read_bundle(bundle)
    with pytest.raises(ValueError, match='VNNI'):
        export_bundle(source, bundle.parent / 'never', 'int8', observations=OBSERVATIONS)
    assert not (bundle.parent / 'never').exists()


def test_held_out_observations_are_not_calibrated_on(bundle: Path):
    cases = calibration_cases(read_bundle(bundle), OBSERVATIONS)
    seen, held = ({case.words['observation'] for case in some} for some in (cases.seen, cases.held))
    assert held and not seen & held
    assert {case.rows for case in cases.seen} == {case.rows for case in cases.held} == {1, 2}
    # Both rows of a guided policy are its two prompts.
    guided = next(case for case in cases.seen if case.rows == 2)
    assert (guided.prefix_inputs['tokens'][0] != guided.prefix_inputs['tokens'][1]).any()


def test_too_few_observations_are_refused(bundle: Path):
    with pytest.raises(ExportError, match='observations'):
        calibration_cases(read_bundle(bundle), OBSERVATIONS[:3])


@pytest.mark.parametrize(
    'arguments', [['--onnx-precision', 'int8'], ['--calibration', 'bag']], ids=['int8', 'bag']
)
def test_int8_and_its_calibration_are_given_together(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    assert main(['export', str(bundle), '--out', str(tmp_path / 'out'), *arguments]) == 2
    assert 'record:=true on a robot, or vla_runtime demo --record BAG' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_files_beyond_the_bounds_are_not_written(tmp_path: Path):
    # Tokens of very different size stand side by side in ACT of random weights, under one scale.
    with pytest.raises(VerificationError, match=r"prefix\.onnx.*'cross_key'"):
        int8_bundle(tmp_path, 'act')
    assert not (tmp_path / 'int8').exists()
