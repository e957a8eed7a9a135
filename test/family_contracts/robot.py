"""The robot of the tiny policies, and the vocabularies that their prompts are made with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from vla_runtime.family.listing import find_family
from vla_runtime.processing.tokenizer import Tokenizer

CASES = Path(__file__).parents[1] / 'cases'
JOINTS = ('shoulder', 'elbow', 'gripper')
CAMERAS = ('top', 'wrist')
# Height and width of the observations' images.
IMAGE_SIZE = (48, 64)


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Names of dimensions that nobody has named."""
    return tuple(f'{name}_{i}' for i in range(count))


@lru_cache
def places_of(
    family: str, tokenizer: str, cameras: int = len(CAMERAS), length: int = 192
) -> tuple[int, ...]:
    """Text tokens before each image of a family's prompts.

    Args:
        family: name of the family, of one template.
        tokenizer: its vocabulary, below the shipped cases.
        cameras: number of images.
        length: text tokens of a prompt; only images behind the task depend on it.
    """
    (template,) = find_family(family).templates.values()
    layout = template.filled({})
    vocabulary = Tokenizer.load(CASES / tokenizer, bos=layout.bos)
    before, after = layout.around_task
    pieces = layout.pieces(cameras, (before, '', after), vocabulary.special)
    counts = [len(ids) for ids in vocabulary.piece_tokens(pieces)]
    return layout.image_places(counts, cameras, length)
