"""Chunks become the tokens that a policy is to write, and come back nearly as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vla_runtime.declarations.pi0_fast import ACTION_TOKENIZER, Pi0FastDims
from vla_tabletop.training.recipes.pi0_fast import pi0_fast_dims
from vla_tabletop.training.vocabulary import (
    ACTION_SCALE,
    ACTION_SYMBOLS,
    FIRST_SYMBOL,
    Answers,
    train_action_vocabulary,
    train_vocabulary,
)

SHAPE = (32, 6)


class Smooth:
    """Samples that are smooth chunks from standstill."""

    def teaches(self) -> np.ndarray:
        return np.ones(100, dtype=bool)

    def batch(self, frames: np.ndarray, rng: np.random.Generator):
        self.actions = smooth(len(frames), rng)
        return self


def smooth(count: int, rng: np.random.Generator) -> np.ndarray:
    along = (1 - np.cos(np.linspace(0, np.pi, SHAPE[0])))[None, :, None] / 2
    return (along * rng.uniform(-1, 1, (count, 1, SHAPE[1]))).astype(np.float32)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('vocabularies')
    train_vocabulary(folder / 'tokenizer.model', SHAPE[1], symbols=ACTION_SYMBOLS)
    train_action_vocabulary(folder / ACTION_TOKENIZER, Smooth())
    return folder


def dims_of(folder: Path) -> Pi0FastDims:
    from vla_runtime.processing.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder / 'tokenizer.model')
    assert tokenizer.id_of(ACTION_SYMBOLS[0]) == FIRST_SYMBOL
    return pi0_fast_dims(tokenizer.vocabulary_size)


def answers_of(folder: Path, **changes: int) -> Answers:
    dims = replace(dims_of(folder), **changes)
    return Answers(folder / 'tokenizer.model', folder / ACTION_TOKENIZER, dims)


def written(answers: Answers, chunks: np.ndarray) -> np.ndarray:
    tokens, mask = answers.write(chunks)
    assert (tokens[mask] > 0).all() and not tokens[~mask].any()
    return tokens


def test_a_chunk_comes_back_within_half_a_step_of_its_coefficients(folder: Path) -> None:
    chunks = smooth(50, np.random.default_rng(1))
    answers = answers_of(folder, answer_tokens=200)
    found, refused = answers.read(written(answers, chunks))
    assert not refused
    # Orthonormal: the error of a chunk is that of its coefficients.
    errors = np.sqrt(np.square(found - chunks).mean(axis=(1, 2)))
    assert errors.max() <= 0.5 / ACTION_SCALE.scale


def test_coefficients_that_no_chunk_had_are_written_and_too_large_ones_cut(folder: Path) -> None:
    answers = answers_of(folder, answer_tokens=200)
    rough = np.random.default_rng(2).uniform(-1, 1, (20, *SHAPE)).astype(np.float32)
    far = np.full((1, *SHAPE), 9.0, dtype=np.float32)
    found, refused = answers.read(written(answers, np.concatenate([rough, far])))
    assert not refused
    assert np.sqrt(np.square(found[:20] - rough).mean()) <= 0.5 / ACTION_SCALE.scale
    largest = (127 + ACTION_SCALE.min_token) / ACTION_SCALE.scale / np.sqrt(SHAPE[0])
    np.testing.assert_allclose(found[20], largest, atol=1e-5)


def test_a_chunk_of_zeros_is_an_answer_too(folder: Path) -> None:
    answers = answers_of(folder)
    found, refused = answers.read(written(answers, np.zeros((1, *SHAPE), dtype=np.float32)))
    assert not refused and not found.any()


def test_an_answer_that_would_be_too_long_loses_its_highest_frequencies(folder: Path) -> None:
    chunks = smooth(20, np.random.default_rng(3))
    answers = answers_of(folder, answer_tokens=5)
    tokens = written(answers, chunks)
    assert tokens.shape[1] <= 5
    found, refused = answers.read(tokens)
    assert not refused
    # The mean of the first joint is the first number that is written.
    errors = np.abs(found[:, :, 0].mean(axis=1) - chunks[:, :, 0].mean(axis=1))
    assert errors.max() <= 0.5 / ACTION_SCALE.scale / np.sqrt(SHAPE[0]) + 1e-6


def test_an_answer_that_is_none_is_counted(folder: Path) -> None:
    answers = answers_of(folder)
    found, refused = answers.read(np.zeros((2, 28), dtype=np.int64))
    assert refused == 2 and not found.any()
