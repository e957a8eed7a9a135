"""Cache hits of a study: read off the reports, recorded with every condition, and never in vain."""

import csv
import math
from dataclasses import replace

import pytest

from vla_runtime.types import CacheOutcome, CacheReport, Reuse
from vla_tabletop.study.catalogue import BASE, Study
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import grid
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
    grid(RATES, cache=('off', 'exact')),
    x='cache',
    episodes=2,
    same=((replace(RATES, cache='off'), RATES),),
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
    off, exact = (results[condition] for condition in SMALL.conditions)
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


def test_a_study_from_before_it_was_counted_still_has_a_page(record):
    groups = [g for condition in record['conditions'] for g in condition['groups'].values()]
    for group in groups:
        group.pop('cache_use')
        group.pop('images_saved')
        group.pop('prefixes_saved')
    page = study_page([record])
    assert '<svg' in page and 'hit, reused, run' not in page
