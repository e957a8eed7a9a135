"""ONNX files in 8 bits: calibrated on observations, compared on others, refused where wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_bundles import copy_bundle, load_graph, save_graph
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.engines import cpu
from vla_runtime.engines.onnx.files import ONNX_FOLDER, ROWS, engine_graphs
from vla_runtime.engines.onnx.session import SKIPPED_REWRITES, Placement, Session, session_options
from vla_runtime.export.errors import ExportError
from vla_runtime.export.onnx.bundle import export_bundle
from vla_runtime.export.onnx.calibration import LEAST_OBSERVATIONS, calibration_cases
from vla_runtime.export.onnx.precision import type_faults
from vla_runtime.export.onnx.verification import check_graphs, verify_onnx
from vla_runtime.export.receipt import VerificationError
from vla_runtime.policy import Policy

OBSERVATIONS = [observation(seed) for seed in range(LEAST_OBSERVATIONS)]
GUIDED = {'advantage': 'task_newline'}
pytestmark = pytest.mark.skipif(
    not cpu._INT8 & cpu._flags(), reason='this CPU has no instructions for 8-bit products'
)


def int8_bundle(folder: Path, family: str = 'pi05', **facts) -> Path:
    source = read_bundle(write_tiny_policy(folder / 'source', tiny_spec(family, **facts)))
    return export_bundle(source, folder / 'int8', 'int8', observations=OBSERVATIONS).folder


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return int8_bundle(tmp_path_factory.mktemp('int8'), **GUIDED)


def test_the_large_matrices_are_in_8_bits_and_nothing_else_computes_there(bundle: Path):
    assert check_graphs(bundle) == 'int8'
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
    assert names == set(engine_graphs(ROWS))
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


@pytest.mark.parametrize('family', ['pi05', 'smolvla'])
def test_chunks_are_near_those_of_float32_and_the_receipt_says_how_near(
    tmp_path: Path, bundle: Path, family: str
):
    bundle = bundle if family == 'pi05' else int8_bundle(tmp_path, family)
    receipt = json.loads((bundle / 'verification.json').read_text())['onnx']
    assert receipt['precision'] == 'int8'
    assert [case['observation'] for case in receipt['cases']] == [0, 8, 16][: len(receipt['cases'])]
    assert [one['unit'] for one in receipt['actions']] == ['rad'] * 3
    assert max(one['max_error'] for one in receipt['actions']) > 0.0
    chunks = []
    for backend, precision in (('torch', 'float32'), ('onnxruntime', 'int8')):
        policy = Policy.load(bundle, backend, precision=precision, threads=1)
        chunks.append(policy.infer(observation(99))[0].normalised)
        policy.close()
    error = np.abs(chunks[0] - chunks[1]).max() / max(1.0, np.abs(chunks[0]).max())
    assert 1e-7 < error < 0.15
    # The recorded cases give the same comparison again.
    again = verify_onnx(bundle, read_bundle(bundle).spec).figures()
    assert again['chunks'] == receipt['chunks']


def test_a_norm_that_reads_rounded_numbers_is_found(bundle: Path, tmp_path: Path):
    planted = copy_bundle(bundle, tmp_path / 'planted')
    model = load_graph(planted, 'vision.onnx')
    nodes = list(model.graph.node)
    rounded = next(node.output[0] for node in nodes if node.op_type == 'DequantizeLinear')
    norm = next(node for node in nodes if node.op_type == 'LayerNormalization')
    added = helper.make_node('Add', [rounded, rounded], ['planted'], name='planted')
    place = max(i for i, node in enumerate(nodes) if rounded in node.output) + 1
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], added, *nodes[place:]])
    assert norm.op_type == 'LayerNormalization'
    save_graph(model, planted, 'vision.onnx')
    (fault,) = type_faults(planted / ONNX_FOLDER / 'vision.onnx', 'int8')[:1]
    assert "node 'planted' (Add) computes with" in fault


def test_files_of_another_precision_device_or_cpu_are_refused(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match=r"'float32' was asked for, .* were exported in int8"):
        Policy.load(bundle, 'onnxruntime', precision='float32')
    monkeypatch.setattr(cpu, '_flags', lambda: {'avx2'})
    with pytest.raises(ValueError, match=r'no instructions for 8-bit products \(VNNI'):
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
    with pytest.raises(ExportError, match=r'3 observations .* at least 20'):
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
    with pytest.raises(VerificationError, match=r"prefix.onnx: tensor 'cross_key' differs"):
        int8_bundle(tmp_path, 'act')
    assert not (tmp_path / 'int8').exists()
