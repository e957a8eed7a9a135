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


@dataclass(frozen=True)
class Question:
    """Something the folder lacks: the option that supplies it, and what is wanted."""

    option: str
    wanted: str


@dataclass(frozen=True)
class FolderPose:
    """An end-effector pose of a folder: x, y, z in metres and a rotation.

    Attributes:
        action: its first column among the actions.
        state: its first column among the state; None: the state is without this pose.
        form: representation of the rotation, of actions and state.
        is_delta: the action is composed with the measured pose.
    """

    name: str
    action: int
    state: int | None
    form: RotationForm
    is_delta: bool


@dataclass(frozen=True)
class FolderFacts:
    """Facts that a folder states; None where it lacks one and the user is asked.

    `kind` names the project, `cameras` has the network's order, `notes` tells people how
    contradictory facts were read, `action_dim` and `state_dim` are padded.

    Attributes:
        cameras_stated: False where they are the project's usual ones, free to be renamed.
        statistics: `state.mean`, `actions.q01` and so on; may be longer than the names.
        action_length: number of real action dimensions.
        deltas: column of the state that each action is relative to; None for an absolute one.
        poses: groups of actions that are end-effector poses; deltas are in the tool's frame.
        angles: groups of the state that go in as sines and cosines: first column and number.
        joint_space: joints that the policy was trained on; None: those of the robot.
        state_bins: numbers of the state in the prompt, where it is padded; None: as it is.
        usual_prompt_length: used where neither folder nor user gives one.
        usual_horizon: used where neither folder nor user gives one.
        real_horizon: leading actions that the robot has; None: all.
        denoise_steps: Euler steps, or those of a scheduler.
        flow_times: rounding of the flow times of the Euler steps; None: each exact.
        trained_delay_steps: longest clean action prefix seen in training, 0 for none.
        image_size: edge of the square input image in pixels.
        image_sizes: (height, width) by camera, where images keep their size or are not square.
        image_size_key: field of the folder's config that states it.
        environment_length: numbers at the end of the state that are the environment's.
        absent_cameras: treatment of a camera that the robot lacks; None: the policy needs all.
        renamed: features of the data to those of the policy, where training renamed them.
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
    """Refuse a setting that this runtime does not reproduce (JsonError); absence is accepted."""
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
