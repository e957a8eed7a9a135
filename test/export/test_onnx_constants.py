"""Constants that say float32 and were rounded before they were written."""

from __future__ import annotations

import onnx_faults as faults
import pytest
from onnx_bundles import copy_bundle, load_graph, save_graph, tiny_onnx_bundle
from safetensors.torch import load_file, save_file

from vla_runtime.bundle_schema import WEIGHTS_FILE
from vla_runtime.engines.onnx_files import ONNX_FOLDER, graph_names
from vla_runtime.export.onnx_constants import constant_faults
from vla_runtime.export.onnx_verification import VerificationError, check_graphs
from vla_runtime.export.onnx_weights import BundleWeights


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
@pytest.mark.parametrize('precision', ['float32', 'float16', 'bfloat16'])
def test_every_exported_graph_has_exact_constants(family, precision):
    bundle = tiny_onnx_bundle(family, precision)
    weights = BundleWeights(bundle / WEIGHTS_FILE)
    for name in graph_names():
        assert constant_faults(bundle / ONNX_FOLDER / name, weights) == []


@pytest.mark.parametrize('precision', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize(
    ('name', 'fault', 'named'),
    [
        ('prefix.onnx', faults.rotary_frequencies_rounded, 'constant_'),
        ('expert_r2.onnx', faults.rotary_frequencies_rounded, 'constant_'),
        ('monolithic.onnx', faults.rotary_frequencies_rounded, 'constant_'),
        ('vision.onnx', faults.position_embedding_rounded, 'position_embedding'),
    ],
)
def test_a_constant_that_was_rounded_before_is_found(tmp_path, precision, name, fault, named):
    bundle = copy_bundle(tiny_onnx_bundle('pi05', precision), tmp_path / 'planted')
    model = load_graph(bundle, name)
    fault(model)
    save_graph(model, bundle, name)
    half = 'bfloat16' if precision == 'bfloat16' else 'float16'
    message = f"{name}: the constant '.*{named}.*' is in float32, but all its numbers are {half}'s"
    with pytest.raises(VerificationError, match=message):
        check_graphs(bundle)


def test_what_the_bundle_itself_stores_in_half_may_be_so_but_rotary_frequencies_may_not(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle('pi05', 'bfloat16'), tmp_path / 'stored')
    stored = load_file(bundle / WEIGHTS_FILE)
    save_file({name: value.bfloat16() for name, value in stored.items()}, bundle / WEIGHTS_FILE)
    model = load_graph(bundle, 'vision.onnx')
    faults.position_embedding_rounded(model)
    save_graph(model, bundle, 'vision.onnx')
    assert check_graphs(bundle) == 'bfloat16'
    model = load_graph(bundle, 'prefix.onnx')
    faults.rotary_frequencies_rounded(model)
    save_graph(model, bundle, 'prefix.onnx')
    with pytest.raises(VerificationError, match=r'prefix\.onnx: the constant'):
        check_graphs(bundle)


def test_a_matrix_under_the_name_of_another_is_found(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle('pi05', 'float16'), tmp_path / 'planted')
    for name, listed, message in (
        ('prefix.onnx', 'language.blocks.1.mlp.down.weight', r"is \(32, 1\); the bundle's is"),
        ('expert.onnx', 'expert.blocks.9.mlp.down.weight', 'not of this bundle'),
    ):
        model = load_graph(bundle, name)
        faults.norm_mean_as_product(model)
        planted = model.graph.initializer[-1]
        for node in model.graph.node:
            for place, other in enumerate(node.input):
                if other == planted.name:
                    node.input[place] = listed
        planted.name = listed
        save_graph(model, bundle, name)
        with pytest.raises(VerificationError, match=f"{name}: the matrix '{listed}' .*{message}"):
            check_graphs(bundle)
