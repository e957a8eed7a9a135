"""What must be in float32 or integers is, in every exported graph; planted faults are found."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto
from onnx_bundles import copy_bundle, load_graph, save_graph, tiny_onnx_bundle
from onnx_faults import (
    norm_in_half,
    position_in_half,
    softmax_in_half,
    token_index_in_float,
    update_in_half,
)

from vla_runtime.engines.onnx_files import ONNX_FOLDER, graph_names
from vla_runtime.export.onnx_precision import precision_faults, precision_of
from vla_runtime.export.onnx_verification import VerificationError, check_graphs

HALF = TensorProto.FLOAT16


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
@pytest.mark.parametrize('precision', ['float32', 'float16', 'bfloat16'])
def test_every_exported_graph_keeps_the_rules(family, precision):
    folder = tiny_onnx_bundle(family, precision) / ONNX_FOLDER
    for name in graph_names():
        assert precision_faults(folder / name, precision) == []
        assert precision_of(folder / name) == precision


def test_half_files_hold_their_matrices_in_half_and_nothing_else():
    graph = load_graph(tiny_onnx_bundle('pi05', 'float16'), 'expert.onnx').graph
    kinds = {t.name: t.data_type for t in graph.initializer if '+' in t.name or 'blocks' in t.name}
    assert set(kinds.values()) == {HALF}
    assert {t.name for t in graph.initializer if t.data_type == HALF} == set(kinds)


FAULTS = [
    ('prefix.onnx', norm_in_half, 'ReduceMean.*float16'),
    ('prefix_r2.onnx', softmax_in_half, 'Softmax.*float16'),
    ('prefix.onnx', position_in_half, 'index, mask or count must not be in half'),
    ('prefix_r2.onnx', token_index_in_float, 'index must be computed in integers'),
    ('expert.onnx', norm_in_half, 'ReduceMean.*float16'),
    ('expert_r2.onnx', update_in_half, 'Add.*float16'),
    ('monolithic.onnx', softmax_in_half, 'Softmax.*float16'),
]


def plant(fault, name: str, source: Path, target: Path) -> Path:
    """A copy of a bundle with a fault in one of its graphs, which still runs."""
    bundle = copy_bundle(source, target)
    model = load_graph(bundle, name)
    fault(model)
    save_graph(model, bundle, name)
    onnx.checker.check_model(str(bundle / ONNX_FOLDER / name), full_check=True)
    return bundle


@pytest.mark.parametrize('precision', ['float32', 'float16'])
@pytest.mark.parametrize(('name', 'fault', 'message'), FAULTS)
def test_a_planted_fault_is_found_and_named(tmp_path, precision, name, fault, message):
    bundle = plant(fault, name, tiny_onnx_bundle('pi05', precision), tmp_path / 'planted')
    with pytest.raises(VerificationError, match=f'(?s){name}.*{message}'):
        check_graphs(bundle)


def test_a_float32_file_in_a_float16_bundle_is_no_fault_but_the_other_way_round_is():
    folder = tiny_onnx_bundle('pi05', 'float16') / ONNX_FOLDER
    assert any(
        'meant to be' in fault for fault in precision_faults(folder / 'expert.onnx', 'float32')
    )


def test_a_node_with_an_inside_of_its_own_is_a_fault(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle(), tmp_path / 'planted')
    model = load_graph(bundle, 'vision.onnx')
    model.graph.node[-1].domain = 'com.microsoft'
    model.opset_import.add(domain='com.microsoft', version=1)
    save_graph(model, bundle, 'vision.onnx')
    with pytest.raises(VerificationError, match='an inside of its own'):
        check_graphs(bundle)


def test_a_file_that_is_no_graph_is_an_error(tmp_path):
    (tmp_path / 'broken.onnx').write_bytes(b'nothing of the kind')
    with pytest.raises(ValueError, match=r'broken\.onnx: is not an ONNX file'):
        precision_of(tmp_path / 'broken.onnx')
