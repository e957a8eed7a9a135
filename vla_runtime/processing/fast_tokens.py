"""Action tokens of FAST (arXiv 2501.09747): byte pairs of the coefficients of a cosine transform.

A policy writes them at the end of its text vocabulary, last token first, between `Action: ` and
`|`. A stream that is none is refused: the chunk that LeRobot makes of it is zero, or has
coefficients of 65533 (what it reads for broken UTF-8).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.files.quotes import quoted
from vla_runtime.processing.tokenizer import Tokenizer

# What training code writes before the action tokens, and behind them.
_PREFIX = ('Action', ':')
_END = '|'
_SPACE = '\N{LOWER ONE EIGHTH BLOCK}'
# Ends messages about an action tokenizer.
_REMEDY = 'check the folder given by --action-tokenizer'
# Longest run of spaces that is one token of a vocabulary.
_MOST_SPACES = 64
# Last code point: no coefficient is beyond it.
_LAST_CODE = 0x10FFFF


class AnswerError(ValueError):
    """Tokens that are no chunk."""


@dataclass(frozen=True)
class FastScale:
    """An action tokenizer's numbers: code point c is coefficient (c + `min_token`) / `scale`."""

    scale: float
    min_token: int


class FastTokens:
    """Decode answers to chunks.

    Args:
        action: tokenizer.json of the action tokenizer.
        shape: (H, A) of a chunk.
        skipped: tokens at the end of the text vocabulary that are no actions.
        checks_prefix: refuse an answer that does not begin with `Action:`.

    Attributes:
        end: the token `|`.

    Raises:
        ValueError: a file that cannot be read, a text vocabulary without `|`, or an action
            tokenizer that is empty, or larger than the text vocabulary.
    """

    def __init__(
        self,
        text: Path,
        action: Path,
        scale: FastScale,
        shape: tuple[int, int],
        *,
        skipped: int,
        checks_prefix: bool,
    ) -> None:
        tokenizer = Tokenizer.load(text)
        end = tokenizer.id_of(_END)
        if end is None:
            raise ValueError(
                f"{text}: the vocabulary has no '{_END}' token, which ends the actions, so this is "
                'not the tokenizer of this policy'
            )
        self.end: int | None = end
        self._prefix = [tokenizer.id_of(word) for word in _PREFIX]
        spaces = (tokenizer.id_of(_SPACE * count) for count in range(1, _MOST_SPACES + 1))
        self._beside = {token for token in (*self._prefix, *spaces) if token is not None}
        self._last = tokenizer.text_size - 1 - skipped
        vocabulary = _vocabulary(action)
        if not vocabulary:
            raise ValueError(f'{action}: has no entries; {_REMEDY}')
        if (entries := max(vocabulary.values()) + 1) > self._last + 1:
            raise ValueError(
                f'{action}: has {entries} entries, but {text} leaves {max(self._last + 1, 0)} '
                f'tokens to actions, with fast_skip_tokens (skipped_tokens) {skipped}; {_REMEDY}, '
                'and the fast_skip_tokens of config.json'
            )
        self._bytes = _entries(vocabulary)
        self._largest = _largest_code(vocabulary, self._bytes)
        self._scale, self._shape = scale, shape
        self._checks_prefix = checks_prefix
        self._waves = inverse_cosines(shape[0])

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return (H, A) float32 of an answer's tokens (n,) int64.

        AnswerError without an end, or bad.
        """
        if self.end not in tokens:
            raise _refusal(f"{len(tokens)} tokens without '{_END}', which ends the actions")
        return self.decode(tokens)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Return the normalised actions (H, A) float32 of tokens up to the first `|`.

        Too few coefficients are followed by zeros, and too many are cut, as in LeRobot; text among
        the actions is left out, as there.

        Raises:
            AnswerError: no action at all, a token behind the last action, bytes that are no text,
                or a coefficient beyond all of the vocabulary.
        """
        written = [int(token) for token in tokens]
        if self.end in written:
            written = written[: written.index(self.end)]
        if self._checks_prefix and written[: len(_PREFIX)] != self._prefix:
            raise _refusal("it does not begin with 'Action:'")
        actions = [self._last - token for token in written if token not in self._beside]
        behind = next((place for place, number in enumerate(actions) if number < 0), None)
        if behind is not None:
            raise _refusal(
                f'token {self._last - actions[behind]} stands behind those of actions, which end '
                f'at {self._last}'
            )
        joined = b''.join(self._bytes.get(number, b'') for number in actions)
        if not joined:
            raise _refusal('it holds no action')
        try:
            text = joined.decode('utf-8')
        except UnicodeDecodeError as error:
            raise _refusal(f'byte {error.start + 1} of {len(joined)} breaks UTF-8') from None
        code_points = np.array([ord(character) for character in text], dtype=np.float64)
        largest, least = code_points.max(), self._scale.min_token
        if largest > self._largest:
            raise _refusal(
                f'it holds a coefficient of {largest + least:.0f}, beyond '
                f'{self._largest + least}, the largest of its vocabulary'
            )
        return self._actions(code_points)

    def _actions(self, code_points: np.ndarray) -> np.ndarray:
        horizon, width = self._shape
        coefficients = np.zeros(horizon * width)
        given = (code_points + self._scale.min_token)[: horizon * width]
        coefficients[: len(given)] = given / self._scale.scale
        return (self._waves @ coefficients.reshape(horizon, width)).astype(np.float32)


def read_fast_scale(path: Path) -> FastScale:
    """Read an action tokenizer's processor_config.json; ValueError if it cannot be used."""
    try:
        config = json.loads(path.read_text(encoding='utf-8'))
        scale, least = config['scale'], config['min_token']
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f'{path}: is missing, or has no scale and min_token; take the folder of the action '
            'tokenizer with all its files'
        ) from None
    if type(scale) not in (int, float) or not 0 < scale <= _LAST_CODE:
        raise ValueError(
            f'{path}: field scale: {quoted(scale)} where a number above 0, at most {_LAST_CODE}, '
            f'is expected; {_REMEDY}'
        )
    if type(least) is not int or abs(least) > _LAST_CODE:
        raise ValueError(
            f'{path}: field min_token: {quoted(least)} where a whole number from -{_LAST_CODE} to '
            f'{_LAST_CODE} is expected; {_REMEDY}'
        )
    return FastScale(float(scale), least)


def _refusal(reason: str) -> AnswerError:
    return AnswerError(
        f'the policy wrote tokens that are no actions ({reason}); the chunk is refused. Check the '
        'instruction, the cameras and the precision that the policy runs in'
    )


def _vocabulary(path: Path) -> Mapping[str, int]:
    try:
        document: Any = json.loads(path.read_text(encoding='utf-8'))
        vocabulary = dict(document['model']['vocab'])
        for token in document.get('added_tokens') or ():
            vocabulary[token['content']] = token['id']
        return {text: int(number) for text, number in vocabulary.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{path}: is no tokenizer.json of an action tokenizer (BPE): {error}; {_REMEDY}'
        ) from None


def _entries(vocabulary: Mapping[str, int]) -> Mapping[int, bytes]:
    bytes_of = _byte_characters()
    found = {}
    for text, number in vocabulary.items():
        known = all(character in bytes_of for character in text)
        # The trainer's own alphabet leaves entries that are their characters.
        whole = bytes(bytes_of[character] for character in text) if known else text.encode()
        found[number] = whole
    return found


def _largest_code(vocabulary: Mapping[str, int], entries: Mapping[int, bytes]) -> int:
    """Return a coefficient's largest code point: the trainer's alphabet has all of them."""
    alphabet = max((ord(text) for text in vocabulary if len(text) == 1), default=0)
    return max((alphabet, *map(_largest_character, entries.values())))


def _largest_character(entry: bytes) -> int:
    """Return the largest code point of an entry; 0 where it is a part of a character."""
    try:
        return max(map(ord, entry.decode('utf-8')), default=0)
    except UnicodeDecodeError:
        return 0


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level BPE stands for, as in GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + place): byte for place, byte in enumerate(others)}


def inverse_cosines(length: int) -> np.ndarray:
    """Return the orthonormal inverse cosine transform (DCT-III), (length, length) float64."""
    places: np.ndarray = np.arange(length)[:, None]
    waves: np.ndarray = np.arange(length)[None]
    factor = np.where(waves == 0, np.sqrt(1.0 / length), np.sqrt(2.0 / length))
    cosines: np.ndarray = factor * np.cos(np.pi * (2 * places + 1) * waves / (2 * length))
    return cosines
