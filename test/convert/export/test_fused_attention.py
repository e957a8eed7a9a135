"""Attention as ONNX's own operator: what is written, its numbers, and who may read it."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from onnx_bundles import copy_weights, load_graph, tiny_onnx_bundle
from tiny_policy import tiny_spec

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.onnx.bundle import FUSED_HEADS, check_attention, export_bundle
from vla_convert.export.onnx.export import write_onnx
from vla_convert.export.onnx.graph import GraphWriter
from vla_convert.export.onnx.operators import lowering
from vla_convert.export.onnx.verification import verify_onnx
from vla_convert.export.onnx.weights import WeightFile
from vla_convert.export.tensorrt.build import unsupported
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, GraphFacts
from vla_runtime.bundle.schema import STATISTICS_FILE
from vla_runtime.engines.onnx.session import session_options


@pytest.fixture(scope='module', params=['bfloat16', 'float16'])
def fused(request, tmp_path_factory) -> Path:
    """Graphs of a tiny pi0.5, whose four query heads share one key head."""
    folder = tmp_path_factory.mktemp('fused') / 'policy'
    folder.mkdir()
    source = tiny_onnx_bundle('pi05')
    copy_weights(source, folder)
    for name in (STATISTICS_FILE, 'tokenizer.json'):
        shutil.copyfile(source / name, folder / name)
    spec = read_bundle(source, verify=False).spec
    write_onnx(folder, spec, request.param, attention='fused')
    return folder


def test_query_heads_are_not_folded_into_their_key_heads_length(fused):
    for name in ('prefix.onnx', 'expert_r2.onnx', 'monolithic.onnx'):
        model = onnx.shape_inference.infer_shapes(load_graph(fused, name), strict_mode=True)
        values = (*model.graph.input, *model.graph.value_info)
        shapes = {
            value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
            for value in values
        }
        nodes = [node for node in model.graph.node if node.op_type == 'Attention']
        for node in nodes:
            (_, heads, tokens, _), (_, key_heads, keys, _) = (
                shapes[name] for name in node.input[:2]
            )
            assert heads in (2, 4) and heads // key_heads in (1, 4)
            assert tokens <= keys
            if len(node.input) > 3:
                assert shapes[node.input[3]][1:] == [1, tokens, keys]
        assert nodes and not any(node.op_type == 'Softmax' for node in model.graph.node)


def test_its_numbers_are_within_the_bounds_of_its_precision(fused):
    spec = read_bundle(tiny_onnx_bundle('pi05'), verify=False).spec
    assert verify_onnx(fused, spec).failures == []


def test_it_is_refused_in_float32_before_anything_is_written(tmp_path):
    source = read_bundle(tiny_onnx_bundle('pi05'), verify=False)
    with pytest.raises(ExportError, match='attention'):
        export_bundle(source, tmp_path / 'out', 'float32', attention='fused')
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('family', ['evo1', 'act'])
def test_heads_that_no_kernel_has_are_refused_before_anything_is_written(tmp_path, family):
    source = read_bundle(tiny_onnx_bundle(family), verify=False)
    named = 'those of prefix have 8, those of expert have 8'
    with pytest.raises(ExportError, match=f'heads of 9 to 256 numbers, and {named}'):
        export_bundle(source, tmp_path / 'out', 'bfloat16', attention='fused')
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('size', [FUSED_HEADS[0] + 1, FUSED_HEADS[1]])
def test_heads_within_the_bounds_are_let_through(size):
    spec = tiny_spec('pi05')
    parts = {
        part: replace(getattr(spec.dims, part), head_dim=size) for part in ('language', 'expert')
    }
    check_attention('fused', 'bfloat16', replace(spec, dims=replace(spec.dims, **parts)))


@pytest.mark.parametrize(
    ('version', 'rtx', 'reads'),
    [
        ('8.6.1', False, False),
        ('10.13.0', False, False),
        ('10.14.1', False, True),
        ('11.4.0', False, True),
        ('1.7.1.116', True, True),
    ],
)
def test_a_tensorrt_that_cannot_read_it_is_told_before_a_build(version, rtx, reads):
    graph = GraphFacts(23, {'Attention': 2, 'MatMul': 9}, 1)
    assert (unsupported(graph, 'bfloat16', version, rtx) == []) == reads


def test_files_without_it_are_as_they_were(fused):
    exact = load_graph(tiny_onnx_bundle('pi05', 'bfloat16'), 'prefix.onnx')
    assert exact.opset_import[0].version == 17
    assert (fused / ONNX_FOLDER / 'prefix.onnx').is_file()


def operators_run(family: str, name: str, folder) -> Counter[str]:
    """How often ONNX Runtime runs each operator of a graph on a CPU."""
    path = tiny_onnx_bundle(family) / ONNX_FOLDER / name
    options = session_options(1)
    options.optimized_model_filepath = str(folder / name)
    onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    graph = onnx.load(folder / name, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


@pytest.mark.parametrize('family', ['pi05', 'pi0', 'smolvla'])
def test_norms_and_gelu_are_one_operator_each_and_one_choice_makes_the_mask(family, tmp_path):
    dims = read_bundle(tiny_onnx_bundle(family)).spec.dims
    expert = operators_run(family, 'expert.onnx', tmp_path)
    prefix = operators_run(family, 'prefix.onnx', tmp_path)
    assert expert['SimplifiedLayerNormalization'] == 2 * dims.expert.depth + 1
    # The last layer ends with its keys and values.
    assert prefix['SimplifiedLayerNormalization'] == 2 * dims.language.depth - 1
    gelus = (0, 0) if family == 'smolvla' else (dims.expert.depth, dims.language.depth - 1)
    assert (expert['FastGelu'], prefix['FastGelu']) == gelus
    # SmolVLA's layers that look at the prefix alone have a mask of their own.
    assert expert['Where'] == (2 if family == 'smolvla' else 1)


@pytest.mark.parametrize(
    'family', ['pi05', 'pi0', 'smolvla', 'evo1', 'groot_n15', 'groot_n16', 'groot_n17']
)
@pytest.mark.parametrize('network', ['vision', 'prefix', 'expert'])
def test_no_norm_or_gelu_runs_operator_by_operator(family, network, tmp_path):
    counts = operators_run(family, f'{network}.onnx', tmp_path)
    assert not counts.keys() & {'Pow', 'ReduceMean', 'Sqrt', 'Tanh'}


def test_all_heads_of_a_layer_are_rotated_at_once(tmp_path):
    dims = read_bundle(tiny_onnx_bundle('pi05')).spec.dims
    assert operators_run('pi05', 'expert.onnx', tmp_path)['Neg'] == dims.expert.depth


@pytest.fixture
def graph(tmp_path):
    with WeightFile(tmp_path, lambda count: None) as weights:
        yield GraphWriter('graph', weights)


def test_parts_that_are_joined_again_in_order_are_what_was_split(graph):
    x = graph.input('x', torch.float32, (2, 6))
    parts = graph.split(x, [(2, 1), (2, 2), (2, 3)], -1)
    write = lowering('cat.default')
    assert write(graph, torch.empty(2, 6), parts, 1) is x
    for some, width in ((parts[::-1], 6), (parts[:2], 3), (parts[1:], 5), ([parts[0], *parts], 7)):
        joined = write(graph, torch.empty(2, width), some, 1)
        assert joined.name.startswith('Concat') and joined.shape == (2, width)
    halves = graph.split(graph.input('y', torch.float32, (2, 2)), [(1, 2), (1, 2)], 0)
    assert write(graph, torch.empty(1, 4), halves, 1).name.startswith('Concat')
