"""Sines and cosines of a state, against NVIDIA's formula written out."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.processing.poses import with_angles


def joined_by_group(normalised, state, groups, angles):
    """Isaac-GR00T's `apply_state`: each group as numbers or as [sines, cosines], then joined."""
    parts = []
    for index, (first, count) in enumerate(groups):
        of_group = slice(first, first + count)
        if index in angles:
            parts.append(np.concatenate([np.sin(state[of_group]), np.cos(state[of_group])]))
        else:
            parts.append(normalised[of_group])
    return np.concatenate(parts)


@pytest.mark.parametrize('angles', [{0}, {1}, {2}, {0, 1}, {0, 2}, {0, 1, 2}])
def test_a_group_s_sines_come_before_its_cosines_where_its_numbers_stood(angles):
    groups = [(0, 6), (6, 1), (7, 3)]
    random = np.random.default_rng(0)
    normalised, state = random.uniform(-3, 3, (2, 10)).astype(np.float32)
    found = with_angles(normalised, state, [groups[index] for index in sorted(angles)])
    expected = joined_by_group(normalised, state, groups, angles)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
