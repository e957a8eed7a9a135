"""Fixed text that a family writes around its images: its tokens and their number."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from vla_runtime.export.errors import ExportError
from vla_runtime.processing.chat import ChatLayout, chat_pieces, image_places_of
from vla_runtime.processing.tokenizer import Tokenizer


def frame_tokens(
    tokenizer: Path, frames: Sequence[Sequence[str]], special: Collection[str]
) -> tuple[tuple[int, ...], ...]:
    """Tokenise frames piece by piece.

    A vocabulary cuts its own special tokens out before it splits the text between them. So the
    pieces tokenise alone as they do in the whole prompt.

    Args:
        tokenizer: file of the vocabulary.
        frames: each in pieces of text and special tokens.
        special: the pieces that are one token of the vocabulary.

    Returns:
        the tokens of each frame

    Raises:
        ExportError: a file that cannot be read, or without one of the special tokens.
    """
    try:
        vocabulary = Tokenizer.load(tokenizer, bos=False)
    except ValueError as error:
        raise ExportError(str(error)) from None

    def tokens(piece: str) -> list[int]:
        if piece not in special:
            return vocabulary.text_tokens(piece)
        token = vocabulary.token_id(piece)
        if token is None:
            raise ExportError(
                f"{tokenizer}: has no token '{piece}', which the prompts of this policy have; give "
                'the tokenizer of the model that it was trained from (--tokenizer)'
            )
        return [token]

    return tuple(tuple(token for piece in frame for token in tokens(piece)) for frame in frames)


def chat_places(tokenizer: Path, frame: str, image: str, cameras: int) -> tuple[int, ...]:
    """Count the text tokens before each camera's image in a prompt of the template `chat`.

    Args:
        tokenizer: file of the vocabulary.
        frame, image: layout of the prompt, see `processing.chat.ChatLayout`.
        cameras: images of the prompt.

    Raises:
        ExportError: a file that cannot be read, or that does not name its special tokens.
    """
    try:
        vocabulary = Tokenizer.load(tokenizer, bos=False)
        pieces = chat_pieces(ChatLayout(frame, image), cameras, '', vocabulary.special)
        counts = [len(ids) for ids in vocabulary.piece_tokens(pieces)]
    except ValueError as error:
        raise ExportError(str(error)) from None
    return image_places_of(counts, cameras)
