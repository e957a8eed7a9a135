"""Means, intervals, groups and paired comparisons."""

import math

import numpy as np
import pytest

from vla_runtime.bundle.success import difference_interval
from vla_tabletop.study.episode import EpisodeResult
from vla_tabletop.study.smoothness import Jerk, jerk_of
from vla_tabletop.study.statistics import by_family, compare, mean_of, summarise


def episode(seed=0, outcome='success', family='colour', touched=0, meant=0, **values):
    fields = {
        'steps': 40.0,
        'inferences': 5,
        'refused': 0,
        'delay_steps': 1.0,
        'starved_ticks': 0,
        'position_jump': 0.01,
        'velocity_jump': 0.1,
        'jerk': Jerk(1.0, 2.0, 3.0),
        'halted': '',
    }
    return EpisodeResult(
        seed=seed, family=family, outcome=outcome, touched=touched, meant=meant, **fields | values
    )


def test_a_mean_leaves_out_what_could_not_be_measured():
    mean = mean_of([1.0, math.nan, 3.0])
    assert (mean.value, mean.count) == (2.0, 2)
    assert mean.high - mean.value == pytest.approx(1.959964 * math.sqrt(2) / math.sqrt(2))
    assert mean_of([math.nan]).count == 0
    assert math.isnan(mean_of([]).value)


def test_an_interval_of_a_mean_covers_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        mean = mean_of(rng.normal(5.0, 2.0, size=60))
        hits += mean.low <= 5.0 <= mean.high
    assert 930 <= hits <= 970


def test_steps_to_success_are_those_of_successes_only():
    summary = summarise(
        [
            episode(steps=40.0),
            episode(outcome='timeout', touched=None, steps=120.0),
            episode(outcome='wrong_block', touched=1, steps=10.0, halted='stopped'),
        ]
    )
    assert summary.steps.value == 40.0
    assert (summary.success.successes, summary.success.episodes) == (1, 3)
    assert (summary.wrong_block, summary.timeout, summary.halted) == (1, 1, 1)
    assert summary.jerk_elsewhere.value == 2.0


def test_to_obey_is_to_touch_what_the_words_meant():
    told_another = episode(outcome='wrong_block', touched=2, meant=2)
    assert told_another.obeyed and not told_another.success
    assert not episode(outcome='timeout', touched=None, meant=1).obeyed


def test_families_stand_apart_beside_all_of_them():
    both = [episode(family='colour'), episode(family='position'), episode(family='colour')]
    assert {name: len(group) for name, group in by_family(both).items()} == {
        'all': 3,
        'colour': 2,
        'position': 1,
    }
    assert list(by_family(both[:1])) == ['colour']


@pytest.mark.parametrize(
    ('won', 'lost', 'p'),
    # Binomial tails by hand: 2 * (1 + 10) / 2**10, 2 / 2**5, nothing to tell apart.
    [(1, 9, 22 / 1024), (9, 1, 22 / 1024), (5, 0, 2 / 32), (0, 0, 1.0), (4, 4, 1.0)],
)
def test_conditions_are_compared_seed_by_seed(won, lost, p):
    outcomes = [('success', 'timeout')] * won + [('timeout', 'success')] * lost
    outcomes += [('success', 'success')] * 3
    here = [episode(seed, a) for seed, (a, _) in enumerate(outcomes)]
    there = [episode(seed, b) for seed, (_, b) in enumerate(outcomes)]
    found = compare(here, there)
    assert (found.won, found.lost) == (won, lost)
    assert found.p == pytest.approx(p)
    assert (found.low, found.high) == difference_interval(won + lost + 3, won, lost)
    assert found.low <= (won - lost) / (won + lost + 5) <= found.high


def test_conditions_of_other_seeds_are_not_compared():
    with pytest.raises(ValueError, match='other seeds'):
        compare([episode(1)], [episode(2)])


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
