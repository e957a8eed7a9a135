"""Studies of the cache: hits are read off the reports and recorded, and trajectories compared."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest

from vla_runtime.types import CacheOutcome, CacheReport, Reuse
from vla_tabletop.study.catalogue import BASE, Study
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import Condition, grid
from vla_tabletop.study.episode import run_episode
from vla_tabletop.study.page import study_page
from vla_tabletop.study.results import Provenance, study_record, write_study
from vla_tabletop.study.runner import episode_seeds, run_conditions
from vla_tabletop.study.smoothness import CacheUse, cache_use_of

pytestmark = pytest.mark.usefixtures('short_tasks')

# A chunk a step, a wrist image every third step.
RATES = replace(BASE, wrist_every=3, replan_interval=1, denoise_steps=1)
SMALL = Study(
    'rates',
    'A title',
    'A question',
    grid(RATES, cache=('off', 'exact', 'image_blind')),
    x='cache',
    episodes=2,
    same=(
        (replace(RATES, cache='off'), RATES),
        (RATES, replace(RATES, cache='image_blind')),
    ),
)


@pytest.fixture(scope='module')
def source(untrained) -> PolicySource:
    return PolicySource(untrained)


@pytest.fixture(scope='module')
def results(short_tasks, untrained, tmp_path_factory):
    work = tmp_path_factory.mktemp('work')
    seeds = episode_seeds(0, 2)
    first = run_conditions(SMALL.conditions, untrained, seeds, work, progress=False)
    # As it is read from disk again.
    again = run_conditions(SMALL.conditions, untrained, seeds, work, progress=False)
    # repr, because what cannot be measured is NaN, which equals nothing.
    assert repr(again) == repr(first)
    return first


@pytest.fixture(scope='module')
def record(results):
    return study_record(
        SMALL, Provenance('command', 'none', 'ab' * 32, (1, 3), 'c0de', 'cd' * 32), results
    )


MISS, HIT, OFF = (CacheOutcome(reuse) for reuse in (Reuse.MISS, Reuse.HIT, Reuse.OFF))
REUSED = CacheOutcome(Reuse.REUSED, reuses=1)
ON_REUSED = CacheOutcome(Reuse.HIT, on_reused_images=True)


@pytest.mark.parametrize(
    ('images', 'prefixes', 'expected'),
    [
        ({'front': MISS, 'wrist': MISS}, (MISS,), (0, 0, 2, 0, 0, 1)),
        ({'front': OFF, 'wrist': OFF}, (OFF,), (0, 0, 2, 0, 0, 1)),
        ({'wrist': HIT}, (MISS,), (1, 0, 0, 0, 0, 1)),
        ({'front': REUSED, 'wrist': MISS}, (REUSED,), (0, 1, 1, 0, 1, 0)),
        ({'front': HIT}, (ON_REUSED,), (1, 0, 0, 0, 1, 0)),
        ({'front': HIT}, (HIT, MISS), (1, 0, 0, 1, 0, 1)),
    ],
)
def test_a_report_is_counted_camera_by_camera_and_row_by_row(images, prefixes, expected):
    assert cache_use_of(CacheReport(images, prefixes)) == CacheUse(*expected)


def test_shares_are_of_all_that_was_needed():
    use = CacheUse(1, 2, 3, 0, 1, 3) + CacheUse(0, 0, 6, 1, 0, 0)
    assert use == CacheUse(1, 2, 9, 1, 1, 3)
    assert (use.images_saved, use.prefixes_saved) == (0.25, 0.4)
    assert math.isnan(CacheUse().images_saved) and math.isnan(CacheUse().prefixes_saved)


@pytest.mark.parametrize('changes', [{}, {'beta': 2.0, 'cfg_mode': 'serial'}], ids=str)
def test_what_ran_is_what_the_networks_counted(world, source, changes):
    policy, ran = source._policy, {'vision': 0, 'prefix': 0}
    real = policy.infer

    def infer(*arguments, **named):
        chunk, report = real(*arguments, **named)
        for network in ran:
            ran[network] += report.runs[network]
        return chunk, report

    policy.infer = infer
    try:
        result = run_episode(world, source, replace(RATES, **changes), 5)
    finally:
        policy.infer = real
    use, rows = result.cache_use, 2 if changes else 1
    assert (use.images_run, use.prefixes_run) == (ran['vision'], ran['prefix'])
    assert use.images_hit + use.images_run == 2 * result.inferences
    assert use.prefixes_hit + use.prefixes_run == rows * result.inferences


def test_exact_is_off_where_it_hits(results):
    off, exact, _ = (results[condition] for condition in SMALL.conditions)
    assert [e.trajectory for e in exact] == [e.trajectory for e in off]
    for with_cache, without in zip(exact, off, strict=True):
        # Two of three wrist images, which is a third of all; where the untrained arm hardly
        # moves, some of the front camera as well.
        assert 0.32 < with_cache.cache_use.images_saved < 0.9
        assert with_cache.cache_use.images_hit > 0 and with_cache.cache_use.images_run > 0
        assert without.cache_use.images_hit == without.cache_use.prefixes_hit == 0


@pytest.mark.thorough
def test_image_tokens_that_do_not_last_are_found_by_the_comparison(world, source, monkeypatch):
    """A fault that shows on hits alone: a study without hits could not find it."""
    off = replace(RATES, cache='off')
    expected = run_episode(world, source, off, 5).trajectory
    engine = source._policy._engine
    real = engine.encode_image

    def leaking(camera, pixels):
        real(camera, pixels)
        if camera == 0:  # front, after which the wrist camera's tokens are made, unless they hit
            real(1, pixels)

    monkeypatch.setattr(engine, 'encode_image', leaking)
    assert run_episode(world, source, off, 5).trajectory == expected
    assert run_episode(world, source, RATES, 5).trajectory != expected


def test_bounded_with_limits_of_0_is_exact(world, source):
    nothing = replace(
        RATES,
        cache='bounded',
        cache_max_reuses=4,
        cache_max_image_change=0.0,
        cache_max_state_bins=0,
    )
    bounded, exact = (run_episode(world, source, c, 5) for c in (nothing, RATES))
    assert bounded.trajectory == exact.trajectory
    assert bounded.cache_use == exact.cache_use
    assert bounded.cache_use.images_hit > 0 == bounded.cache_use.images_reused


def test_what_may_change_is_the_conditions(world, source):
    for change, bins, expected in ((None, None, (255.0, 256)), (2.0, 8, (2.0, 8))):
        condition = replace(
            BASE,
            cache='bounded',
            cache_max_reuses=3,
            cache_max_image_change=change,
            cache_max_state_bins=bins,
        )
        source.begin(condition, 0)
        policy = source.settings.cache
        assert (policy.max_image_change, policy.max_state_bins) == expected
        assert policy.max_reuses == 3


def test_json_csv_and_page_say_what_the_cache_did(record, results, tmp_path):
    _, csv_path = write_study(tmp_path, record)
    with csv_path.open(newline='') as file:
        rows = [row for row in csv.DictReader(file) if row['family'] == 'all']
    page = study_page([record])
    for condition, found, row in zip(SMALL.conditions, record['conditions'], rows, strict=True):
        whole, episodes = found['groups']['all'], results[condition]
        hits = sum(e.cache_use.images_hit for e in episodes)
        runs = sum(e.cache_use.images_run for e in episodes)
        assert (whole['cache_use']['images_hit'], whole['cache_use']['images_run']) == (hits, runs)
        assert (row['images_hit'], row['images_run']) == (str(hits), str(runs))
        assert float(row['images_saved_value']) == pytest.approx(hits / (hits + runs), abs=1e-3)
        assert f'<td>{hits}, 0, {runs}</td>' in page
    assert 'image tokens hit or reused, %' in page


BLIND = replace(BASE, cache='image_blind')
BOUNDED = replace(BASE, cache='bounded', cache_max_reuses=2)


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
        replace(SMALL, same=((RATES, BOUNDED),))


@pytest.mark.usefixtures('undrawn')
def test_the_json_and_the_page_say_whether_trajectories_are_the_same(record, results):
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
