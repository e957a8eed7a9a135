"""What is read of ONNX files without the onnx package, compared with what that package says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
from tensorrt_machine import write_exported_policy

from vla_runtime.export.tensorrt.graph import OPERATORS_8_6, summarise


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> dict[str, Path]:
    """Exported graphs of each precision."""
    base = tmp_path_factory.mktemp('graphs')
    return {
        precision: write_exported_policy(base / precision, 'pi05', precision) / 'onnx'
        for precision in ('float32', 'float16', 'bfloat16')
    }


@pytest.mark.parametrize('precision', ['float32', 'float16', 'bfloat16'])
def test_the_summary_is_what_the_onnx_package_reads(folders, precision):
    for path in sorted(folders[precision].glob('*.onnx')):
        summary = summarise(path)
        model = onnx.load(path, load_external_data=False)
        assert summary.operators == Counter(node.op_type for node in model.graph.node)
        assert summary.opset == model.opset_import[0].version
        assert summary.precision == precision
        assert [file.name for file in summary.files] == [path.name, 'weights.data']
        onnx.load_external_data_for_model(model, str(path.parent))
        sizes = [onnx.numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer]
        assert summary.weight_bytes == sum(sizes)


def test_our_graphs_have_only_operators_that_8_6_reads(folders):
    for precision in ('float32', 'float16'):
        for path in folders[precision].glob('*.onnx'):
            assert summarise(path).unsupported('8.6.1') == []
    assert summarise(folders['bfloat16'] / 'expert.onnx').unsupported('8.6.1') == ['bfloat16']
    assert summarise(folders['bfloat16'] / 'expert.onnx').unsupported('10.3.0') == []


def test_an_operator_and_a_set_that_8_6_does_not_know_are_named(tmp_path):
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in 'xy'
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node('Mish', ['x'], ['y'])], 'g', [values[0]], [values[1]]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid('', 18)])
    onnx.save(model, tmp_path / 'g.onnx')
    assert 'Mish' not in OPERATORS_8_6
    assert summarise(tmp_path / 'g.onnx').unsupported('8.6.1') == [
        'Mish',
        'operator set 18 (at most 17)',
    ]


def test_a_missing_file_says_which_command_makes_it(tmp_path):
    with pytest.raises(ValueError, match=r'vision\.onnx: is missing; .* vla_runtime export'):
        summarise(tmp_path / 'vision.onnx')


def test_missing_weights_are_named(folders, tmp_path):
    path = tmp_path / 'expert.onnx'
    path.write_bytes((folders['float32'] / 'expert.onnx').read_bytes())
    with pytest.raises(ValueError, match=r'weights\.data: is missing; expert\.onnx keeps'):
        summarise(path)


def test_every_truncation_is_noticed_or_reads_as_less(folders, tmp_path):
    data = (folders['float32'] / 'vision.onnx').read_bytes()
    path = tmp_path / 'vision.onnx'
    (tmp_path / 'weights.data').write_bytes(b'')
    for size in range(0, len(data), 997):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match='ONNX file'):
            summarise(path)


@pytest.mark.parametrize('data', [b'', b'{"json": 1}', b'\xff' * 100, b'\x08\x08'])
def test_what_is_no_onnx_file_is_told(data, tmp_path):
    path = tmp_path / 'expert.onnx'
    path.write_bytes(data)
    with pytest.raises(ValueError, match='ONNX file'):
        summarise(path)
