"""Jerk, and which of it belongs to a seam."""

import math

import numpy as np
import pytest

from vla_tabletop.study.smoothness import jerk_of


def test_jerk_of_a_cubic_is_its_third_derivative():
    t = np.arange(20) * 0.05
    positions = np.stack([t**3, 2 * t**3, 0 * t], axis=1)
    jerk = jerk_of(positions, 0.05, seams=[5])
    expected = np.hypot(6, 12)
    assert jerk.seams == pytest.approx(expected)
    assert jerk.elsewhere == pytest.approx(expected)
    assert jerk.overall == pytest.approx(expected)


def test_a_jump_at_a_seam_is_all_of_it_at_the_seam():
    positions = np.zeros((20, 2))
    positions[8:] = 0.01  # row 7 is the last of one chunk, row 8 the first of the next
    jerk = jerk_of(positions, 0.05, seams=[7])
    # Third differences of a jump: 1, -2, 1.
    assert jerk.seams == pytest.approx(np.sqrt(2 * (1 + 4 + 1) / 3) * 0.01 / 0.05**3)
    assert jerk.elsewhere == 0.0


def test_where_the_robot_sets_out_counts_for_neither():
    positions = np.zeros((20, 1))
    positions[3:] = 0.01
    jerk = jerk_of(positions, 0.05, seams=[10], starts=[2])
    assert jerk.seams == jerk.elsewhere == 0.0
    assert jerk.overall > 0.0


def test_seams_at_every_step_leave_no_elsewhere():
    jerk = jerk_of(np.random.default_rng(0).normal(size=(10, 2)), 0.05, seams=range(10))
    assert math.isnan(jerk.elsewhere)
    assert jerk.seams == jerk.overall


def test_a_motion_too_short_for_a_jerk_has_none():
    assert math.isnan(jerk_of(np.zeros((3, 2)), 0.05, seams=[]).overall)
