"""What the readers of all projects share: errors, files and settings of a checkpoint folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_runtime.files.json_file import JsonMapping
from vla_runtime.files.quotes import one_line
from vla_runtime.processing.prompts import PromptLayout
from vla_runtime.processing.tokenizer import Tokenizer
from vla_runtime.types import RotationForm

# --- Errors


class ExportError(ValueError):
    """A checkpoint that cannot become a bundle; the message says what would mend it."""


# --- Image positions inside prompts, counted with the policy's vocabulary


def count_image_places(
    tokenizer: Path, layout: PromptLayout, cameras: int, prompt_length: int
) -> tuple[int, ...]:
    """Count the text tokens before each camera's image.

    Raises ExportError: an unreadable vocabulary, or one without a special token of the layout.
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


CONFIG_FILE = 'config.json'
AbsentCameras = Literal['masked', 'left_out']
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer.model')
# Folder in which LeRobot saves it, after 0.6.1.
_TOKENIZER_FOLDER = 'tokenizer'
_LONGEST_VALUE = 200


@dataclass(frozen=True)
class FolderPose:
    """An end-effector pose of a folder: x, y, z in metres and a rotation.

    Attributes:
        action: its first column among the actions.
        state: its first column among the state; None: the state is without this pose.
        form: representation of the rotation, of actions and state; None: six numbers, of which
            the folder does not show how they are written.
        is_delta: the action is composed with the measured pose.
    """

    name: str
    action: int
    state: int | None
    form: RotationForm | None
    is_delta: bool


def expect(config: JsonMapping, key: str, expected: object) -> None:
    """Refuse a setting that this runtime does not reproduce (JsonError); absence is accepted."""
    found = config.get(key, (bool, int, float, str), expected)
    if found != expected:
        raise config.error(
            key, f'{found!r} is not supported; this runtime runs policies with {expected!r}'
        )


def must_agree(
    one: JsonMapping, key: str, value: object, other: JsonMapping, other_key: str, found: object
) -> None:
    """Refuse values of two files that must be the same and are not (ExportError)."""
    if value != found:
        first, second = (one_line(str(item), _LONGEST_VALUE) for item in (value, found))
        raise ExportError(
            f'{one.path} says {key} {first} but {other.path} says {other_key} {second}; they must '
            'agree'
        )


def find_tokenizer(folder: Path) -> Path | None:
    """The folder's tokenizer file; tokenizer.json first where both forms of one are there."""
    for place in (folder, folder / _TOKENIZER_FOLDER):
        for name in TOKENIZER_FILES:
            if (place / name).is_file():
                return place / name
    return None
