"""Answers of a FAST tokenizer that was trained as its authors do."""

import json
from pathlib import Path

import numpy as np
import pytest

from vla_runtime.processing.fast_tokens import AnswerError, FastScale, FastTokens, inverse_cosines

tokenizers = pytest.importorskip('tokenizers')
SHAPE = (50, 7)
SCALE = 10
# Tokens of the text vocabulary: above those of actions, words and marks.
TOKENS = 1100


@pytest.fixture
def text(tmp_path):
    words = ['<bos>', '|', 'Action', ':', *(f'word{number}' for number in range(TOKENS - 4))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, '|')
    path = tmp_path / 'text.json'
    written = tokenizers.Tokenizer(model)
    written.add_special_tokens(['<bos>'])
    written.save(str(path))
    return path


def decoder_of(text: Path, action: Path, least: int) -> FastTokens:
    return FastTokens(text, action, FastScale(SCALE, least), SHAPE, skipped=0, checks_prefix=False)


def tokens_of(numbers: list[int]) -> np.ndarray:
    """Tokens of entries of the action tokenizer: the last tokens of the text."""
    return TOKENS - 1 - np.array(numbers)


def coefficients(count: int, amplitude: float) -> np.ndarray:
    """Rounded coefficients (count, H * A) of smooth chunks."""
    random = np.random.default_rng(0)
    along = np.linspace(0, 1, SHAPE[0])[None, :, None]
    offsets, slopes, waves, speeds = random.normal(size=(4, count, 1, SHAPE[1]))
    chunks = amplitude * (offsets + 2 * slopes * along + 0.3 * waves * np.sin(6 * along * speeds))
    found = np.einsum('hk,bha->bka', inverse_cosines(SHAPE[0]), chunks) * SCALE
    return np.rint(found).astype(int).reshape(count, -1)


def trained(path: Path, texts: list[str], span: int):
    """Byte pairs as FAST's `fit` trains them."""
    pairs = tokenizers.ByteLevelBPETokenizer()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=[chr(code) for code in range(span + 1)],
        max_token_length=10000,
    )
    pairs._tokenizer.train_from_iterator(texts, trainer=trainer)
    pairs.save(str(path))
    return pairs


@pytest.mark.parametrize('amplitude', [0.3, 0.4])
def test_every_chunk_of_its_own_training_comes_back(text, tmp_path, amplitude):
    data = coefficients(500, amplitude)
    least, span = int(data.min()), int(data.max() - data.min())
    # Most of these characters are those of a byte, too.
    assert 161 < span < 324
    written = [''.join(map(chr, chunk - least)) for chunk in data]
    pairs = trained(tmp_path / 'action.json', written, span)
    decoder = decoder_of(text, tmp_path / 'action.json', least)
    for characters, chunk in zip(written, data, strict=True):
        numbers = pairs.encode(characters).ids
        assert pairs.decode(numbers) == characters
        expected = inverse_cosines(SHAPE[0]) @ (chunk / SCALE).reshape(SHAPE)
        assert np.abs(decoder.decode(tokens_of(numbers)) - expected).max() <= 1e-5


def test_a_coefficient_beyond_the_vocabulary_is_refused(text, tmp_path):
    """Bytes of a vocabulary make characters that no coefficient of its data had."""
    action = tmp_path / 'action.json'
    entries = [*(chr(256 + code) for code in range(33)), 'a', 'ï', '¿', '½']
    action.write_text(json.dumps({'model': {'vocab': {e: n for n, e in enumerate(entries)}}}))
    decoder = decoder_of(text, action, 0)
    # U+FFFD, which broken bytes become in LeRobot.
    with pytest.raises(AnswerError):
        decoder.decode(tokens_of([entries.index(entry) for entry in 'ï¿½']))
    assert np.isfinite(decoder.decode(tokens_of([entries.index('a')]))).all()
