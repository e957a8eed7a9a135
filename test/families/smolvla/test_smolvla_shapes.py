"""Sizes of SmolVLA: tensors, tokens, time table, patch positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from joint_velocity import joint_velocity
from network_cases import relative_error
from safetensors.torch import save_file
from smolvla_cases import tiny_smolvla
from tiny_policy import tiny_dims

from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.flow_network import empty_network
from vla_runtime.families.smolvla.dimensions import SMOLVLA
from vla_runtime.families.smolvla.vision import SmolVlmVision, position_rows
from vla_runtime.families.traced_shapes import trace_shapes
from vla_runtime.family.listing import read_time_table
from vla_runtime.inference.denoise import flow_times


def test_the_published_policy_has_450_million_parameters():
    network = empty_network('smolvla', SMOLVLA)
    count = sum(parameter.numel() for parameter in network.parameters())
    # Published: 450M, with the language model's output table, which is not needed.
    head = SMOLVLA.vocabulary * SMOLVLA.language.width
    assert round((count + head) / 1e6) == 450
    assert (SMOLVLA.image_tokens, SMOLVLA.prefix_length) == (64, 241)


@pytest.mark.parametrize(
    ('every', 'own', 'cross'), [(2, (0, 2), (1,)), (1, (0, 1, 2), ()), (0, (), (0, 1, 2))]
)
def test_the_prefix_hands_over_keys_and_values_of_the_layers_that_there_are(every, own, cross):
    dims = replace(tiny_dims('smolvla'), self_attention_every=every)
    assert (dims.self_layers, dims.cross_layers) == (own, cross)
    past = trace_shapes(empty_network('smolvla', dims)).past
    shape = (1, dims.language.num_kv_heads, dims.prefix_length, dims.language.head_dim)
    expected = {'prefix_mask': (1, dims.prefix_length)}
    for kind, layers in (('self', own), ('cross', cross)):
        if layers:
            expected |= {f'{kind}_{part}': (len(layers), *shape) for part in ('key', 'value')}
    assert {name: tensor.shape for name, tensor in past.items()} == expected
    assert {past[name].row_axis for name in past if name != 'prefix_mask'} == {1}


@pytest.mark.parametrize('every', [0, 1, 2, 3])
def test_the_split_equals_the_joint_forward_whichever_layers_attend_to_themselves(every):
    dims = replace(tiny_dims('smolvla'), self_attention_every=every)
    network = tiny_smolvla(dims)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, dims.image_tokens, dims.language.width, generator=generator)
    image_mask = torch.tensor([True, False])
    rows = {
        'tokens': torch.randint(dims.vocabulary, (1, dims.prompt_length), generator=generator),
        'token_mask': torch.arange(dims.prompt_length)[None] < 9,
        'state': torch.randn(1, dims.state_dim, generator=generator),
    }
    x = torch.randn(1, dims.horizon, dims.action_dim, generator=generator)
    conditioning = network.time_conditioning(torch.tensor([0.3]))
    split = network.velocity(x, network.prefix(images, image_mask, **rows), conditioning)
    prefix = network.embed_prefix(images[None], image_mask[None], **rows)
    joint = joint_velocity(network, *prefix, x, conditioning)
    assert relative_error(split, joint) <= 1e-5


def test_keys_and_values_have_the_matrices_precision():
    network = tiny_smolvla()
    names = matrix_names(network)
    for name, parameter in network.named_parameters():
        if name in names:
            parameter.data = parameter.data.to(torch.bfloat16)
    past = trace_shapes(network).past
    kinds = {name: tensor.dtype for name, tensor in past.items() if name != 'prefix_mask'}
    assert set(kinds.values()) == {torch.bfloat16}
    kept = {'action_in', 'action_out', 'state_projection', 'action_time_in', 'action_time_out'}
    assert not {name.split('.')[0] for name in names} & kept


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_the_numpy_time_table_is_the_networks(dtype, tmp_path):
    network = tiny_smolvla()
    weights = {name: value.to(dtype) for name, value in network.state_dict().items()}
    save_file(weights, tmp_path / 'weights.safetensors')
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    times = flow_times(10)
    with torch.inference_mode():
        expected = network.time_conditioning(torch.tensor(times, dtype=torch.float32)).numpy()
    table = read_time_table('smolvla', network.dims, tmp_path / 'weights.safetensors')
    assert table.width == expected.shape[1]
    assert table(times).dtype == np.float32
    assert np.abs(table(times) - expected).max() <= 2e-6


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


@pytest.mark.parametrize(
    ('change', 'pattern'),
    [
        ({'pixel_shuffle': 3}, "pixel_shuffle 3 does not divide the 4 patches of an image's edge"),
        ({'depth': 2}, r'language\.depth is 3 but expert\.depth is 2'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, pattern):
    dims = tiny_dims('smolvla')
    if 'depth' in change:
        change = {'expert': replace(dims.expert, **change)}
    with pytest.raises(ValueError, match=pattern):
        replace(dims, **change)
