"""Facts in onnx/graphs.json are those of the graphs, and refuse what a TensorRT cannot read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import onnx
import pytest
from tensorrt_machine import write_exported_policy

from vla_convert.export.tensorrt.build import OPERATORS_8_6, unsupported
from vla_runtime.bundle.onnx_files import (
    GRAPHS_FILE,
    ROWS_GRAPHS,
    GraphFacts,
    graph_names,
    read_graph_facts,
)
from vla_runtime.family.listing import find_family
from vla_runtime.files.json_file import JsonError
from vla_tools.selftest.policies import tried_families, unpack

EVERY_GRAPH = (*graph_names(), *ROWS_GRAPHS)


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> dict[str, Path]:
    """Exported graphs of each precision."""
    base = tmp_path_factory.mktemp('graphs')
    return {
        precision: write_exported_policy(base / precision, 'pi05', precision) / 'onnx'
        for precision in ('float32', 'float16', 'bfloat16')
    }


@pytest.mark.parametrize('precision', ['float32', 'float16', 'bfloat16'])
def test_the_facts_are_what_the_onnx_package_reads(folders, precision):
    exported = read_graph_facts(folders[precision], EVERY_GRAPH)
    assert exported.precision == precision
    for name, facts in exported.graphs.items():
        path = folders[precision] / name
        model = onnx.load(path, load_external_data=False)
        assert facts.operators == Counter(node.op_type for node in model.graph.node)
        assert facts.opset == model.opset_import[0].version
        onnx.load_external_data_for_model(model, str(path.parent))
        sizes = [onnx.numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer]
        assert facts.weight_bytes == sum(sizes)


def test_our_graphs_have_only_operators_that_8_6_reads(folders):
    for precision in ('float32', 'float16'):
        for graph in read_graph_facts(folders[precision], EVERY_GRAPH).graphs.values():
            assert unsupported(graph, precision, '8.6.1', False) == []
    expert = read_graph_facts(folders['bfloat16'], ['expert.onnx']).graphs['expert.onnx']
    assert unsupported(expert, 'bfloat16', '8.6.1', False) == ['bfloat16']
    assert unsupported(expert, 'bfloat16', '10.3.0', False) == []


def test_8_6_reads_the_graphs_of_every_family(tmp_path):
    unpack(tmp_path)
    for family in tried_families():
        graphs = read_graph_facts(tmp_path / family / 'onnx', ROWS_GRAPHS).graphs
        for name, graph in graphs.items():
            # Ternary weights are bytes in the file, which 8.6 cannot read: export says so.
            ternary = {'QuantizeLinear', 'DequantizeLinear'} & set(graph.operators)
            assert bool(ternary) <= find_family(family).rounds_activations, (family, name)
            assert set(unsupported(graph, 'float32', '8.6.0', False)) == ternary, (family, name)


def test_an_operator_and_a_set_that_8_6_does_not_know_are_named():
    graph = GraphFacts(opset=18, operators={'Mish': 1}, weight_bytes=0)
    assert 'Mish' not in OPERATORS_8_6
    assert unsupported(graph, 'float32', '8.6.1', False) == ['Mish', 'operator set 18 (at most 17)']


@pytest.mark.parametrize(
    ('field', 'value', 'message'),
    [
        ('opset', '17', r"graphs\.expert\.onnx.*'17'"),
        ('operators', {'Add': 'many'}, r'operators\.Add'),
        ('weight_bytes', None, 'weight_bytes'),
    ],
)
def test_a_damaged_fact_is_named(folders, tmp_path, field, value, message):
    document = json.loads((folders['float32'] / GRAPHS_FILE).read_text())
    document['graphs']['expert.onnx'][field] = value
    (tmp_path / GRAPHS_FILE).write_text(json.dumps(document))
    with pytest.raises(JsonError, match=message):
        read_graph_facts(tmp_path, ['expert.onnx'])


def test_a_precision_that_is_none_is_named(tmp_path):
    (tmp_path / GRAPHS_FILE).write_text('{"precision": "int4", "graphs": {}}')
    with pytest.raises(JsonError, match='field precision'):
        read_graph_facts(tmp_path, [])


def test_a_graph_without_facts_is_named(folders, tmp_path):
    document = {'precision': 'float32', 'text_table': '', 'graphs': {}}
    (tmp_path / GRAPHS_FILE).write_text(json.dumps(document))
    with pytest.raises(JsonError):
        read_graph_facts(tmp_path, ['vision.onnx'])


def test_a_missing_name_of_the_text_table_is_named(tmp_path):
    (tmp_path / GRAPHS_FILE).write_text('{"precision": "float32", "graphs": {}}')
    with pytest.raises(JsonError):
        read_graph_facts(tmp_path, [])
