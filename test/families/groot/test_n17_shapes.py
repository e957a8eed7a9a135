"""Sizes of GR00T N1.7: tensors, tokens, time table, what policy.yaml keeps, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from network_cases import relative_error
from safetensors.torch import load_file
from tiny_policy import tiny_dims, tiny_spec, write_tiny_policy

from vla_runtime.bundle.rules import dump_spec, parse_spec
from vla_runtime.families.flow_network import build_network, empty_network
from vla_runtime.families.groot.n17_dimensions import GROOT_N17
from vla_runtime.families.traced_shapes import trace_shapes
from vla_runtime.family.listing import read_time_table
from vla_runtime.inference.denoise import flow_times

FAMILY = 'groot_n17'
TINY = tiny_dims(FAMILY)
DIMS = {
    'tiny': TINY,
    'without self-attention over the features': replace(TINY, context=None),
    'without deepstack': replace(TINY, vision=replace(TINY.vision, deepstack=())),
    'all blocks read the text': replace(TINY, text_every=1),
    'full': GROOT_N17,
}


@pytest.mark.parametrize('size', DIMS)
def test_policy_yaml_keeps_all_sizes(size):
    spec = replace(tiny_spec(FAMILY), dims=DIMS[size])
    assert parse_spec(dump_spec(spec)).dims == DIMS[size]


def test_the_published_policy_has_its_size():
    network = empty_network(FAMILY, GROOT_N17)
    count = sum(parameter.numel() for parameter in network.parameters())
    # Published as 3B: with 32 embodiments.
    embodiment = sum(
        parameter.numel()
        for name, parameter in network.named_parameters()
        if name.startswith(('state_encoder', 'action_encoder', 'action_decoder'))
    )
    assert round((count + 31 * embodiment) / 1e9) == 3
    assert GROOT_N17.image_tokens == 64
    assert GROOT_N17.prefix_length == 2 * 64 + GROOT_N17.prompt_length
    assert GROOT_N17.text_blocks[:3] == (0, 4, 8) and GROOT_N17.image_blocks[:3] == (2, 6, 10)


def test_the_prefix_hands_over_text_and_images_apart():
    past = trace_shapes(empty_network(FAMILY, TINY)).past
    head, images = TINY.dit.head_dim, TINY.cameras * TINY.image_tokens
    text, seen = (2, 1, TINY.dit.num_heads, TINY.prompt_length, head), (1, TINY.prompt_length)
    assert {name: tensor.shape for name, tensor in past.items()} == {
        'text_key': text,
        'text_value': text,
        'text_seen': seen,
        'images_key': (1, 1, TINY.dit.num_heads, images, head),
        'images_value': (1, 1, TINY.dit.num_heads, images, head),
        'images_seen': (1, images),
    }
    alone = trace_shapes(empty_network(FAMILY, DIMS['all blocks read the text'])).past
    assert set(alone) == {'text_key', 'text_value', 'text_seen'}


@pytest.mark.parametrize('steps', [1, 4, 10])
def test_the_time_table_equals_the_network_s(tmp_path, steps):
    bundle = write_tiny_policy(tmp_path / 'tiny', tiny_spec(FAMILY))
    table = read_time_table(FAMILY, TINY, bundle / 'weights.safetensors')
    network = build_network(FAMILY, TINY)
    network.load_state_dict(load_file(str(bundle / 'weights.safetensors')))
    times = flow_times(steps)
    rows = table(times)
    assert rows.shape == (steps, table.width) and rows.dtype == np.float32
    with torch.inference_mode():
        expected = network.time_conditioning(torch.tensor(times, dtype=torch.float32))
    assert relative_error(torch.from_numpy(rows), expected) <= 5e-5


@pytest.mark.parametrize(
    ('change', 'pattern'),
    [
        ({'image': (32, 40)}, r'image \[32, 40\] where multiples of 16 pixels'),
        ({'rope_sections': (4, 2, 1)}, 'do not add up to half'),
        ({'positions': 7}, 'horizon 8 is more than the 7 action positions'),
        ({'real_horizon': 9}, 'real_horizon 9 where 1 to horizon 8'),
        ({'image_places': (2,)}, 'image_places has 1 entries where one for each of the 2'),
        ({'text_every': 0}, 'text_every 0'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, pattern):
    with pytest.raises(ValueError, match=pattern):
        replace(TINY, **change)


def test_a_tower_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r'deepstack \[2, 1\] must ascend from 1 to depth 2'):
        replace(TINY.vision, deepstack=(2, 1))
    with pytest.raises(ValueError, match='not a multiple of 4 \\* num_heads 3'):
        replace(TINY.vision, num_heads=3)
