"""Tokens of the text that InternVL3 writes around the images of a prompt."""

from __future__ import annotations

from pathlib import Path

from vla_runtime.export.errors import ExportError
from vla_runtime.processing.tokenizer import Tokenizer

_START, _END = '<img>', '</img>'


def image_frames(tokenizer: Path, views: int) -> tuple[tuple[int, ...], ...]:
    """Tokenise `Image-1: <img>`, `</img>\\nImage-2: <img>`, …, `</img>`.

    A vocabulary cuts its own special tokens out before it splits the text between them. So the
    pieces tokenise alone as they do in the whole prompt.

    Args:
        tokenizer: file of the vocabulary.
        views: images of a prompt.

    Returns:
        views + 1 tuples: the tokens in front of each image, and those behind the last

    Raises:
        ExportError: a file that cannot be read, or without the special tokens.
    """
    try:
        vocabulary = Tokenizer.load(tokenizer, bos=False)
    except ValueError as error:
        raise ExportError(str(error)) from None
    found = {word: vocabulary.token_id(word) for word in (_START, _END)}
    for word, token in found.items():
        if token is None:
            raise ExportError(
                f"{tokenizer}: has no token '{word}', which the prompts of this policy put around "
                'images; take the tokenizer.json of the model that config.json names as '
                'vlm_model_name'
            )
    start, end = (int(found[word] or 0) for word in (_START, _END))
    frames = []
    for view in range(views):
        text = vocabulary.text_tokens(f'{chr(10) if view else ""}Image-{view + 1}: ')
        frames.append((*((end,) if view else ()), *text, start))
    return (*frames, (end,))
