"""Training: its forward is the served one, it learns, and a resumed run is the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.declarations.pi0_fast import ACTION_TOKENIZER
from vla_runtime.models.base.expert_network import stacked
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.policy import Policy
from vla_runtime.processing.tokenizer import Tokenizer
from vla_tabletop.sim.closed_loop import observe
from vla_tabletop.sim.world import JOINT_NAMES, Tabletop
from vla_tabletop.training.dataset import Dataset, DatasetSettings, generate, load
from vla_tabletop.training.demo_bundle import write_demo_bundle
from vla_tabletop.training.loss_plot import plot_losses
from vla_tabletop.training.objectives import answer_logits, locate
from vla_tabletop.training.recipes import RECIPE_NAMES, find_recipe
from vla_tabletop.training.recipes.pi05 import encode_prefix, pi05_dims
from vla_tabletop.training.recipes.recipe import STAGES
from vla_tabletop.training.samples import TABLETOP, Prompting, Samples, absolute
from vla_tabletop.training.start import Start
from vla_tabletop.training.training import Training, TrainingSettings, learning_rate
from vla_tabletop.training.vocabulary import (
    ACTION_SYMBOLS,
    Answers,
    number_tokens,
    train_action_vocabulary,
    train_vocabulary,
)

PI05 = find_recipe('pi05')
PLAN = TrainingSettings(see_steps=3, ground_steps=3, act_steps=4, batch=8, draws=2)


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('vocabulary') / 'tokenizer.model'
    train_vocabulary(path, len(JOINT_NAMES), symbols=ACTION_SYMBOLS)
    return path


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp('data')
    generate(folder, DatasetSettings(seed=2, episodes=4, episodes_per_shard=4), 1, progress=False)
    return load(folder)


def _samples(family: str, data: Dataset, vocabulary: Path) -> Samples:
    recipe = find_recipe(family)
    prompting = None if recipe.prompt is None else Prompting.of(family, recipe.prompt, vocabulary)
    return Samples(data, recipe.tasks, prompting)


@pytest.fixture(scope='module')
def samples(data: Dataset, vocabulary: Path) -> Samples:
    return _samples('pi05', data, vocabulary)


def _training(
    plan: TrainingSettings,
    samples: Samples,
    vocabulary: Path,
    folder: Path,
    start: Start | None = None,
) -> Training:
    size = Tokenizer.load(vocabulary).vocabulary_size
    recipe, answers = find_recipe(plan.family), None
    if recipe.family.head == 'tokens':
        action = folder / ACTION_TOKENIZER
        train_action_vocabulary(action, samples)
        answers = Answers(vocabulary, action, recipe.dims(size))
    numbers = number_tokens(vocabulary)
    return Training(plan, samples, numbers, size, folder, start=start, answers=answers)


@pytest.fixture(scope='module')
def finished(
    samples: Samples, vocabulary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Training:
    training = _training(PLAN, samples, vocabulary, tmp_path_factory.mktemp('run'))
    training.run(progress=False)
    return training


@pytest.mark.thorough
def test_the_training_prefix_is_the_served_prefix(finished: Training, samples: Samples) -> None:
    network = finished.learner.network
    batch = samples.batch(np.arange(4), np.random.default_rng(0))
    pixels, tokens = torch.from_numpy(batch.pixels), torch.from_numpy(batch.tokens)
    token_mask = torch.from_numpy(batch.token_mask)
    with torch.no_grad():
        ours = encode_prefix(network, pixels, {'tokens': tokens, 'token_mask': token_mask})
        image_tokens = network.vision(pixels.flatten(0, 1)).unflatten(0, (4, 2))
        everyone = torch.ones(4, 2, dtype=torch.bool)
        embedded, served_mask = network.embed_prefix(image_tokens, everyone, tokens, token_mask)
        served = stacked('past', *network.encode_prefix(embedded, served_mask))
    assert torch.equal(ours.past['prefix_mask'], served_mask)
    valid = served_mask[None, :, None, :, None]
    for name, past in served.items():
        torch.testing.assert_close(ours.past[name] * valid, past * valid, atol=1e-5, rtol=1e-5)
    assert ours.last.shape == (4, network.dims.language.width)
    assert ours.images.shape == (4, 2, 16, network.dims.language.width)


def test_a_point_is_located_in_its_patch_and_black_bars_show_nothing() -> None:
    # In pixels of the 64x64 square: middle, near the left edge, below the image, behind the camera.
    pixel = torch.tensor([[0.1, 0.1], [-1.3, 0.0], [0.0, 1.1], [float('nan')] * 2])
    patch, offset, seen = locate(pixel, 24.0)
    assert seen.tolist() == [True, True, False, False]
    assert patch[0] == 10 and patch[1] == 8
    torch.testing.assert_close(offset[0], torch.full((2,), 2.4 / 16 - 0.5))


@pytest.mark.thorough
@pytest.mark.parametrize('stop_after', [2, 5, 8])
def test_a_resumed_run_is_the_uninterrupted_run(
    finished: Training,
    samples: Samples,
    vocabulary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_after: int,
) -> None:
    monkeypatch.setattr('vla_tabletop.training.training._CHECKPOINT_EVERY', 1)
    training = _training(PLAN, samples, vocabulary, tmp_path)
    step, taken = training._train_step, []

    def interrupted(*arguments):
        if len(taken) == stop_after:
            raise KeyboardInterrupt
        taken.append(None)
        return step(*arguments)

    monkeypatch.setattr(training, '_train_step', interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.run(progress=False)
    resumed = _training(PLAN, samples, vocabulary, tmp_path)
    resumed.run(progress=False)
    for network in ('average', 'learner'):
        ours, theirs = (getattr(run, network).state_dict() for run in (resumed, finished))
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


def test_training_goes_on_from_a_bundles_weights_and_then_teaches_only_the_heads(
    finished: Training, samples: Samples, vocabulary: Path, tmp_path: Path
) -> None:
    network = finished.average
    bundle = tmp_path / 'demo'
    made = {'training': {'seed': 0}}
    write_demo_bundle(bundle, network, samples.statistics, vocabulary, made, 0)
    start = Start.read(bundle, PI05, TABLETOP)
    assert start.made == made and start.sha256 == read_bundle(bundle).spec.files[start.weights.name]
    np.testing.assert_array_equal(
        start.statistics['actions.q99'], samples.statistics['actions.q99']
    )

    plan = replace(PLAN, see_steps=0, ground_steps=3, start=start.sha256)
    training = _training(plan, samples, vocabulary, tmp_path, start)
    heads = {name: value.clone() for name, value in training.learner.ground.state_dict().items()}
    frames = training._train_frames[: plan.batch]
    training._train_step('ground', frames)
    for name, value in network.state_dict().items():
        assert torch.equal(training.learner.network.state_dict()[name], value), name
    after = training.learner.ground.state_dict()
    assert all(not torch.equal(after[name], value) for name, value in heads.items())
    training._train_step('act', frames)
    moved = training.learner.network.state_dict()
    assert any(not torch.equal(moved[name], value) for name, value in network.state_dict().items())


def test_a_start_of_another_network_is_refused_by_its_folder(
    samples: Samples, vocabulary: Path, tmp_path: Path
) -> None:
    dims = pi05_dims(Tokenizer.load(vocabulary).vocabulary_size)
    shallow = replace(dims, vision=replace(dims.vision, depth=1))
    network = build_network('pi05', shallow)
    bundle = tmp_path / 'shallow'
    write_demo_bundle(bundle, network, samples.statistics, vocabulary, {}, 0)
    with pytest.raises(ValueError, match='--from'):
        Start.read(bundle, PI05, TABLETOP)


def test_a_checkpoint_of_another_plan_is_refused(
    samples: Samples, vocabulary: Path, tmp_path: Path
) -> None:
    _training(PLAN, samples, vocabulary, tmp_path)._save()
    with pytest.raises(ValueError, match=r'checkpoint\.pt'):
        _training(replace(PLAN, seed=1), samples, vocabulary, tmp_path)


@pytest.mark.parametrize(
    ('damage', 'field'),
    [
        (lambda path, state: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
         'the file'),
        (lambda path, state: path.write_bytes(b''), 'the file'),
        (lambda path, state: torch.save([1], path), 'the file'),
        (lambda path, state: torch.save({**state, 'step': '3'}, path), 'step'),
        (lambda path, state: torch.save({**state, 'learner': {}}, path), 'learner'),
        (lambda path, state: torch.save({**state, 'optimizer': {}}, path), 'optimizer'),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named(
    damage: Callable[[Path, dict[str, Any]], object],
    field: str,
    samples: Samples,
    vocabulary: Path,
    tmp_path: Path,
) -> None:
    _training(PLAN, samples, vocabulary, tmp_path)._save()
    path = tmp_path / 'checkpoint.pt'
    damage(path, torch.load(path, weights_only=True))
    with pytest.raises(ValueError, match='remove it') as refused:
        _training(PLAN, samples, vocabulary, tmp_path)
    assert str(refused.value).startswith(f'{path}: {field}: ')
    assert '\n' not in str(refused.value)


@pytest.mark.thorough
@pytest.mark.parametrize('family', RECIPE_NAMES)
@pytest.mark.parametrize('stage', STAGES)
def test_each_stage_of_each_family_learns(
    stage: str, family: str, data: Dataset, vocabulary: Path, tmp_path: Path
) -> None:
    steps = 25
    plan = replace(PLAN, family=family, **{f'{stage}_steps': steps})
    training = _training(plan, _samples(family, data, vocabulary), vocabulary, tmp_path)
    frames = training._train_frames[: plan.batch]
    losses = []
    for training._step in range(steps):
        losses.append(training._train_step(stage, frames)['loss'])
    # The logarithm of a likelihood over a thousand tokens falls by less.
    most = 0.9 if training.recipe.family.head == 'tokens' and stage == 'act' else 0.8
    assert np.mean(losses[-5:]) < most * np.mean(losses[:3])


def test_the_rate_warms_up_and_decays() -> None:
    plan = TrainingSettings()
    rates = [learning_rate(plan, step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(plan.learning_rate / 100)
    assert max(rates) == pytest.approx(plan.learning_rate) and np.argmax(rates) in (99, 100)
    assert rates[-1] < 0.02 * plan.learning_rate
    assert np.all(np.diff(rates[100:]) <= 0)


@pytest.mark.thorough
def test_curves_of_all_stages_are_drawn(finished: Training, tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    assert {row['stage'] for row in finished.history} == set(STAGES)
    plot_losses(finished.history, tmp_path / 'loss.png')
    assert (tmp_path / 'loss.png').read_bytes().startswith(b'\x89PNG')


def test_the_written_bundle_serves_what_was_trained(
    finished: Training, samples: Samples, vocabulary: Path, tmp_path: Path
) -> None:
    network = finished.average
    write_demo_bundle(tmp_path / 'demo', network, samples.statistics, vocabulary, {'seed': 2}, 0)
    _assert_serves(tmp_path / 'demo', samples, finished)


def _assert_serves(folder: Path, samples: Samples, finished: Training) -> None:
    bundle = read_bundle(folder)
    assert bundle.spec.camera_names == Tabletop.cameras
    assert bundle.spec.action_names == bundle.spec.state_names == JOINT_NAMES
    assert 'verification.json' in bundle.spec.files

    world, policy = Tabletop(), Policy.load(folder)
    world.reset(0)
    observation = observe(world, 'touch the red block')
    chunk, report = policy.infer(observation)
    assert chunk.names == JOINT_NAMES and chunk.horizon == 32 and chunk.step_time_s == 0.05
    actions = samples.action_normalizer.denormalise(chunk.normalised)
    expected = absolute(actions[None].astype(np.float64), observation.state[None])[0]
    np.testing.assert_allclose(chunk.actions, expected, atol=1e-6)
    assert np.abs(chunk.normalised).max() > 1e-3
    assert (report.tokens == ()) == (finished.recipe.prompt is None)
    world.close()
    policy.close()


@pytest.mark.thorough
@pytest.mark.parametrize('family', ['smolvla', 'act'])
def test_another_familys_bundle_serves_what_its_training_computes(
    family: str, data: Dataset, vocabulary: Path, tmp_path: Path
) -> None:
    samples = _samples(family, data, vocabulary)
    plan = replace(PLAN, family=family, see_steps=1, ground_steps=1, act_steps=2)
    training = _training(plan, samples, vocabulary, tmp_path)
    training.run(progress=False)
    network, recipe = training.average, training.recipe
    text = None if recipe.prompt is None else vocabulary
    rates = write_demo_bundle(tmp_path / 'demo', network, samples.statistics, text, {}, 1)
    assert all(rate.startswith(('0/1', '1/1')) for rate in rates.values()) and rates
    _assert_serves(tmp_path / 'demo', samples, training)

    # The prefix of a batch of two is, row by row, what serving computes of one observation.
    batch = samples.batch(np.arange(2), np.random.default_rng(0))
    prefix = training._prefix(network, batch)
    assert prefix.images.shape == (2, 2, 16, 96) and prefix.last.shape == (2, 96)
    for row in range(2):
        image_tokens = network.vision(torch.from_numpy(batch.pixels[row]))
        rows = {
            name: torch.from_numpy(getattr(batch, name)[row : row + 1])
            for name in recipe.family.prefix_inputs(network.dims)
        }
        served = network.prefix(image_tokens, torch.ones(2, dtype=torch.bool), **rows)
        values = served['cross_value'][:, 0]
        torch.testing.assert_close(prefix.past['cross_value'][:, row], values, atol=1e-5, rtol=1e-5)


def test_answers_are_learned_as_they_are_served(
    data: Dataset, vocabulary: Path, tmp_path: Path
) -> None:
    """The objective reads all tokens of an answer at once, and serving one a pass."""
    samples = _samples('pi0_fast', data, vocabulary)
    training = _training(replace(PLAN, family='pi0_fast'), samples, vocabulary, tmp_path)
    frames = training._train_frames[: PLAN.batch]
    for training._step in range(3):
        training._train_step('act', frames)
    network = training.learner.network
    with torch.no_grad():
        prefix = training._prefix(network, samples.batch(frames, np.random.default_rng(0)))
        tokens, served = network.answer(prefix.past)
        logits = answer_logits(network, prefix.past, tokens[:, :-1])
    torch.testing.assert_close(logits, served, atol=1e-5, rtol=1e-5)
    metrics = training.check()
    assert 0.0 <= metrics['refused'] <= 1.0
