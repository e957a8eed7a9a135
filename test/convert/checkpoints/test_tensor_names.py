"""Templates of tensor names."""

from __future__ import annotations

import pytest

from vla_convert.checkpoints.tensor_names import TensorNames, under

NAMES = TensorNames(
    rows={
        **under('tower.(inner.)', 'vision.', {'layers.{i}.{q|k}_proj.*': 'blocks.{i}.{q|k}.*'}),
        'head.{i}.{b}.in_proj_{weight|bias}': 'head.{b}.{i}.{q,k,v}.{weight|bias}',
        'table.weight': 'table',
    },
    unused=('training*', '{dropped|masked}.{i}'),
)


@pytest.mark.parametrize(
    ('theirs', 'ours'),
    {
        'tower.layers.0.q_proj.weight': ('vision.blocks.0.q.weight',),
        'model.tower.inner.layers.12.k_proj.bias': ('vision.blocks.12.k.bias',),
        'head.1.20.in_proj_bias': tuple(f'head.20.1.{part}.bias' for part in 'qkv'),
        'table.weight': ('table',),
        # A tensor that a table has not is unknown, however near it is.
        'tower.layers.0.v_proj.weight': (),
        'tower.layers.a.q_proj.weight': (),
        'tower.layers.0.q_proj.scale': (),
        'tower.layers.0.q_proj.weight_scale': (),
        'towerxlayers.0.q_proj.weight': (),
        'tower.inner.inner.layers.0.q_proj.weight': (),
        'other.table.weight': (),
    }.items(),
)
def test_a_name_becomes_ours_where_a_row_fits_all_of_it(theirs, ours):
    assert NAMES.parts(theirs) == ours
    assert NAMES.ours(theirs) == (ours[0] if len(ours) == 1 else None)


def test_tensors_that_nothing_reads_are_known():
    assert all(map(NAMES.is_unused, ('training_only.weight', 'model.masked.3', 'dropped.0')))
    assert not any(map(NAMES.is_unused, ('a_training', 'masked.x', 'table.weight')))
    assert NAMES.is_unused('unnormalize_outputs.buffer_action.mean')
