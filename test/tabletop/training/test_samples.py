"""Training samples: made by the code that serves, labelled for the instruction that is drawn."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from vla_runtime.processing.actions import ActionSpace
from vla_runtime.processing.prompts import build_prompt
from vla_runtime.processing.tokenizer import Tokenizer
from vla_tabletop.sim.scene import COLOURS
from vla_tabletop.sim.tasks import Goal, all_instructions
from vla_tabletop.sim.world import JOINT_NAMES
from vla_tabletop.training.dataset import (
    GOALS,
    Dataset,
    DatasetSettings,
    better_half,
    generate,
    load,
)
from vla_tabletop.training.recipes.act import RECIPE as ACT
from vla_tabletop.training.recipes.pi05 import RECIPE as PI05
from vla_tabletop.training.samples import (
    Prompting,
    Samples,
    absolute,
    draw_instruction,
    frame_batches,
    relative,
)
from vla_tabletop.training.vocabulary import (
    PROMPT_FORMAT,
    PROMPT_LAYOUT,
    PROMPT_LENGTH,
    STATE_BINS,
    number_tokens,
    train_vocabulary,
)


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('vocabulary') / 'tokenizer.model'
    train_vocabulary(path, len(JOINT_NAMES))
    return path


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp('data')
    generate(folder, DatasetSettings(seed=1, episodes=2, episodes_per_shard=2), 1, progress=False)
    return load(folder)


def test_the_vocabulary_is_the_same_every_time(model: Path, tmp_path: Path) -> None:
    train_vocabulary(tmp_path / 'again.model', len(JOINT_NAMES))
    assert (tmp_path / 'again.model').read_bytes() == model.read_bytes()


def test_every_state_bin_is_one_token(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    wanted = number_tokens(model)
    empty = tokenizer.encode('State:', PROMPT_LENGTH)[1].sum()
    for number, token in zip(STATE_BINS, wanted, strict=True):
        tokens, mask = tokenizer.encode(f'State: {number}', PROMPT_LENGTH)
        assert mask.sum() == empty + 1 and tokens[empty] == token


def test_every_prompt_fits_and_held_out_wordings_need_no_bytes(model: Path) -> None:
    import sentencepiece

    tokenizer = Tokenizer.load(model)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for held_out in (False, True):
        for instruction in all_instructions(held_out):
            prompt = build_prompt(
                PROMPT_LAYOUT, PROMPT_FORMAT, instruction, np.zeros(6), 'negative'
            )
            tokenizer.encode(prompt, PROMPT_LENGTH)
            assert not any(pieces.is_byte(token) for token in pieces.encode(instruction))


def test_relative_actions_are_what_the_bundles_action_space_means() -> None:
    rng = np.random.default_rng(0)
    chunk, state = rng.normal(size=(1, 16, 6)), rng.normal(size=(1, 6))
    space = ActionSpace(
        names=JOINT_NAMES,
        kinds=('delta', 'delta', 'delta', 'delta', 'delta', 'absolute'),
        state_columns=(0, 1, 2, 3, 4, None),
    )
    np.testing.assert_allclose(relative(chunk, state)[0], space.from_robot(chunk[0], state[0]))
    np.testing.assert_allclose(absolute(relative(chunk, state), state), chunk)


def test_a_drawn_instruction_is_true_of_the_scene() -> None:
    rng = np.random.default_rng(0)
    blocks = np.array([[0.25, 0.10, 0], [0.30, 0.0, 0], [0.22, -0.12, 0]])
    for _ in range(300):
        goal, text = draw_instruction(rng, blocks, PI05.tasks)
        meant = GOALS[goal]
        if 'red' in text or 'green' in text or 'blue' in text:
            assert ('red', 'green', 'blue')[meant.block] in text
        else:
            assert meant.block == (2 if 'left' in text else 0)
        assert (meant.side is not None) == ('push' in text or 'slide' in text)
        assert meant.side is None or meant.side in text


def test_a_batch_is_reproducible_and_within_scale(model: Path, data: Dataset) -> None:
    samples = Samples(data, PI05.tasks, Prompting.of('pi05', PROMPT_FORMAT, model))
    frames = np.arange(16)
    one, two = (samples.batch(frames, np.random.default_rng(9)) for _ in range(2))
    for name in ('pixels', 'tokens', 'token_mask', 'actions', 'state', 'place', 'goal'):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert one.pixels.shape == (16, 2, 3, 64, 64) and np.abs(one.pixels).max() <= 1
    assert one.token_mask.any(axis=0).all(), 'no column is padding in every row'
    assert np.abs(one.actions).max() < 8
    restored = absolute(samples.action_normalizer.denormalise(one.actions), data.state[frames])
    np.testing.assert_allclose(restored, data.chunks[frames, one.goal], atol=1e-5)


def test_tags_follow_the_episode_and_are_dropped_now_and_then(
    model: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def spy(*arguments) -> str:
        written.append(build_prompt(*arguments))
        return written[-1]

    monkeypatch.setattr('vla_tabletop.training.samples.build_prompt', spy)
    samples = Samples(data, PI05.tasks, Prompting.of('pi05', PROMPT_FORMAT, model))
    frames = np.resize(np.arange(len(data.state)), 400)
    samples.batch(frames, np.random.default_rng(0))
    untagged = 0
    for frame, prompt in zip(frames, written, strict=True):
        word = 'positive' if data.positive[data.episode[frame]] else 'negative'
        assert 'Advantage' not in prompt or f';\nAdvantage: {word};\nAction: ' in prompt
        untagged += 'Advantage' not in prompt
    assert 0.22 < untagged / len(frames) < 0.38


def test_batches_can_be_entered_at_any_step() -> None:
    frames = np.arange(100, 137)
    whole = list(islice(frame_batches(frames, 8, seed=3), 11))
    np.testing.assert_array_equal(
        np.stack(whole[6:]), np.stack(list(islice(frame_batches(frames, 8, 3, start_step=6), 5)))
    )
    assert len(np.unique(np.concatenate(whole[:4]))) == 32, 'each frame once an epoch'
    with pytest.raises(ValueError, match='--work'):
        next(frame_batches(frames, 64, seed=3))


def test_without_language_there_is_one_task_and_the_better_half_of_episodes(data: Dataset) -> None:
    samples = Samples(data, ACT.tasks, None)
    batch = samples.batch(np.arange(20), np.random.default_rng(0))
    assert {GOALS[goal] for goal in batch.goal} == {Goal(COLOURS.index('red'))}
    assert batch.tokens.shape == batch.token_mask.shape == (20, 0)
    np.testing.assert_array_equal(samples.teaches(), data.positive[data.episode])


PLAN = DatasetSettings(seed=5, episodes=5, episodes_per_shard=2)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('data')
    generate(path, PLAN, processes=1, progress=False)
    return path


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.thorough
def test_a_resumed_run_ends_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / 'shard_00001.npz').unlink()
    # What a killed process leaves behind is not taken for a shard.
    (tmp_path / '.shard_00001.123.npz').write_bytes(b'half')
    generate(tmp_path, PLAN, processes=1, progress=False)
    (tmp_path / '.shard_00001.123.npz').unlink()
    assert _bytes(tmp_path) == _bytes(folder)


@pytest.mark.thorough
def test_the_number_of_processes_changes_nothing(folder: Path, tmp_path: Path) -> None:
    generate(tmp_path, PLAN, processes=2, progress=False)
    assert _bytes(tmp_path) == _bytes(folder)


def test_a_folder_of_another_plan_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r'dataset\.json'):
        generate(folder, DatasetSettings(seed=6), processes=1, progress=False)


def test_an_unfinished_data_set_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / 'dataset.json').write_bytes((folder / 'dataset.json').read_bytes())
    with pytest.raises(FileNotFoundError, match='shard'):
        load(tmp_path)


def test_frames_hold_what_the_schema_says(folder: Path) -> None:
    data = load(folder)
    frames = len(data.state)
    assert frames > PLAN.episodes * 5
    assert data.images.shape == (frames, 2, 48, 64, 3) and data.images.dtype == np.uint8
    assert data.chunks.shape == (frames, len(GOALS), 32, 6)
    assert data.pixel.shape == (frames, 2, len(COLOURS), 2)
    assert np.array_equal(np.unique(data.episode), np.arange(PLAN.episodes))
    assert np.all(np.isfinite(data.chunks))


def test_each_goals_chunk_starts_at_the_frames_joints(folder: Path) -> None:
    data = load(folder)
    first = data.chunks[:, :, 0] - data.state[:, None]
    assert np.abs(first).max() < 0.101


def test_touch_chunks_of_different_blocks_differ(folder: Path) -> None:
    data = load(folder)
    ends = data.chunks[:, : len(COLOURS), -1, :5]
    apart = np.abs(ends[:, 0] - ends[:, 1]).max(axis=1)
    assert np.median(apart) > 0.05


def test_the_better_half_is_the_sooner_one_for_its_distance() -> None:
    distance = np.array([0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4])
    late = np.array([-0.2, 0.2, -0.2, 0.2, 0.2, -0.2, 0.2, -0.2])
    success, push = np.ones(8, dtype=bool), np.zeros(8, dtype=bool)
    positive = better_half(success, 1 + 10 * distance + late, distance, push)
    np.testing.assert_array_equal(positive, late < 0)


def test_a_failure_is_never_tagged_and_behaviours_are_judged_apart() -> None:
    success = np.array([True, False, False, False, True, True])
    push = np.array([False, False, False, False, True, True])
    time_s = np.array([5.0, 0.1, 0.1, 0.1, 9.0, 12.0])
    positive = better_half(success, time_s, np.ones(6), push)
    np.testing.assert_array_equal(positive, [True, False, False, False, True, False])
