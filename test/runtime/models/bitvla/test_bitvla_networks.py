"""BitVLA's networks against the reference cases, ternary layers from their recorded codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from bitvla_cases import BitVlaCase, load_bitvla_case, unnormalised
from network_cases import network_case_paths, relative_error
from onnx import TensorProto
from onnx_bundles import load_graph, tiny_onnx_bundle
from tiny_policy import tiny_dims
from torch import Tensor

from vla_convert.export.onnx.ternary import ENDING
from vla_convert.readers.bitvla import NAMES
from vla_runtime.models.blocks.ternary import TernaryLinear, quantise_tokens, unpack

pytestmark = pytest.mark.cases
TOLERANCE = 1e-5
# Layers that read the same tokens as another, whose input is recorded.
_SHARED = {'k_proj': 'q_proj', 'v_proj': 'q_proj', 'up_proj': 'gate_proj'}

PATHS = network_case_paths('bitvla')
each = pytest.mark.parametrize('path', PATHS, ids=[path.stem for path in PATHS])
entries = pytest.mark.parametrize(
    ('path', 'request_number'),
    [
        pytest.param(path, request, id=f'{path.stem}-{request}')
        for path in PATHS
        for request in load_bitvla_case(path).requests
    ],
)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= TOLERANCE


def layers_of(case: BitVlaCase) -> Iterator[tuple[str, str, TernaryLinear]]:
    """Yield the recorded name of each ternary layer that runs, that of its input, and our layer."""
    modules = dict(case.network.named_modules())
    for name in case.description['bit_linears']:
        ours = NAMES.ours(f'{name}.weight')
        assert ours is not None
        layer = modules.get(ours.removesuffix('.weight'))
        # The tower's last block is recorded, and nothing reads it.
        if layer is not None:
            stem, _, leaf = name.rpartition('.')
            assert isinstance(layer, TernaryLinear)
            yield name, f'{stem}.{_SHARED.get(leaf, leaf)}', layer


@each
def test_ternary_layers_from_their_recorded_inputs(path: Path):
    case = load_bitvla_case(path)
    found = 0
    for name, source, layer in layers_of(case):
        recorded = {key: case.tensors.get(f'bit.{source}.{key}') for key in ('input', 'codes')}
        weights = unpack(layer.packed, layer.in_features)
        assert torch.equal(weights, case.tensors[f'bit.{name}.ternary'])
        close(layer.weight_scale, case.tensors[f'bit.{name}.scale'][0])
        codes, scale = quantise_tokens(recorded['input'])
        assert torch.equal(codes, recorded['codes'])
        assert torch.equal(scale, case.tensors[f'bit.{source}.activation_scale'])
        close(layer.product(codes, scale), case.tensors[f'bit.{name}.output'])
        found += 1
    d = case.description
    assert found == 6 * d['v_feature_layers'] + 7 * d['depth']


@entries
def test_embeddings_and_layers_from_recorded_image_features(path: Path, request_number: int):
    case = load_bitvla_case(path)
    network, tensors, dims = case.network, case.tensors, case.network.dims
    images = tensors[f'image_features_{request_number}']
    rows = case.rows(request_number)
    embeddings, mask = network.embed_prefix(images, case.visible(), **rows)
    close(embeddings[mask], tensors[f'input_embeddings_{request_number}'])
    x, positions = network.read(embeddings, mask)
    length = len(tensors[f'input_ids_{request_number}'])
    assert positions[mask].tolist() == list(range(length))
    features = network.language.norm(x)[mask]
    if differ_by_codes(features, tensors[f'hidden_{request_number}']):
        pytest.skip('an activation on the edge between two codes went the other way')
    close(features, tensors[f'hidden_{request_number}'])
    past = network.prefix(images, case.visible(), **rows)['action_features']
    assert past.shape == (1, dims.horizon, dims.action_dim * dims.language.width)
    close(past.view(dims.action_places, -1), tensors[f'action_hidden_{request_number}'])


def differ_by_codes(found: Tensor, expected: Tensor) -> bool:
    """Return whether a difference is more than rounding and less than a mistake makes."""
    return TOLERANCE < relative_error(found, expected) < 0.1


@entries
def test_actions(path: Path, request_number: int):
    case = load_bitvla_case(path)
    tensors = case.tensors
    head = case.network.head(
        tensors[f'action_hidden_{request_number}'].view(1, case.network.dims.horizon, -1)
    )
    close(head[0], tensors[f'normalized_actions_{request_number}'])
    actions = case.network.actions(case.past(request_number))[0]
    # A code on the edge between two moves the actions by up to this (families' semantics).
    error = relative_error(actions, tensors[f'normalized_actions_{request_number}'])
    assert error <= (TOLERANCE if case.path.stem.endswith(('_a', '_b')) else 0.1)
    robot = unnormalised(case.description, actions.numpy().astype(np.float64))
    assert np.abs(robot - tensors[f'actions_{request_number}'].numpy()).max() <= max(
        2 * TOLERANCE, 2 * error
    )


def test_ternary_matrices_are_whole_numbers_in_the_files():
    bundle = tiny_onnx_bundle('bitvla')
    ternaries = [
        item
        for item in load_graph(bundle, 'prefix.onnx').graph.initializer
        if item.name.endswith(ENDING)
    ]
    # Queries, keys and values are one product, and so are gate and up.
    assert len(ternaries) == 4 * tiny_dims('bitvla').language.depth
    assert {item.data_type for item in ternaries} == {TensorProto.INT8}
