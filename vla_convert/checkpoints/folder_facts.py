"""Facts of a checkpoint folder about its policy, in one form for all projects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from vla_runtime.bundle.schema import CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.files.json_file import JsonMapping
from vla_runtime.processing.prompts import PromptLayout
from vla_runtime.processing.tokenizer import Tokenizer
from vla_runtime.types import FlowTimes, JointSpaceName, PromptCleaning, RotationForm

# --------------------------------------------------------------------------------------------------
# Error of an export, worded for the user.


class ExportError(ValueError):
    """A checkpoint that cannot become a bundle; the message says what would mend it."""


# --------------------------------------------------------------------------------------------------
# Places of the images inside a family's prompts, counted with the policy's own vocabulary.


def count_image_places(
    tokenizer: Path, layout: PromptLayout, cameras: int, prompt_length: int
) -> tuple[int, ...]:
    """Count the text tokens before each camera's image.

    Args:
        layout: layout of the prompt, with images inside.

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


# --------------------------------------------------------------------------------------------------

CONFIG_FILE = 'config.json'
AbsentCameras = Literal['masked', 'left_out']
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer.model')


@dataclass(frozen=True)
class Question:
    """Something the folder lacks: the option that supplies it, and what is wanted."""

    option: str
    wanted: str


@dataclass(frozen=True)
class FolderPose:
    """An end-effector pose of a folder: x, y, z and a rotation in metres and plain numbers.

    Attributes:
        action: its first column among the actions.
        state: its first column among the state; None: the state is without this pose.
        form: representation of the rotation, in actions and state alike.
        is_delta: it is composed with the pose of the state.
    """

    name: str
    action: int
    state: int | None
    form: RotationForm
    is_delta: bool


@dataclass(frozen=True)
class FolderFacts:
    """Facts that a folder states; None where it lacks one and the user is asked.

    Attributes:
        kind: name of the project that wrote the folder, for messages.
        cameras: cameras in the order the network sees them.
        cameras_stated: False where they are only the project's usual ones, free to be renamed.
        images: resize and padding of that project.
        statistics: `state.mean`, `actions.q01` and so on; may be longer than the names. None
            where none were found.
        cleaning: cleaning of the task text, that project's way.
        state_length: number of measured dimensions.
        action_length: number of real action dimensions.
        deltas: column of the state that each action is relative to; None for an absolute one.
        poses: groups of actions that are end-effector poses; deltas are in the tool's frame.
        angles: groups of the state that go in as sines and cosines: first column and number.
        joint_space: joints that the policy was trained on; None: those of the robot.
        template: template of the prompt; not asked for without language.
        state_bins: numbers of the state in the prompt, where it is padded; None: as it is.
        prompt_length: tokens of the padded prompt.
        usual_prompt_length: prompt length of the project, where neither folder nor user says
            another.
        usual_horizon: actions of a chunk of the project's trainings on such data, where neither
            folder nor user says another.
        real_horizon: first of them that the robot has; None: all.
        denoise_steps: Euler steps, or those of a scheduler.
        flow_times: rounding of the flow times of the Euler steps; None: each exact.
        trained_delay_steps: longest clean action prefix seen in training, 0 for none.
        image_size: edge of the square input image in pixels.
        image_sizes: (height, width) of each camera's images, where they go in as they are or
            are not square.
        image_size_key: field of the folder's config that states it.
        action_dim: padded action dimensions.
        state_dim: padded state dimensions.
        environment_length: numbers at the end of the state that are the environment's.
        variant: variant of the language model, as the project names it.
        source: facts for people, kept in the bundle.
        questions: facts that the reader could not find.
        absent_cameras: what becomes of a camera that the robot lacks: `masked`, or `left_out`
            of the network's input; None: the policy needs all of them.
        renamed: features of the data to those of the policy, where training renamed them.
        notes: for people, about how contradictory facts were read.
    """

    kind: str
    family: str
    cameras: tuple[CameraSpec, ...]
    images: ImageSpec
    normalisation: NormalisationSpec
    statistics: Mapping[str, np.ndarray] | None
    cleaning: PromptCleaning
    cameras_stated: bool = True
    statistics_file: Path | None = None
    action_names: tuple[str, ...] | None = None
    state_length: int | None = None
    action_length: int | None = None
    deltas: tuple[int | None, ...] | None = None
    poses: tuple[FolderPose, ...] = ()
    angles: tuple[tuple[int, int], ...] = ()
    joint_space: JointSpaceName | None = None
    template: str | None = None
    state_bins: int | None = None
    prompt_length: int | None = None
    usual_prompt_length: int | None = None
    horizon: int | None = None
    usual_horizon: int | None = None
    real_horizon: int | None = None
    observation_steps: int = 1
    denoise_steps: int | None = None
    flow_times: FlowTimes | None = None
    trained_delay_steps: int = 0
    image_size: int | None = None
    image_size_key: str = ''
    image_sizes: tuple[tuple[int, int], ...] = ()
    action_dim: int | None = None
    state_dim: int | None = None
    environment_length: int = 0
    variant: str | None = None
    tokenizer: Path | None = None
    source: Mapping[str, str] = field(default_factory=dict)
    questions: tuple[Question, ...] = ()
    absent_cameras: AbsentCameras | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def expect(config: JsonMapping, key: str, expected: object) -> None:
    """Refuse a setting that this runtime does not reproduce; one that is not there is as expected.

    Raises:
        JsonError: names the field.
    """
    found = config.get(key, (bool, int, float, str), expected)
    if found != expected:
        raise config.error(
            key, f'{found!r} is not supported; this runtime runs policies with {expected!r}'
        )


def find_tokenizer(folder: Path) -> Path | None:
    """The folder's tokenizer file; tokenizer.json first where both forms of one are there."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            return folder / name
    return None
