"""Sizes of Evo-1: tensors, tokens, time table, what runs in half."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_policy import tiny_dims

from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.evo1.dimensions import EVO1
from vla_runtime.families.evo1.networks import Evo1
from vla_runtime.families.flow_network import build_network, empty_network
from vla_runtime.families.operation_counts import count_operations
from vla_runtime.families.traced_shapes import trace_shapes
from vla_runtime.family.listing import read_time_table
from vla_runtime.inference.denoise import flow_times


def test_the_published_policy_has_770_million_parameters():
    network = empty_network('evo1', EVO1)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert 0.77e9 <= count < 0.78e9
    assert (EVO1.image_tokens, EVO1.vision.tokens) == (256, 1024)


def test_operations_of_the_published_policy_are_counted():
    counts = count_operations('evo1', EVO1)
    network = empty_network('evo1', EVO1)
    assert counts.matrices + counts.others == sum(p.numel() for p in network.parameters())
    # 1025 places of the tower: 2 operations a weight and place, and the scores.
    tower = sum(p.numel() for name, p in network.named_parameters() if 'vision.blocks' in name)
    scores = 4 * 24 * 1025**2 * 1024
    assert counts.vision.work(4).flops == pytest.approx(2 * 1025 * tower + scores, rel=0.02)


def test_the_prefix_hands_over_keys_and_values_of_the_heads_layers():
    dims = tiny_dims('evo1')
    past = trace_shapes(empty_network('evo1', dims)).past
    head = dims.language.width // dims.head.num_heads
    layers = (dims.head.depth, 1, dims.head.num_heads, dims.prefix_length, head)
    assert {name: tensor.shape for name, tensor in past.items()} == {
        'cross_key': layers,
        'cross_value': layers,
        'prefix_mask': (1, dims.prefix_length),
    }
    # Two images of 4 tokens, the text, the state.
    assert dims.prefix_length == 8 + dims.prompt_length + 1


def test_the_time_table_equals_the_networks(tmp_path):
    network = build_network('evo1', tiny_dims('evo1'))
    with torch.no_grad():
        network.time_rows.normal_()
    save_file(network.state_dict(), str(tmp_path / 'weights.safetensors'))
    for steps in (1, 3, 10, 32):
        times = flow_times(steps)
        table = read_time_table('evo1', network.dims, tmp_path / 'weights.safetensors')(times)
        with torch.no_grad():
            expected = network.time_conditioning(torch.tensor(times, dtype=torch.float32))
        np.testing.assert_array_equal(table, expected.numpy())


def test_what_is_not_a_large_matrix_stays_in_float32():
    network = empty_network('evo1', tiny_dims('evo1'))
    assert isinstance(network, Evo1)
    exact = set(dict(network.named_parameters())) - matrix_names(network)
    for name in (
        *('time_rows', 'action_positions', 'vision.class_token', 'vision.patch_embedding.weight'),
        *('state_encoder.fc1.weight', 'action_encoder.fc3.weight', 'velocity_head.fc2.weight'),
        *('vision.blocks.0.scale1', 'language.norm.weight', 'norm.weight'),
    ):
        assert name in exact, name
    assert {'pool.weight', 'blocks.0.attention.q.weight', 'blocks.0.mlp.fc1.weight'}.isdisjoint(
        exact
    )
