"""Places of the images inside a family's prompts, counted with the policy's own vocabulary."""

from __future__ import annotations

from pathlib import Path

from vla_convert.checkpoints.errors import ExportError
from vla_runtime.processing.prompt_layout import PromptLayout
from vla_runtime.processing.tokenizer import Tokenizer


def count_image_places(
    tokenizer: Path, layout: PromptLayout, cameras: int, prompt_length: int
) -> tuple[int, ...]:
    """Count the text tokens before each camera's image.

    Args:
        tokenizer: file of the vocabulary.
        layout: layout of the prompt, with images inside.
        cameras: images of the prompt.
        prompt_length: text tokens of the padded prompt.

    Raises:
        ExportError: a file that cannot be read, or without one of the layout's special tokens.
    """
    before, after = layout.around_task
    try:
        vocabulary = Tokenizer.load(tokenizer, bos=layout.bos)
        pieces = layout.pieces(cameras, (before, '', after), vocabulary.special)
        counts = [len(ids) for ids in vocabulary.piece_tokens(pieces)]
    except ValueError as error:
        raise ExportError(str(error)) from None
    for token in layout.special:
        if token not in vocabulary.special:
            raise ExportError(
                f"{tokenizer}: has no token '{token}', which the prompts of this policy have; give "
                'the tokenizer of the model that it was trained from (--tokenizer)'
            )
    return layout.image_places(counts, cameras, prompt_length)
