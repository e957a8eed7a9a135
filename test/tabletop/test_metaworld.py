"""Meta-World beside the tabletop: what needs no simulator, and with it the loop itself."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from vla_runtime.declarations.pi0_fast import ACTION_TOKENIZER
from vla_runtime.execution.columns import Column
from vla_runtime.processing.tokenizer import Tokenizer
from vla_tabletop.metaworld.tasks import CAMERAS, TASKS, trained_instructions, wordings
from vla_tabletop.study.catalogue import STUDIES
from vla_tabletop.study.condition import Condition
from vla_tabletop.training.recipes import RECIPE_NAMES, find_recipe
from vla_tabletop.training.samples import TABLETOP, Prompting
from vla_tabletop.training.training import Training, TrainingSettings
from vla_tabletop.training.vocabulary import (
    ACTION_SYMBOLS,
    Answers,
    number_tokens,
    train_action_vocabulary,
    train_vocabulary,
)

FRAMES = (5, 7)


def test_every_task_has_five_wordings_and_training_never_sees_two() -> None:
    trained = set(trained_instructions())
    for task in TASKS:
        held_out = wordings(task, 'held_out')
        assert wordings(task, 'plain')[0] == wordings(task, 'training')[0]
        assert len({*wordings(task, 'training'), *held_out}) == 5
        assert not trained & set(held_out)
    # No sentence is of two tasks.
    assert max(Counter(trained_instructions()).values()) == 1


def test_held_out_wordings_are_made_of_words_of_training() -> None:
    words = {word for sentence in trained_instructions() for word in sentence.split()}
    for task in TASKS:
        assert {word for one in wordings(task, 'held_out') for word in one.split()} <= words


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'families': ('colour',)}, "families has 'colour'"),
        ({'families': TASKS, 'variant': 'moving'}, "variant has 'moving'"),
        ({'families': TASKS, 'absent_cameras': ('wrist',)}, "absent_cameras has 'wrist'"),
        ({'families': TASKS, 'absent_cameras': CAMERAS}, 'leaves no camera'),
        ({'families': TASKS, 'chunk_source': 'expert'}, 'of the tabletop alone'),
    ],
)
def test_a_condition_is_held_to_the_words_of_its_world(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Condition(world='metaworld', **changes)


def test_a_study_is_of_one_world() -> None:
    for study in STUDIES.values():
        assert {condition.world for condition in study.conditions} == {study.world}


@pytest.fixture(scope='module')
def demonstrations():
    pytest.importorskip('pyarrow')
    from vla_tabletop.metaworld.data import Demonstrations

    rng, total = np.random.default_rng(1), sum(FRAMES)
    return Demonstrations(
        images=rng.integers(0, 256, (total, 2, 64, 64, 3), dtype=np.uint8),
        state=rng.uniform(0, 1, (total, 4)).astype(np.float32),
        action=rng.uniform(-1, 1, (total, 4)).astype(np.float32),
        points_m=rng.uniform(0, 1, (total, 2, 3)).astype(np.float32),
        pixel=rng.uniform(-1, 1, (total, 2, 2, 2)).astype(np.float32),
        episode=np.repeat([0, 1], FRAMES),
        task=np.array([1, 0]),
        positive=np.array([True, False]),
        success=np.array([True, True]),
    )


def test_a_chunk_is_what_the_expert_did_and_its_last_action_again(
    demonstrations, tmp_path: Path
) -> None:
    samples_of = pytest.importorskip('vla_tabletop.metaworld.samples')
    recipe = find_recipe('pi05')
    path = tmp_path / 'tokenizer.model'
    train_vocabulary(path, 4, trained_instructions())
    assert recipe.prompt is not None
    prompting = Prompting.of('pi05', recipe.prompt, path)
    samples = samples_of.MetaWorldSamples(demonstrations, prompting)
    batch = samples.batch(np.array([3, 6]), np.random.default_rng(2))
    chunk = samples.action_normalizer.denormalise(batch.actions)
    np.testing.assert_allclose(chunk[0, :2], demonstrations.action[3:5], atol=1e-5)
    np.testing.assert_allclose(chunk[0, 2:], np.repeat(chunk[0, 1:2], 30, 0), atol=1e-5)
    np.testing.assert_allclose(chunk[1, :6], demonstrations.action[6:12], atol=1e-5)
    assert batch.goal.tolist() == [1, 0] and batch.place.shape == (2, 6)
    # Push names its object, reach its goal.
    np.testing.assert_array_equal(batch.pixel[0], demonstrations.pixel[3, :, 0])
    np.testing.assert_array_equal(batch.pixel[1], demonstrations.pixel[6, :, 1])
    # Without a tag in a prompt the good episodes teach alone.
    assert samples.teaches().all()
    blind = samples_of.MetaWorldSamples(demonstrations, None)
    assert blind.teaches().tolist() == [True] * 5 + [False] * 7
    assert blind.errors(chunk, batch)['first_m_s'] < 1e-5


@pytest.mark.parametrize('family', RECIPE_NAMES)
def test_a_recipe_fits_every_world(family: str, demonstrations, tmp_path: Path) -> None:
    """A step of each stage: other cameras, states and actions than the recipe was written for."""
    samples_of = pytest.importorskip('vla_tabletop.metaworld.samples')
    recipe = find_recipe(family)
    path = tmp_path / 'tokenizer.model'
    train_vocabulary(path, 4, trained_instructions(), ACTION_SYMBOLS)
    prompting = None if recipe.prompt is None else Prompting.of(family, recipe.prompt, path)
    samples = samples_of.MetaWorldSamples(demonstrations, prompting)
    samples.held_out = lambda: np.arange(sum(FRAMES)) == 0
    size = Tokenizer.load(path).vocabulary_size
    dims = recipe.dims(size)
    assert TABLETOP.fit(dims) == dims
    fitted = samples.world.fit(dims)
    assert (fitted.cameras, fitted.action_dim) == (2, 4)
    assert fitted.state_dim in (0, 4)
    answers = None
    if recipe.family.head == 'tokens':
        train_action_vocabulary(tmp_path / ACTION_TOKENIZER, samples)
        answers = Answers(path, tmp_path / ACTION_TOKENIZER, fitted)
    plan = TrainingSettings(family, see_steps=1, ground_steps=1, act_steps=1, batch=4, draws=1)
    training = Training(plan, samples, number_tokens(path), size, tmp_path, answers=answers)
    training.run(progress=False)
    *_, last = training.history
    assert np.isfinite([last['loss'], last['first_m_s']]).all()


def test_the_loop_of_the_studies_runs_an_expert() -> None:
    """In Meta-World's own environment: ./run metaworld python -m pytest test/tabletop."""
    pytest.importorskip('metaworld')
    from vla_runtime.types import ActionChunk
    from vla_tabletop.metaworld.simulator import ACTION_NAMES, STEP_TIME_S, Expert
    from vla_tabletop.study.episode import run_episode
    from vla_tabletop.study.smoothness import CacheUse
    from vla_tabletop.study.worlds import make_world

    class Source:
        needs_images = False
        action_names = ACTION_NAMES
        horizon = 8
        cache_use = CacheUse()

        def begin(self, condition, seed):
            self.experts = {task: Expert(task) for task in TASKS}

        def chunk(self, world, observation, plan):
            rows = np.repeat(self.experts[world.task].command(world)[None], 8, axis=0)
            kinds = ('velocity',) * 3 + ('position',)
            row32 = rows.astype(np.float32)
            return ActionChunk(rows, ACTION_NAMES, kinds, STEP_TIME_S, row32), False

    world = make_world('metaworld')
    assert [column.kind for column in world.columns] == ['velocity'] * 3 + ['position']
    assert all(isinstance(column, Column) and not column.feedback for column in world.columns)
    condition = Condition(
        world='metaworld', families=TASKS, replan_interval=1, delay_steps=0.0, handover='switch'
    )
    results = [run_episode(world, Source(), condition, 3000 + i, i) for i in range(len(TASKS))]
    assert sum(result.success for result in results) >= 7
    assert not any(result.refused or result.halted for result in results)
    # The first look is at this scene, and not at the one before.
    for index in range(len(TASKS)):
        world.reset(TASKS[index], 5)
        first, balls = world.points_m, world.data().site_xpos.copy()
        world.step(np.array([0.0, 0.0, 0.0, -1.0]))
        np.testing.assert_allclose(world.points_m, first, atol=2e-3)
        np.testing.assert_allclose(world.data().site_xpos[:, :2], balls[:, :2], atol=2e-3)
    # The seed is the scene.
    again = run_episode(world, Source(), condition, 3000, 0)
    assert again.trajectory == results[0].trajectory
    other = replace(condition, variant='camera_jitter')
    asked = world.begin(other, 3000, 0, True)
    jittered = world.observe(asked.instruction).images['corner4']
    world.begin(condition, 3000, 0, True)
    plain = world.observe(asked.instruction).images['corner4']
    assert jittered is not None and plain is not None and not np.array_equal(jittered, plain)
    world.close()


@pytest.fixture
def data_module(monkeypatch: pytest.MonkeyPatch):
    """The maker of data sets, with made-up episodes of two frames instead of the simulator's."""
    pytest.importorskip('pyarrow')
    data = pytest.importorskip('vla_tabletop.metaworld.data')

    class Nothing:
        def __init__(self, *_):
            pass

        def close(self):
            pass

    def record(simulator, expert, task, seed, number):
        return {
            'images': np.zeros((2, 2, 64, 64, 3), dtype=np.uint8),
            'state': np.zeros((2, 4), dtype=np.float32),
            'action': np.zeros((2, 4), dtype=np.float32),
            'points_m': np.zeros((2, 2, 3), dtype=np.float32),
            'pixel': np.zeros((2, 2, 2, 2), dtype=np.float32),
            'episode': np.full(2, number, dtype=np.int32),
            'task': np.array([TASKS.index(task)], dtype=np.int32),
            'instruction': np.array([task]),
            'success': np.array([True]),
            'positive': np.array([True]),
        }

    class Submit:
        def __init__(self, processes):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __call__(self, work, *words):
            future = Future()
            future.set_result(work(*words))
            return future

    monkeypatch.setattr(data, 'Simulator', Nothing)
    monkeypatch.setattr(data, 'Expert', Nothing)
    monkeypatch.setattr(data, '_record', record)
    monkeypatch.setattr(data, 'workers', Submit)
    return data


def test_shards_of_another_plan_are_not_taken(
    data_module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / 'set'
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def cut(*_):
            raise KeyboardInterrupt

        patch.setattr(data_module, '_merge', cut)
        data_module.generate(folder, data_module.DataPlan(episodes_per_task=5), 1, progress=False)
    assert list(folder.with_name('set.shards').iterdir())
    plan = data_module.DataPlan(episodes_per_task=10)
    data_module.generate(folder, plan, 1, progress=False)
    assert len(data_module.read(folder).task) == 10 * len(TASKS)


def test_a_folder_that_is_taken_is_refused_before_the_work(data_module, tmp_path: Path) -> None:
    from vla_tabletop.training.worlds import find_world

    world = find_world('metaworld')
    folder = tmp_path / 'set'
    folder.mkdir()
    (folder / 'notes.txt').write_text('mine')
    for make in (
        lambda: world.write_dataset(folder, 0, len(TASKS), 1, force=True),
        lambda: world.generate(folder, 0, len(TASKS), 1),
    ):
        with pytest.raises(ValueError, match='no data set'):
            make()
    assert [path.name for path in tmp_path.iterdir()] == ['set']
    (folder / 'notes.txt').unlink()
    world.write_dataset(folder, 0, len(TASKS), 1, force=False)
    with pytest.raises(ValueError, match='--force'):
        world.write_dataset(folder, 0, len(TASKS), 1, force=False)
    world.write_dataset(folder, 0, len(TASKS), 1, force=True)
    # Training goes on with it.
    world.generate(folder, 0, len(TASKS), 1)


@pytest.mark.parametrize('word', ['--help', '-h'])
def test_help_of_its_environment_makes_none(word: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / 'run', tmp_path)
    said = subprocess.run(
        [tmp_path / 'run', 'metaworld', word], capture_output=True, text=True, timeout=30
    )
    assert said.returncode == 0 and said.stdout.startswith('usage: ./run')
    assert [path.name for path in tmp_path.iterdir()] == ['run']
