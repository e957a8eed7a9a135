"""Running conditions: over processes, resumable, on seeds that nothing else has used."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial

import pytest

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.writer import seal
from vla_runtime.files.json_file import LARGEST_JSON
from vla_runtime.processes.workers import workers
from vla_tabletop.sim.scene import FIRST_UNSEEN_SEED
from vla_tabletop.study import runner
from vla_tabletop.study.condition import Condition, grid
from vla_tabletop.study.runner import episode_seeds, run_conditions

EXPERT = Condition(chunk_source='expert')
NO_BUNDLE = None  # the expert needs none


def run(conditions, seeds, work, processes=1):
    pool = None if processes == 1 else partial(workers, processes)
    return run_conditions(conditions, NO_BUNDLE, seeds, work, pool, progress=False)


def test_seeds_are_unseen_and_those_of_two_studies_differ():
    first, second = episode_seeds(0, 500), episode_seeds(1, 500)
    # A bundle is checked on the first hundreds of the unseen ones.
    assert min(first) >= FIRST_UNSEEN_SEED + 1_000_000
    assert not set(first) & set(second)
    assert first[:20] == episode_seeds(0, 20)


@pytest.mark.parametrize(('seed', 'episodes'), [(0, 0), (0, 100_001), (-1, 20)])
def test_no_episodes_too_many_or_a_negative_seed_is_an_error(seed, episodes):
    with pytest.raises(ValueError, match=f'{episodes} episodes from seed {seed}'):
        episode_seeds(seed, episodes)


@pytest.mark.thorough
def test_two_processes_give_what_one_gives_in_the_order_of_the_seeds(tmp_path):
    conditions, seeds = grid(EXPERT, replan_interval=(4, 8)), episode_seeds(3, 7)
    alone = run(conditions, seeds, tmp_path / 'one')
    shared = run(conditions, seeds, tmp_path / 'two', processes=2)
    # repr, because what cannot be measured is NaN, which equals nothing.
    assert repr(alone) == repr(shared)
    assert [episode.seed for episode in alone[conditions[0]]] == list(seeds)
    assert [episode.family for episode in alone[conditions[0]]][:3] == [
        'colour',
        'position',
        'colour',
    ]


def test_what_was_done_is_not_done_again(tmp_path, monkeypatch):
    conditions, seeds = grid(EXPERT, replan_interval=(4, 8)), episode_seeds(3, 2)
    first = run(conditions[:1], seeds, tmp_path)
    ran = []
    real = runner.run_episode

    def counted(world, source, condition, seed, index):
        ran.append(condition)
        return real(world, source, condition, seed, index)

    monkeypatch.setattr(runner, 'run_episode', counted)
    # However many episodes a finished condition has.
    (finished,) = tmp_path.rglob('*.json')
    finished.write_text(finished.read_text() + ' ' * LARGEST_JSON)
    both = run(conditions, seeds, tmp_path)
    assert ran == [conditions[1]] * 2
    assert repr(both[conditions[0]]) == repr(first[conditions[0]])


def test_interrupted_it_goes_on_and_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    conditions, seeds = grid(EXPERT, replan_interval=(4, 8)), episode_seeds(3, 2)
    real, count = runner.run_episode, 0

    def interrupted(*arguments):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(runner, 'run_episode', interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(conditions, seeds, tmp_path / 'cut')
    # Only the condition that was complete is there.
    (kept,) = (tmp_path / 'cut').iterdir()
    assert json.loads(kept.read_text())['condition']['replan_interval'] == 4
    monkeypatch.setattr(runner, 'run_episode', real)
    assert repr(run(conditions, seeds, tmp_path / 'cut')) == repr(
        run(conditions, seeds, tmp_path / 'whole')
    )


def test_other_seeds_another_condition_or_bundle_is_another_result(tmp_path, untrained):
    base = runner.Run(Condition(), untrained, (1, 2))
    other_bundle = tmp_path / 'bundle'
    shutil.copytree(untrained, other_bundle)
    text = (other_bundle / 'policy.yaml').read_text()
    (other_bundle / 'policy.yaml').write_text(text.replace('denoise_steps: 10', 'denoise_steps: 9'))
    names = {
        runner._identity(each, 'source')
        for each in (
            base,
            replace(base, seeds=(1, 3)),
            replace(base, condition=Condition(beta=2.0)),
            replace(base, bundle=other_bundle),
        )
    }
    assert len(names) == 4
    assert runner._identity(base, 'source') == runner._identity(replace(base), 'source')


def test_after_a_change_of_the_code_a_condition_is_run_again(tmp_path, monkeypatch):
    conditions, seeds = grid(EXPERT, replan_interval=(4,)), episode_seeds(3, 1)
    ran = []
    real = runner.run_episode

    def counted(*arguments):
        ran.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(runner, 'run_episode', counted)
    run(conditions, seeds, tmp_path)
    run(conditions, seeds, tmp_path)
    assert len(ran) == 1
    monkeypatch.setattr(runner, 'source_digest', lambda: 'that of other code')
    run(conditions, seeds, tmp_path)
    assert len(ran) == 2


def test_a_bundle_with_another_receipt_acts_the_same(tmp_path, untrained):
    copy = tmp_path / 'bundle'
    shutil.copytree(untrained, copy)
    (copy / 'verification.json').write_text('{"verified": "again"}')
    spec = read_bundle(copy, verify=False).spec
    seal(copy, replace(spec, files={}))
    assert (copy / 'policy.yaml').read_text() != (untrained / 'policy.yaml').read_text()
    assert runner.bundle_identity(copy) == runner.bundle_identity(untrained)


@pytest.mark.thorough
@pytest.mark.usefixtures('short_tasks')
def test_a_condition_on_onnx_runtime_runs_from_files_that_are_made_once(
    tmp_path, untrained, monkeypatch
):
    conditions = grid(Condition(), backend=('torch', 'onnxruntime'))
    seeds = episode_seeds(0, 1)
    found = run_conditions(conditions, untrained, seeds, tmp_path, progress=False)
    torch, onnx = (found[condition][0] for condition in conditions)
    assert (torch.seed, torch.family) == (onnx.seed, onnx.family)
    (made,) = tmp_path.glob('*_onnx_float32_*')
    assert read_bundle(made).spec.dims == read_bundle(untrained).spec.dims

    def again(*arguments, **options):
        raise AssertionError('exported twice')

    monkeypatch.setattr('vla_convert.export.onnx.bundle.export_bundle', again)
    for file in tmp_path.glob('*.json'):
        file.unlink()
    assert run_conditions(conditions, untrained, seeds, tmp_path, progress=False) == found


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('{}', 'field episodes: is missing'),
        ('[]', 'is not a mapping'),
        ('{bad', 'cannot be read'),
        ('{"episodes": [{}]}', r'field episodes\[0\]\.jerk: is missing'),
        ('{"episodes": [{"jerk": {}, "cache_use": {}}]}', r'is no episode .*remove the file'),
    ],
)
def test_a_broken_file_among_the_finished_conditions_is_named(tmp_path, text, words):
    seeds = episode_seeds(3, 1)
    run([EXPERT], seeds, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    with pytest.raises(ValueError, match=f'{file}: .*{words}'):
        run([EXPERT], seeds, tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=f'{file}: is a FIFO'):
        run([EXPERT], seeds, tmp_path)
