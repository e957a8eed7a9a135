"""Prompts to tokens: BOS where the policy was trained with it, the text, padding on the right.

Only the library of the vocabulary's file is needed: tokenizers for `tokenizer.json`, sentencepiece
for `tokenizer.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from vla_runtime.files.input_files import UnreadableFileError, whole_file
from vla_runtime.files.quotes import one_line
from vla_runtime.processing.prompts import Piece

# Gemma's, Llama's, and CLIP's.
_BOS_TOKENS = ('<bos>', '<s>', '<|startoftext|>')
_PAD_TOKEN = '<pad>'


class Tokenizer:
    """Encodes one prompt a call; build it with `Tokenizer.load`.

    Attributes:
        bos: token in front of every prompt; None without one.
        special: texts of the vocabulary's special tokens, for prompts with images inside;
            empty where the library does not name them.
        vocabulary_size: one more than the largest token id, so the least number of rows that the
            text embedding must have.
        text_size: tokens of the vocabulary itself, without those added to it.
        id_of: id of a token by its text; None for an unknown one.
    """

    def __init__(
        self,
        encode_text: Callable[[str], list[int]],
        *,
        bos: int | None,
        pad: int,
        vocabulary_size: int,
        text_size: int,
        id_of: Callable[[str], int | None],
        closing: int | None = None,
        encode_frame: Callable[[str], list[int]] | None = None,
        special: tuple[str, ...] = (),
    ) -> None:
        self._encode_text, self._encode_frame = encode_text, encode_frame
        self.special = special
        self.bos = bos
        self._first = [] if bos is None else [bos]
        self._closing = closing
        self._pad = pad
        self.vocabulary_size = vocabulary_size
        self.text_size = text_size
        self.id_of = id_of

    @classmethod
    def load(cls, path: Path, *, bos: bool = True, closing: str = '') -> Tokenizer:
        """Read a tokenizer from disk.

        Args:
            path: a `.json` file (tokenizers) or a `.model` file (sentencepiece).
            bos: put the vocabulary's `<bos>`, `<s>` or `<|startoftext|>` in front of every prompt.
            closing: token that every prompt ends with; '' for none.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: another kind of file, one that cannot be read, or one without a wanted
                token.
        """
        path = Path(path)
        if path.suffix not in ('.json', '.model'):
            raise ValueError(
                f'{path}: a tokenizer is a tokenizer.json (tokenizers) or a tokenizer.model '
                '(sentencepiece)'
            )
        try:
            whole_file(path)
        except FileNotFoundError:
            raise FileNotFoundError(f'{path}: no such tokenizer file') from None
        except UnreadableFileError as error:
            raise ValueError(f'{path}: {error}') from None
        load = cls._load_json if path.suffix == '.json' else cls._load_sentencepiece
        return load(path, bos, closing)

    @classmethod
    def _load_json(cls, path: Path, wants_bos: bool, closing: str) -> Tokenizer:
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding='utf-8'))
        # The library raises bare Exception for whatever it cannot parse.
        except Exception as error:
            reason = one_line(str(error), 300)
            beside = path.with_name('tokenizer.json')
            hint = (
                str(beside)
                if beside != path and beside.is_file()
                else 'the tokenizer.json or tokenizer.model that the policy was trained with'
            )
            raise ValueError(f'{path}: is no tokenizer: {reason}; give {hint}') from error
        bos = next(filter(_is_there, map(backend.token_to_id, _BOS_TOKENS)), None)
        if wants_bos and bos is None:
            raise _no_token(path, _BOS_TOKENS[0])
        # The file may ask for both, and would then cut prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        # An instruction that spells '<bos>' or '<image>' is text, as it is for sentencepiece.
        backend.encode_special_tokens = True

        # The text around images is the family's, and its special tokens are meant.
        @lru_cache(maxsize=1)
        def frames() -> tokenizers.Tokenizer:
            made = tokenizers.Tokenizer.from_str(backend.to_str())
            made.encode_special_tokens = False
            return made

        def encode_text(text: str) -> list[int]:
            return list(backend.encode(text, add_special_tokens=False).ids)

        def encode_frame(text: str) -> list[int]:
            return list(frames().encode(text, add_special_tokens=False).ids)

        pad = backend.token_to_id(_PAD_TOKEN)
        size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        return cls(
            encode_text,
            bos=bos if wants_bos else None,
            closing=_closing(path, closing, backend.token_to_id),
            pad=0 if pad is None else pad,
            vocabulary_size=size,
            text_size=backend.get_vocab_size(with_added_tokens=False),
            id_of=backend.token_to_id,
            encode_frame=encode_frame,
            special=tuple(token.content for token in backend.get_added_tokens_decoder().values()),
        )

    @classmethod
    def _load_sentencepiece(cls, path: Path, wants_bos: bool, closing: str) -> Tokenizer:
        import sentencepiece

        try:
            backend = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError as error:
            raise ValueError(f'{path}: not a readable sentencepiece model: {error}') from error
        if wants_bos and backend.bos_id() < 0:
            raise _no_token(path, _BOS_TOKENS[0])

        def encode_text(text: str) -> list[int]:
            return list(backend.encode(text, add_bos=False, add_eos=False))

        pad = max(backend.pad_id(), 0)
        size = backend.get_piece_size()
        bos = backend.bos_id() if wants_bos else None

        def id_of(text: str) -> int | None:
            found: int = backend.piece_to_id(text)
            return None if backend.is_unknown(found) else found

        return cls(
            encode_text,
            bos=bos,
            closing=_closing(path, closing, id_of),
            pad=pad,
            vocabulary_size=size,
            text_size=size,
            id_of=id_of,
        )

    def encode(self, prompt: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokenise a prompt.

        Args:
            prompt: the text, as `build_prompt` wrote it.
            length: L, the fixed number of tokens.

        Returns:
            tokens: (L,) int64: BOS exactly once and first where it is wanted, the text, then the
                pad id (0 where the vocabulary has none: its embedding is masked).
            mask: (L,) bool, False on padding.

        Raises:
            ValueError: the prompt does not fit (nothing is ever cut off), or has a character that
                is none.
        """
        return self.encode_pieces([Piece(prompt, False)], length)

    def encode_pieces(
        self, pieces: Sequence[Piece], length: int, *, padding_first: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokenise a prompt piece by piece; as `encode`, padding in front where it is asked for."""
        ids = [token for counted in self.piece_tokens(pieces) for token in counted]
        if self._closing is not None and ids[-1:] != [self._closing]:
            ids.append(self._closing)
        text = ''.join(piece.text for piece in pieces)
        tokens, mask = self._padded([*self._first, *ids], length, text)
        if padding_first:
            shift = length - int(mask.sum())
            return np.roll(tokens, shift), np.roll(mask, shift)
        return tokens, mask

    def piece_tokens(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Return the token ids of each piece, without BOS.

        ValueError for unnamed special tokens.
        """
        return [self._tokens(piece) for piece in pieces]

    def _tokens(self, piece: Piece) -> list[int]:
        _check_text(piece.text)
        if not piece.frame:
            return self._encode_text(piece.text)
        if self._encode_frame is None:
            raise ValueError(
                'a prompt with images inside needs a tokenizer.json (tokenizers), which names its '
                'special tokens; a sentencepiece model does not'
            )
        return self._encode_frame(piece.text)

    def _padded(self, ids: list[int], length: int, prompt: str) -> tuple[np.ndarray, np.ndarray]:
        if len(ids) > length:
            raise ValueError(
                f'prompt of {len(ids)} tokens is {len(ids) - length} too long for the '
                f"{length} places of this policy (prompt_length in the bundle's policy.yaml): "
                f'shorten the instruction. Prompt: {prompt!r}'
            )
        tokens = np.full(length, self._pad, dtype=np.int64)
        tokens[: len(ids)] = ids
        mask = np.zeros(length, dtype=bool)
        mask[: len(ids)] = True
        return tokens, mask


def _check_text(prompt: str) -> None:
    """Refuse half of a UTF-16 pair: it can stand in no file, message or vocabulary."""
    try:
        prompt.encode('utf-8')
    except UnicodeEncodeError as error:
        raise ValueError(
            f'prompt: character {error.start + 1} ({prompt[error.start]!r}) is half of a UTF-16 '
            'pair and no character of its own; mend the instruction where it is decoded. '
            f'Prompt: {prompt!r}'
        ) from None


def _is_there(token: int | None) -> bool:
    return token is not None


def _closing(path: Path, text: str, id_of: Callable[[str], int | None]) -> int | None:
    """Token id of the text that prompts end with; None for no such text."""
    if not text:
        return None
    found = id_of(text)
    if found is None:
        raise _no_token(path, text)
    return found


def _no_token(path: Path, token: str) -> ValueError:
    return ValueError(
        f"{path}: the vocabulary has no '{token}' token, so this is not the "
        'tokenizer of this policy; take the one that the checkpoint was trained with'
    )
