"""Text that InternVL3 writes around the images of a prompt."""

from __future__ import annotations

from pathlib import Path

from vla_runtime.export.text_frames import frame_tokens

_START, _END = '<img>', '</img>'


def image_frames(tokenizer: Path, views: int) -> tuple[tuple[int, ...], ...]:
    """Tokenise `Image-1: <img>`, `</img>\\nImage-2: <img>`, …, `</img>`.

    Args:
        tokenizer: file of the vocabulary.
        views: images of a prompt.

    Returns:
        views + 1 tuples: the tokens in front of each image, and those behind the last

    Raises:
        ExportError: a file that cannot be read, or without the special tokens.
    """
    frames = [
        (f'Image-{view}: ', _START) if view == 1 else (_END, f'\nImage-{view}: ', _START)
        for view in range(1, views + 1)
    ]
    return frame_tokens(tokenizer, [*frames, (_END,)], special=(_START, _END))
