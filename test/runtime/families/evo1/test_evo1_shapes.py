"""Sizes of Evo-1: tensors, tokens, time table, what runs in half."""

from __future__ import annotations

import pytest
from tiny_policy import tiny_dims

from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.evo1.declaration import EVO1
from vla_runtime.families.evo1.networks import Evo1
from vla_runtime.families.flow_network import empty_network
from vla_runtime.families.operation_counts import count_operations


def test_operations_of_the_published_policy_are_counted():
    counts = count_operations('evo1', EVO1)
    network = empty_network('evo1', EVO1)
    assert counts.matrices + counts.others == sum(p.numel() for p in network.parameters())
    # 1025 places of the tower: 2 operations a weight and place, and the scores.
    tower = sum(p.numel() for name, p in network.named_parameters() if 'vision.blocks' in name)
    scores = 4 * 24 * 1025**2 * 1024
    assert counts.vision.work(4).flops == pytest.approx(2 * 1025 * tower + scores, rel=0.02)


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
