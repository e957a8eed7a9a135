"""Dimensions that are read off tensors by what a dataclass declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from vla_convert.checkpoints.dims import ShownDims
from vla_convert.checkpoints.tensors import CheckpointError
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.family.dimensions import (
    Most,
    Part,
    Share,
    Shown,
    depth_of,
    limits_of,
    size,
    squares_joined,
)


@dataclass(frozen=True)
class StackDims:
    width: Annotated[int, size('0.q.weight', axis=1)]
    depth: Annotated[int, depth_of()]
    num_heads: Annotated[int, Share('0.q.weight', among='head_dim')]
    num_kv_heads: int
    head_dim: Annotated[int, Share('0.k.weight', among='num_kv_heads', even=True)]


@dataclass(frozen=True)
class PolicyDims:
    first: Annotated[StackDims, Part('stacks.first.')]
    second: Annotated[StackDims, Part('stacks.second.', kv_heads_of='first')]
    third: StackDims | None
    cameras: int
    horizon: Annotated[int, size('positions', axes=3, axis=1, stated='chunk_size')]
    head_blocks: Annotated[int, depth_of('head', first='weight')]
    merge: Annotated[int, squares_joined('merger.weight')]
    state_dim: Annotated[int, size('state.weight', absent=0)] = 0
    has_norm: Annotated[bool, Shown(lambda shape: 'norm.weight' in shape)] = False
    head_width: Annotated[int, Most(7)] = 5


SHAPES = {
    **{f'stacks.first.{i}.q.weight': (64, 24) for i in range(3)},
    **{f'stacks.first.{i}.k.weight': (16, 24) for i in range(3)},
    **{f'stacks.second.{i}.q.weight': (48, 12) for i in range(2)},
    **{f'stacks.second.{i}.k.weight': (24, 12) for i in range(2)},
    'positions': (1, 9, 4),
    'patch_embedding.weight': (6, 12),
    'merger.weight': (10, 24),
}
GIVEN = {'first.num_kv_heads': 2}


def tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(name, Path('model.safetensors'), 'F32', shape, 0)
        for name, shape in shapes.items()
    }


def dims(further: Mapping[str, Any] = GIVEN, **shapes: tuple[int, ...]) -> PolicyDims:
    changed = {name.replace('__', '.'): shape for name, shape in shapes.items()}
    shown = ShownDims(PolicyDims, tensors({**SHAPES, **changed}), further)
    return shown.make(cameras=2, prompt_length=5)


def test_sizes_and_shares_are_read_below_the_prefix_of_their_part():
    found = dims()
    assert found.first == StackDims(width=24, depth=3, num_heads=8, num_kv_heads=2, head_dim=8)
    # As many key/value heads as the first.
    assert found.second == StackDims(width=12, depth=2, num_heads=4, num_kv_heads=2, head_dim=12)
    assert (found.third, found.cameras, found.horizon, found.merge) == (None, 2, 9, 2)
    assert (found.head_blocks, found.state_dim, found.has_norm) == (0, 0, False)


def test_what_may_be_absent_is_read_where_it_is_there():
    third = {'third__0__q__weight': (4, 6), 'third__0__k__weight': (4, 6)}
    found = dims({**GIVEN, 'third.num_kv_heads': 1}, **third, state__weight=(5,) * 2)
    assert found.third == StackDims(width=6, depth=1, num_heads=1, num_kv_heads=1, head_dim=4)
    assert found.state_dim == 5
    assert dims(norm__weight=(3,), head__0__weight=(3,)).has_norm
    assert dims(head__0__weight=(3,), head__1__weight=(3,)).head_blocks == 2


def test_what_is_given_is_not_read_and_may_follow_from_the_others():
    found = dims({**GIVEN, 'horizon': lambda values: values['cameras'] + values['merge']})
    assert found.horizon == 4
    shown = ShownDims(PolicyDims, tensors(SHAPES), GIVEN)
    assert shown.stated == {'horizon': 'chunk_size'}
    assert shown.divided_by('first.num_kv_heads') == (16, True)


@pytest.mark.parametrize(
    'shapes',
    [
        {'positions': (9, 4)},
        {'positions': (1, 0, 4)},
        {'merger__weight': (10, 18)},
        {'stacks__first__4__q__weight': (64, 24)},
        {'stacks__first__0__k__weight': (15, 24)},
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_an_error_of_the_checkpoint(shapes):
    with pytest.raises(CheckpointError):
        dims(**shapes)


@pytest.mark.parametrize('lost', ['positions', 'stacks.second.0.q.weight', 'merger.weight'])
def test_a_missing_tensor_is_named_in_full(lost):
    left = {name: shape for name, shape in SHAPES.items() if name != lost}
    with pytest.raises(CheckpointError, match=f"'{lost}'"):
        ShownDims(PolicyDims, tensors(left), GIVEN)


def test_a_field_that_nothing_shows_is_named():
    with pytest.raises(CheckpointError, match="'cameras'"):
        ShownDims(PolicyDims, tensors(SHAPES), GIVEN).make()


def test_limits_are_those_of_the_names_but_where_a_field_has_its_own():
    found = limits_of(PolicyDims)
    assert found['first.width'] == found['third.width'] == limits_of(StackDims)['width']
    assert found['head_width'] == 7
    assert 'cameras' not in found and 'first' not in found
