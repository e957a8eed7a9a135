"""What a checkpoint folder says about its policy, whoever wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.bundle import CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.export.errors import ExportError
from vla_runtime.types import Family, PromptCleaning, PromptTemplate

CONFIG_FILE = 'config.json'
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer.model')


@dataclass(frozen=True)
class Question:
    """Something the folder lacks: the option that supplies it, and what is wanted."""

    option: str
    wanted: str


@dataclass(frozen=True)
class FolderFacts:
    """All that a folder states; None where it says nothing and the user is asked.

    Attributes:
        kind: who wrote the folder, for messages.
        family: of the policy.
        cameras: in the order the network sees them.
        cameras_stated: False where they are only the project's usual ones, free to be renamed.
        images: resize and padding of that project.
        normalisation: kinds that the policy was trained with.
        statistics: `state.mean`, `actions.q01` and so on; may be longer than the names. None
            where none were found.
        cleaning: of the task text, that project's way.
        action_names: in order.
        state_length: number of measured dimensions.
        action_length: number of real action dimensions.
        deltas: whether each action is relative to the state of the same index.
        template: of the prompt.
        prompt_length: tokens of the padded prompt.
        horizon: actions of a chunk.
        denoise_steps: Euler steps.
        image_size: edge of the input image in pixels.
        action_dim: padded action dimensions.
        state_dim: padded state dimensions.
        variant: Gemma variant of the language model.
        tokenizer: the file, where the folder has one.
        source: facts for people, kept in the bundle.
        questions: what the reader could not find.
    """

    kind: str
    family: Family
    cameras: tuple[CameraSpec, ...]
    images: ImageSpec
    normalisation: NormalisationSpec
    statistics: Mapping[str, np.ndarray] | None
    cleaning: PromptCleaning
    cameras_stated: bool = True
    action_names: tuple[str, ...] | None = None
    state_length: int | None = None
    action_length: int | None = None
    deltas: tuple[bool, ...] | None = None
    template: PromptTemplate | None = None
    prompt_length: int | None = None
    horizon: int | None = None
    denoise_steps: int | None = None
    image_size: int | None = None
    action_dim: int | None = None
    state_dim: int | None = None
    variant: str | None = None
    tokenizer: Path | None = None
    source: Mapping[str, str] = field(default_factory=dict)
    questions: tuple[Question, ...] = ()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON mapping.

    Raises:
        ExportError: missing, not JSON, or not a mapping.
    """
    try:
        document = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise ExportError(f'{path}: is missing') from None
    except (OSError, ValueError) as error:
        raise ExportError(f'{path}: cannot be read: {error}') from None
    if not isinstance(document, dict):
        raise ExportError(f'{path}: is not a mapping')
    return document


def field_of(
    document: Mapping[str, Any], path: Path, key: str, kind: type | tuple[type, ...]
) -> Any:
    """One value of a JSON mapping, of the expected type.

    Args:
        document: the mapping.
        path: its file, for messages.
        key: may be dotted for nested mappings.
        kind: expected type or types.

    Raises:
        ExportError: missing or of another type.
    """
    value: Any = document
    for part in key.split('.'):
        if not isinstance(value, Mapping) or part not in value:
            raise ExportError(f'{path}: field {key}: is missing')
        value = value[part]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = ' or '.join(item.__name__ for item in kinds)
        raise ExportError(
            f'{path}: field {key}: {value!r} ({type(value).__name__}) where {expected} is expected'
        )
    return value


def find_tokenizer(folder: Path) -> Path | None:
    """The folder's tokenizer file; tokenizer.json first where both forms of one are there."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            return folder / name
    return None
