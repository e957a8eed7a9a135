"""The graphs of a bundle are compared with policy.yaml when they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto
from onnx_bundles import copy_bundle, load_graph, reseal, save_graph, tiny_onnx_bundle
from thorough import thorough_after

from vla_runtime.policy import Policy


@pytest.fixture
def bundle(tmp_path) -> Path:
    return copy_bundle(tiny_onnx_bundle(), tmp_path / 'bundle')


def load_fails(bundle: Path, words: str) -> None:
    reseal(bundle)
    with pytest.raises(ValueError, match=words):
        Policy.load(bundle, 'onnxruntime')


@pytest.mark.parametrize(
    ('one', 'other', 'words'),
    thorough_after(
        2,
        [
            (
                'vision.onnx',
                'expert.onnx',
                r'expert\.onnx: is not the graph of expert: its inputs are',
            ),
            (
                'prefix.onnx',
                'prefix_r2.onnx',
                r"prefix\.onnx: input 'token_mask' is bool \[2, 64\], but",
            ),
            ('prefix.onnx', 'expert.onnx', r'expert\.onnx: is not the graph of expert'),
            (
                'vision.onnx',
                'prefix.onnx',
                r'vision\.onnx: is not the graph of vision: its inputs are',
            ),
            (
                'expert.onnx',
                'expert_r2.onnx',
                r"expert\.onnx: input 'past_key' is float32 \[2, 2, 1",
            ),
        ],
    ),
)
def test_swapped_files_are_named(bundle, one, other, words):
    first, second = bundle / 'onnx' / one, bundle / 'onnx' / other
    first.rename(bundle / 'third')
    second.rename(first)
    (bundle / 'third').rename(second)
    load_fails(bundle, words)


def rename(graph: onnx.GraphProto, kind: str, name: str, new: str) -> None:
    for value in getattr(graph, kind):
        if value.name == name:
            value.name = new
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if one == name else one for one in names]


def retype(graph: onnx.GraphProto) -> None:
    (mask,) = (value for value in graph.input if value.name == 'image_mask')
    mask.type.tensor_type.elem_type = TensorProto.INT64
    node = onnx.helper.make_node('Cast', ['image_mask'], ['mask_bool'], to=TensorProto.BOOL)
    for other in graph.node:
        other.input[:] = ['mask_bool' if one == 'image_mask' else one for one in other.input]
    graph.node.insert(0, node)


@pytest.mark.parametrize(
    ('name', 'change', 'words'),
    thorough_after(
        1,
        [
            (
                'vision.onnx',
                lambda graph: rename(graph, 'output', 'image_tokens', 'tokens'),
                r'vision\.onnx: is not the graph of vision: its outputs are tokens '
                r'where image_tokens',
            ),
            (
                'expert.onnx',
                lambda graph: rename(graph, 'input', 'dt', 'step'),
                r'expert\.onnx: is not the graph of expert: its inputs are .*step.* where .*dt',
            ),
            (
                'prefix.onnx',
                retype,
                r"prefix\.onnx: input 'image_mask' is int64 \[2\], but .* bool",
            ),
        ],
    ),
)
def test_another_name_or_kind_is_named(
    bundle, name, change: Callable[[onnx.GraphProto], object], words
):
    model = load_graph(bundle, name)
    change(model.graph)
    save_graph(model, bundle, name)
    load_fails(bundle, words)
