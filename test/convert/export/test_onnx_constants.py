"""Constants that say float32 and were rounded before they were written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx_faults as faults
import pytest
import torch
from graph_constants import constant_faults
from graph_walk import bundle_faults
from onnx_bundles import copy_bundle, load_graph, save_graph, tiny_onnx_bundle
from safetensors.torch import load_file, save_file
from thorough import thorough_but
from tiny_policy import tiny_spec, write_tiny_policy
from torch import Tensor

from vla_convert.export.onnx.export import write_onnx
from vla_convert.export.onnx.weights import BundleWeights
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, Precision, graph_names
from vla_runtime.bundle.schema import WEIGHTS_FILE


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
@pytest.mark.parametrize(
    'precision', thorough_but(['float32', 'float16'], ['float32', 'float16', 'bfloat16'])
)
def test_every_exported_graph_has_exact_constants(family, precision):
    bundle = tiny_onnx_bundle(family, precision)
    weights = BundleWeights(bundle / WEIGHTS_FILE)
    for name in graph_names():
        assert constant_faults(bundle / ONNX_FOLDER / name, weights) == []


@pytest.mark.parametrize('precision', thorough_but(['float16'], ['float32', 'float16', 'bfloat16']))
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
    assert found(bundle, message)


def test_what_the_bundle_itself_stores_in_half_may_be_so_but_rotary_frequencies_may_not(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle('pi05', 'bfloat16'), tmp_path / 'stored')
    stored = load_file(bundle / WEIGHTS_FILE)
    save_file({name: value.bfloat16() for name, value in stored.items()}, bundle / WEIGHTS_FILE)
    model = load_graph(bundle, 'vision.onnx')
    faults.position_embedding_rounded(model)
    save_graph(model, bundle, 'vision.onnx')
    assert bundle_faults(bundle) == []
    model = load_graph(bundle, 'prefix.onnx')
    faults.rotary_frequencies_rounded(model)
    save_graph(model, bundle, 'prefix.onnx')
    assert found(bundle, r'prefix\.onnx: the constant')


@pytest.mark.parametrize('precision', thorough_but(['float16'], ['float32', 'float16', 'bfloat16']))
def test_weights_in_bfloat16_whose_norms_are_large_are_not_taken_for_rounded(tmp_path, precision):
    """One plus such a weight is a number of float16 and none of bfloat16."""

    def large_norms(name: str, value: Tensor) -> Tensor:
        is_norm = name.startswith('language.') and 'norm' in name
        drawn = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) * 1.5 + 0.3
        return (drawn if is_norm else value).bfloat16()

    bundle = exported(tmp_path / 'bundle', precision, large_norms)
    norms = [name for name in BundleWeights(bundle / WEIGHTS_FILE).names if 'language' in name]
    assert any('norm' in name for name in norms)
    assert bundle_faults(bundle) == []


def test_queries_too_small_for_float16_are_not_taken_for_another_matrix(tmp_path):
    def vanishing(name: str, value: Tensor) -> Tensor:
        if '.attention.q.' in name and value.ndim == 2:
            value[0] *= 1e-8
        return value

    assert bundle_faults(exported(tmp_path / 'bundle', 'float16', vanishing)) == []


def found(bundle: Path, message: str) -> bool:
    return any(re.search(message, fault) for fault in bundle_faults(bundle))


def exported(bundle: Path, precision: Precision, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A tiny policy with changed weights, and its ONNX files."""
    write_tiny_policy(bundle, tiny_spec())
    spec = read_bundle(bundle).spec
    stored = load_file(bundle / WEIGHTS_FILE)
    changed = {name: change(name, value) for name, value in stored.items()}
    save_file(changed, bundle / WEIGHTS_FILE)
    write_onnx(bundle, spec, precision)
    return bundle


@pytest.mark.parametrize('precision', thorough_but(['float16'], ['float16', 'bfloat16']))
@pytest.mark.parametrize(
    ('listed', 'columns', 'message'),
    [
        ('language.blocks.9.attention.q.weight', 1, 'is in half and not of this bundle'),
        ('language.blocks.1.attention.q.weight', 1, r"is \(32, 1\); the bundle's is \(32, 32\)"),
        # As wide as the bundle's, so that every column is the mean.
        ('language.blocks.1.attention.q.weight', 32, 'does not lie in weights.data'),
    ],
)
def test_a_norms_mean_under_the_name_of_a_matrix_is_found(
    tmp_path, precision, listed, columns, message
):
    # The prefix has no queries in its last layer: the name is free.
    bundle = copy_bundle(tiny_onnx_bundle('pi05', precision), tmp_path / 'planted')
    model = load_graph(bundle, 'prefix.onnx')
    faults.norm_mean_as_product(model, columns)
    faults.rename_constant(model, model.graph.initializer[-1].name, listed)
    save_graph(model, bundle, 'prefix.onnx')
    assert found(bundle, f"prefix.onnx: the matrix '{listed}' {message}")


@pytest.mark.parametrize('precision', thorough_but(['float16'], ['float16', 'bfloat16']))
@pytest.mark.parametrize('part', ['q.weight', 'v.weight', 'down.weight'])
def test_a_matrix_that_holds_a_mean_is_found(tmp_path, precision, part):
    bundle = copy_bundle(tiny_onnx_bundle('pi05', precision), tmp_path / 'planted')
    model = load_graph(bundle, 'prefix.onnx')
    name = faults.fill_matrix(bundle, model, part, 1 / 32)
    assert found(bundle, rf"'{re.escape(name)}' holds other numbers than")
