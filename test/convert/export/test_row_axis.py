"""One graph for any number of prompt rows: the numbers of the graph for each, bit for bit."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx_bundles import load_graph, tiny_onnx_bundle
from tiny_policy import TINY_FAMILIES

from vla_runtime.bundle.onnx_files import ONNX_FOLDER, ROWS, graph_name

TYPES = {'tensor(float)': np.float32, 'tensor(bool)': np.bool_, 'tensor(int64)': np.int64}


def session(path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # ONNX Runtime fuses more where it knows every shape, and then rounds differently.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])


def draw(ports) -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    given = {}
    for port in ports:
        dtype = TYPES[port.type]
        if dtype is np.float32:
            given[port.name] = random.standard_normal(port.shape, np.float32)
        elif dtype is np.bool_:
            # The first places are seen in every row, the last in none.
            given[port.name] = np.broadcast_to(np.arange(port.shape[-1]) < 3, port.shape).copy()
        else:
            given[port.name] = random.integers(0, 20, port.shape)
    return given


@pytest.mark.parametrize('family', TINY_FAMILIES)
@pytest.mark.parametrize('network', ['prefix', 'expert'])
def test_the_graph_of_any_rows_gives_what_the_graph_of_each_gives(family, network):
    folder = tiny_onnx_bundle(family) / ONNX_FOLDER
    general = session(folder / f'{network}_rows.onnx')
    for rows in ROWS:
        static = session(folder / graph_name(network, rows))
        given = draw(static.get_inputs())
        assert [port.name for port in general.get_inputs()] == list(given)
        found, expected = general.run(None, given), static.run(None, given)
        for port, one, other in zip(static.get_outputs(), found, expected, strict=True):
            assert one.shape == tuple(port.shape)
            np.testing.assert_array_equal(one, other, err_msg=port.name)


def test_the_rows_axis_is_all_that_is_not_static():
    graph = load_graph(tiny_onnx_bundle('pi05'), 'prefix_rows.onnx').graph
    named = {
        port.name: [dim.dim_param or dim.dim_value for dim in port.type.tensor_type.shape.dim]
        for port in (*graph.input, *graph.output)
    }
    assert named['image_mask'] == [2]
    assert named['token_mask'] == ['rows', 64]
    assert named['past_key'][1] == 'rows' and named['past_key'].count('rows') == 1
