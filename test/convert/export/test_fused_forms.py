"""Norms, GELU and masks are written in the forms that ONNX Runtime runs as one operator."""

from __future__ import annotations

from collections import Counter

import onnx
import onnxruntime
import pytest
import torch
from onnx_bundles import tiny_onnx_bundle

from vla_convert.export.onnx.graph import GraphWriter
from vla_convert.export.onnx.operators import lowering
from vla_convert.export.onnx.weights import WeightFile
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.engines.onnx.session import session_options


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
