"""Sizes of GR00T N1.5: tensors, tokens, time table, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from network_cases import relative_error
from safetensors.torch import load_file
from tiny_policy import tiny_dims, tiny_spec, write_tiny_policy

from vla_runtime.families.blocks.layers import query_scales
from vla_runtime.families.flow_network import build_network, empty_network
from vla_runtime.families.groot.dimensions import GROOT_N15
from vla_runtime.families.traced_shapes import trace_shapes
from vla_runtime.family.listing import read_time_table
from vla_runtime.inference.denoise import flow_times

FAMILY = 'groot_n15'


def test_the_published_policy_has_its_size():
    network = empty_network(FAMILY, GROOT_N15)
    count = sum(parameter.numel() for parameter in network.parameters())
    # Published as 3B (2.7): with 32 embodiments, and with an output table that is not needed.
    embodiment = sum(
        parameter.numel()
        for name, parameter in network.named_parameters()
        if name.startswith(('state_encoder', 'action_encoder', 'action_decoder'))
    )
    table = GROOT_N15.vocabulary * GROOT_N15.language.width
    assert round((count + 31 * embodiment + table) / 1e9, 1) == 2.7
    assert GROOT_N15.image_tokens == 256
    assert GROOT_N15.prefix_length == 2 * 256 + GROOT_N15.prompt_length


def test_the_prefix_hands_over_keys_and_values_of_the_cross_attention_blocks():
    dims = tiny_dims(FAMILY)
    past = trace_shapes(empty_network(FAMILY, dims)).past
    shape = (2, 1, dims.dit.num_heads, dims.prefix_length, dims.dit.head_dim)
    assert {name: tensor.shape for name, tensor in past.items()} == {
        'cross_key': shape,
        'cross_value': shape,
        'prefix_mask': (1, dims.prefix_length),
    }


@pytest.mark.parametrize('steps', [1, 3, 4, 10, 50])
def test_the_time_table_equals_the_network_s(tmp_path, steps):
    dims = tiny_dims(FAMILY)
    bundle = write_tiny_policy(tmp_path / 'tiny', tiny_spec(FAMILY))
    table = read_time_table(FAMILY, dims, bundle / 'weights.safetensors')
    network = build_network(FAMILY, dims)
    network.load_state_dict(load_file(str(bundle / 'weights.safetensors')))
    times = flow_times(steps)
    rows = table(times)
    assert rows.shape == (steps, table.width) and rows.dtype == np.float32
    with torch.inference_mode():
        expected = network.time_conditioning(torch.tensor(times, dtype=torch.float32))
    assert relative_error(torch.from_numpy(rows), expected) <= 5e-5


def test_the_scale_of_the_scores_is_in_the_norms_of_normalised_queries():
    scales = query_scales(empty_network(FAMILY, tiny_dims(FAMILY)))
    assert 'language.blocks.0.attention.q_norm.weight' in scales
    assert 'language.blocks.0.attention.q.weight' not in scales
    assert {'context.0.attention.q.bias', 'dit.1.attention.q.weight'} <= set(scales)


@pytest.mark.parametrize(
    ('change', 'pattern'),
    [
        ({'pixel_shuffle': 3}, "pixel_shuffle 3 does not divide the 4 patches of an image's edge"),
        ({'connector_layers': 3}, 'connector_layers 3 where 1 or 2'),
        ({'positions': 7}, 'horizon 8 is more than the 7 action positions'),
        ({'image_places': (2,)}, 'image_places has 1 entries where one for each of the 2'),
        ({'image_places': (4, 2)}, r'image_places \[4, 2\] must ascend'),
        ({'image_places': (2, 65), 'prompt_length': 64}, 'must ascend from 0 to prompt_length 64'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, pattern):
    with pytest.raises(ValueError, match=pattern):
        replace(tiny_dims(FAMILY), **change)
