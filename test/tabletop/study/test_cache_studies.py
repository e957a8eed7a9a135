"""Foundations of the studies of cache and guidance: settings that arrive, trajectories compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vla_tabletop.study.catalogue import BASE, Study
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import run_episode
from vla_tabletop.study.page import study_page
from vla_tabletop.study.results import Provenance, study_record
from vla_tabletop.study.runner import episode_seeds, run_conditions

pytestmark = pytest.mark.usefixtures('short_tasks')

OFF, BLIND = (replace(BASE, cache=cache) for cache in ('off', 'image_blind'))
BOUNDED = replace(BASE, cache='bounded', cache_max_reuses=2)
SMALL = Study(
    'small',
    'A title',
    'A question',
    (OFF, BASE, BLIND),
    x='cache',
    episodes=2,
    reference=BASE,
    same=((OFF, BASE), (BASE, BLIND)),
)


@pytest.fixture(scope='module')
def source(untrained) -> PolicySource:
    return PolicySource(untrained)


@pytest.fixture(scope='module')
def results(short_tasks, untrained, tmp_path_factory):
    work = tmp_path_factory.mktemp('work')
    seeds = episode_seeds(0, 2)
    return run_conditions(SMALL.conditions, untrained, seeds, work, progress=False)


def test_off_and_exact_give_the_same_trajectory_and_reuse_gives_another(world, source):
    found = {c: run_episode(world, source, c, 5).trajectory for c in (OFF, BASE, BOUNDED, BLIND)}
    assert found[OFF] == found[BASE]
    assert len(set(found.values())) == 3
    assert run_episode(world, source, BASE, 6).trajectory != found[BASE]


def test_the_image_blind_condition_is_what_a_cache_that_ignores_pixels_does(
    world, source, monkeypatch
):
    condition = run_episode(world, source, BLIND, 5)
    real = np.array_equal

    def blind(a, b):
        return getattr(a, 'ndim', 0) == 3 or real(a, b)

    monkeypatch.setattr(np, 'array_equal', blind)
    planted = run_episode(world, source, BASE, 5)
    assert planted.trajectory == condition.trajectory


def test_bounded_reuses_so_often_in_a_row(world, source):
    told = []
    policy = source._policy
    real = policy.infer

    def infer(*arguments, **named):
        chunk, report = real(*arguments, **named)
        told.append(report.runs['vision'])
        return chunk, report

    policy.infer = infer
    try:
        run_episode(world, source, replace(BOUNDED, replan_interval=4), 5)
    finally:
        policy.infer = real
    assert told[:9] == [2, 0, 0] * 3


def test_prompt_rows_run_as_the_condition_says(world, source):
    for mode in ('fused', 'serial'):
        source.begin(replace(BASE, beta=2.0, cfg_mode=mode), 0)
        settings = source.settings
        assert settings.guided and (settings.cfg_beta, settings.cfg_mode) == (2.0, mode)


@pytest.mark.parametrize(
    ('field', 'value', 'message'),
    [
        ('cache', 'bounded', "'bounded'"),
        ('cache_max_reuses', 2, "'exact'"),
        ('cache', 'none', "'none'"),
        ('cache_max_image_change', 2.0, "'exact'"),
        ('cache_max_state_bins', 0, 'cache_max_state_bins'),
        ('cfg_mode', 'both', 'cfg_mode'),
    ],
)
def test_a_reuse_that_cannot_be_is_an_error(field, value, message):
    with pytest.raises(ValueError, match=message):
        Condition(**{field: value})


def test_a_pair_outside_the_study_is_an_error():
    with pytest.raises(ValueError, match='pair'):
        replace(SMALL, same=((BASE, BOUNDED),))


@pytest.mark.usefixtures('undrawn')
def test_the_json_and_the_page_say_whether_trajectories_are_the_same(results):
    record = study_record(
        SMALL,
        Provenance('vla_runtime study small', 'none', 'ab' * 32, (1, 3), 'c0de', 'cd' * 32),
        results,
    )
    assert record['same'] == [
        {'labels': [{'cache': 'off'}, {'cache': 'exact'}], 'equal': 2, 'of': 2},
        {'labels': [{'cache': 'exact'}, {'cache': 'image_blind'}], 'equal': 0, 'of': 2},
    ]
    for condition, run in zip(record['conditions'], SMALL.conditions, strict=True):
        digests = [episode[-1] for episode in condition['episodes']]
        assert digests == [episode.trajectory for episode in results[run]]
        assert all(len(digest) == 16 for digest in digests)
    page = study_page([record])
    assert '<p>off and exact: 2 of 2 trajectories are the same, bit for bit.</p>' in page
    assert 'exact and image_blind: 0 of 2' in page
    assert page.count('all of them should be') == 1


@pytest.mark.usefixtures('undrawn')
def test_a_study_from_before_there_were_pairs_still_has_a_page(results):
    record = study_record(
        SMALL, Provenance('command', 'none', 'ab' * 32, (1, 3), 'c0de', 'cd' * 32), results
    )
    del record['same']
    assert 'bit for bit' not in study_page([record])
