"""Scenes: drawn from a seed, always solvable, each variant changing only what its name says."""

from __future__ import annotations

import numpy as np
import pytest

from vla_tabletop.sim.scene import (
    VARIANTS,
    WORKSPACE_HIGH_M,
    WORKSPACE_LOW_M,
    layout_is_clear,
    sample_scene,
)


@pytest.mark.parametrize('seed', range(20))
def test_blocks_keep_their_distance_inside_the_workspace(seed: int) -> None:
    scene = sample_scene(seed)
    assert layout_is_clear(scene.block_xy_m)
    assert np.all(scene.block_xy_m >= WORKSPACE_LOW_M)
    assert np.all(scene.block_xy_m <= WORKSPACE_HIGH_M)


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_variant_keeps_the_layout_of_its_seed(variant: str) -> None:
    still, other = sample_scene(7), sample_scene(7, variant)
    np.testing.assert_array_equal(other.block_xy_m, still.block_xy_m)
    np.testing.assert_array_equal(other.start_rad, still.start_rad)
    assert (np.any(other.belt_m_s) > 0) == (variant == 'moving')
    assert (other.shove is not None) == (variant == 'pushed')
    assert (other.lighting is not None) == (variant == 'lighting')
    assert bool(other.camera_offsets) == (variant == 'camera_jitter')


@pytest.mark.parametrize('seed', range(10))
def test_a_shove_leaves_a_clear_layout(seed: int) -> None:
    scene = sample_scene(seed, 'pushed')
    assert scene.shove is not None
    assert layout_is_clear(scene.block_xy_m + scene.shove.displacement_m)


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'windy'"):
        sample_scene(0, 'windy')  # type: ignore[arg-type]
