"""Sizes of GR00T N1.6: tensors, tokens, what policy.yaml keeps, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_policy import tiny_dims, tiny_spec

from vla_runtime.bundle.rules import dump_spec, parse_spec
from vla_runtime.families.flow_network import empty_network
from vla_runtime.families.groot.n16_dimensions import GROOT_N16
from vla_runtime.families.traced_shapes import trace_shapes

FAMILY = 'groot_n16'
TINY = tiny_dims(FAMILY)
DIMS = {
    'tiny': TINY,
    'plain attention': replace(
        TINY, vision=replace(TINY.vision, rope_base=None, window=None, full_attention=())
    ),
    'full': GROOT_N16,
}


@pytest.mark.parametrize('size', DIMS)
def test_policy_yaml_keeps_all_sizes(size):
    spec = replace(tiny_spec(FAMILY), dims=DIMS[size])
    assert parse_spec(dump_spec(spec)).dims == DIMS[size]


def test_the_published_policy_has_its_size():
    network = empty_network(FAMILY, GROOT_N16)
    count = sum(parameter.numel() for parameter in network.parameters())
    embodiment = sum(
        parameter.numel()
        for name, parameter in network.named_parameters()
        if name.startswith(('state_encoder', 'action_encoder', 'action_decoder'))
    )
    # Published as 3B: with 32 embodiments.
    assert round((count + 31 * embodiment) / 1e9) == 3
    assert GROOT_N16.patches == (18, 18) and GROOT_N16.image_tokens == 81
    assert GROOT_N16.text_blocks[:3] == (0, 4, 8) and GROOT_N16.image_blocks[:3] == (2, 6, 10)


def test_the_prefix_hands_over_text_and_images_apart():
    past = trace_shapes(empty_network(FAMILY, TINY)).past
    head, images = TINY.dit.head_dim, TINY.cameras * TINY.image_tokens
    text = (2, 1, TINY.dit.num_heads, TINY.prompt_length, head)
    assert {name: tensor.shape for name, tensor in past.items()} == {
        'text_key': text,
        'text_value': text,
        'text_seen': (1, TINY.prompt_length),
        'images_key': (1, 1, TINY.dit.num_heads, images, head),
        'images_value': (1, 1, TINY.dit.num_heads, images, head),
        'images_seen': (1, images),
    }


@pytest.mark.parametrize(
    ('change', 'pattern'),
    [
        ({'image': (32, 40)}, r'image \[32, 40\] where multiples of 16 pixels'),
        ({'state_steps': 2}, 'state_dim 5 is not a multiple of state_steps 2'),
        ({'positions': 7}, 'horizon 8 is more than the 7 action positions'),
        ({'text_every': 0}, 'text_every 0'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, pattern):
    with pytest.raises(ValueError, match=pattern):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ('change', 'pattern'),
    [
        ({'full_attention': (3,)}, r'full_attention \[3\] must ascend from 1 to depth 2'),
        ({'num_heads': 16}, r'not a multiple of 4 \* num_heads 16'),
        ({'num_heads': 5, 'rope_base': None}, 'not a multiple of num_heads 5'),
        ({'window': 0}, 'window 0 where a number above 0'),
        ({'rope_base': -1.0}, 'rope_base -1.0 where a number above 0'),
    ],
)
def test_a_tower_that_does_not_fit_is_refused(change, pattern):
    with pytest.raises(ValueError, match=pattern):
        replace(TINY.vision, **change)
