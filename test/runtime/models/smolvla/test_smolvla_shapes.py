"""Sizes of SmolVLA: tensors, tokens, time table, patch positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from network_cases import random_network
from tiny_policy import tiny_dims

from vla_runtime.models.blocks.layers import matrix_names
from vla_runtime.models.shapes.traced_shapes import trace_shapes
from vla_runtime.models.smolvla import SmolVlmVision, position_rows

FAMILY = 'smolvla'


def test_an_action_at_another_time_changes_itself_and_none_before_it():
    network = random_network(FAMILY, tiny_dims(FAMILY))
    dims, generator = network.dims, torch.Generator().manual_seed(1)
    rows = {
        'tokens': torch.randint(dims.vocabulary, (1, dims.prompt_length), generator=generator),
        'token_mask': torch.arange(dims.prompt_length)[None] < 9,
        'state': torch.randn(1, dims.state_dim, generator=generator),
    }
    images = torch.randn(2, dims.image_tokens, dims.language.width, generator=generator)
    past = network.prefix(images, torch.ones(2, dtype=torch.bool), **rows)
    x = torch.randn(1, dims.horizon, dims.action_dim, generator=generator)
    each = network.time_conditioning(torch.full((dims.horizon,), 0.6))[None]
    late = each.clone()
    late[:, -1] = network.time_conditioning(torch.tensor([0.1]))
    one, other = (network.velocity(x, past, times) for times in (each, late))
    assert torch.equal(one[:, :-1], other[:, :-1])
    assert not torch.equal(one[:, -1], other[:, -1])


def test_keys_and_values_have_the_matrices_precision():
    network = random_network(FAMILY, tiny_dims(FAMILY))
    names = matrix_names(network)
    for name, parameter in network.named_parameters():
        if name in names:
            parameter.data = parameter.data.to(torch.bfloat16)
    past = trace_shapes(network).past
    kinds = {name: tensor.dtype for name, tensor in past.items() if name != 'prefix_mask'}
    assert set(kinds.values()) == {torch.bfloat16}
    kept = {'action_in', 'action_out', 'state_projection', 'action_time_in', 'action_time_out'}
    assert not {name.split('.')[0] for name in names} & kept


def test_patch_positions_are_those_that_policies_were_trained_with():
    """Sides on which float32 puts a row of patches into the bucket before its own."""
    wrong = [side for side in range(1, 40) if position_rows(side) != list(range(side))]
    assert wrong == [19, 25, 29, 31, 38]
    assert position_rows(32) == list(range(32)), 'the published model is not among them'


@pytest.mark.parametrize('side', range(1, 100))
def test_patch_positions_are_found_as_transformers_finds_them(side):
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    rows = torch.bucketize(places.clamp(max=1.0 - 1e-6), bounds, right=True)
    assert position_rows(side) == rows.tolist()


def test_positions_that_are_taken_twice_reach_the_patches():
    dims = replace(tiny_dims('smolvla'), pixel_shuffle=1)
    dims = replace(dims, vision=replace(dims.vision, patch_size=2, image_size=50))
    vision = SmolVlmVision(dims)
    torch.nn.init.normal_(vision.position_embedding)
    rows = torch.tensor(position_rows(25))
    assert len(rows.unique()) < 25
    places = (rows[:, None] * 25 + rows).flatten()
    assert torch.equal(vision.positions(), vision.position_embedding[places])
