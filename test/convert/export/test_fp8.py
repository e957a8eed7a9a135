"""ONNX files in 8-bit floats: explicit quantisation as in int8, finer for small numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from int8_bundles import OBSERVATIONS, products_of
from onnx import TensorProto, numpy_helper
from onnx_bundles import load_graph
from tiny_policy import tiny_spec, write_tiny_policy

from vla_convert.export.onnx.bundle import export_bundle
from vla_convert.export.onnx.eight_bits import matrix_faults
from vla_convert.export.onnx.precision import precision_of, type_faults
from vla_convert.export.onnx.weights import BundleWeights
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.bundle.schema import WEIGHTS_FILE
from vla_runtime.models.base.flow_network import empty_network
from vla_runtime.models.blocks.layers import query_scales


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('fp8')
    source = read_bundle(write_tiny_policy(folder / 'source', tiny_spec('smolvla')))
    return export_bundle(source, folder / 'fp8', 'fp8', observations=OBSERVATIONS).folder


def test_both_factors_of_every_product_are_8_bit_floats(bundle):
    for name in ('vision.onnx', 'prefix_rows.onnx', 'expert_rows.onnx'):
        path = bundle / ONNX_FOLDER / name
        assert precision_of(path) == 'fp8'
        assert type_faults(path, 'fp8') == []
        model = load_graph(bundle, name)
        kinds = {item.name: item.data_type for item in model.graph.initializer}
        products = products_of(model)
        assert products
        for rounding, _, matrix, _ in products:
            assert kinds[rounding.input[2]] == kinds[matrix.input[0]] == TensorProto.FLOAT8E4M3FN


def test_matrices_are_the_bundles_to_half_a_step_and_a_wrong_scale_is_noticed(bundle):
    spec = read_bundle(bundle, verify=False).spec
    weights = BundleWeights(bundle / WEIGHTS_FILE)
    factors = query_scales(empty_network(spec.family, spec.dims))
    path = bundle / ONNX_FOLDER / 'expert.onnx'
    assert matrix_faults([path], weights, factors) == []
    model = onnx.load(path, load_external_data=False)
    _, _, matrix, _ = products_of(model)[0]
    for item in model.graph.initializer:
        if item.name == matrix.input[1]:
            scales = numpy_helper.to_array(item, str(path.parent))
            item.CopyFrom(numpy_helper.from_array(scales * np.float32(1.1), item.name))
    wrong = path.with_name('wrong.onnx')
    onnx.save_model(model, wrong)
    (fault,) = matrix_faults([wrong], weights, factors)
    wrong.unlink()
    assert matrix.input[0] in fault
