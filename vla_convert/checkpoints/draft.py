"""A draft of policy.yaml: steps fill it from a checkpoint's folder, options overwrite it.

Fields have the names of policy.yaml, and each remembers the place that it came from, such as
`config.json, n_action_steps` or `--horizon`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vla_convert.checkpoints.folder_facts import AbsentCameras, FolderPose, find_tokenizer
from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import DatasetInfo, ExportOptions
from vla_runtime.bundle.schema import (
    ActionSpec,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
    PoseSpec,
    StateSpec,
    SwitchSpec,
)
from vla_runtime.files.free_text import FreeText
from vla_runtime.files.json_file import JsonMapping
from vla_runtime.processing.joint_spaces import JointFrame
from vla_runtime.types import AdvantageTemplate, FlowTimes, JointSpaceName, PromptCleaning

# Place of a field that neither folder nor options state.
USUAL = "the family's usual"

# Field of a draft to its name in policy.yaml, or to the file of the bundle that holds it.
KEYS: Mapping[str, str] = {
    'cameras': 'cameras',
    'images': 'images',
    'image_size': 'dimensions.image_size',
    'image_sizes': 'dimensions.images',
    'deltas': 'actions.relative_to',
    'switches': 'actions.switch',
    'angle_groups': 'normalisation.angles',
    'state': 'state',
    'actions': 'actions',
    'poses': 'poses',
    'joint_space': 'joint_space',
    'joint_frame': 'joint_frame',
    'rename_map': 'rename_map',
    'normalisation': 'normalisation',
    'statistics': 'statistics.safetensors',
    'prompt_template': 'prompt.template',
    'prompt_cleaning': 'prompt.cleaning',
    'prompt_advantage': 'prompt.advantage',
    'prompt_state_bins': 'prompt.state_bins',
    'prompt_state_levels': 'prompt.state_levels',
    'prompt_words': 'prompt.words',
    'prompt_length': 'dimensions.prompt_length',
    'tokenizer': 'tokenizer',
    'step_time_s': 'step_time_s',
    'horizon': 'dimensions.horizon',
    'real_horizon': 'dimensions.real_horizon',
    'observation_steps': 'dimensions.observation_steps',
    'denoise_steps': 'denoise_steps',
    'flow_times': 'flow_times',
    'trained_delay_steps': 'trained_delay_steps',
    'action_dim': 'dimensions.action_dim',
    'state_dim': 'dimensions.state_dim',
    'environment_length': 'dimensions.environment_dim',
}


@dataclass
class Draft:
    """policy.yaml of a checkpoint, half filled; an empty field is None or ().

    Attributes:
        missing: what is asked for, and contradictions.
        dataset: data set of the training, where the user gives it.
        wanted: option to the family's own sentence that asks for it.
        kind: project that wrote the folder.
        cameras: in the network's order.
        absent_cameras: treatment of a camera that the robot lacks; None: the policy needs all.
        unseen_cameras: those that the data of the training seem to have lacked.
        action_names: names that the folder has for its actions.
        state_length, action_length: real dimensions of state and action.
        deltas: column of the state that each action is relative to; None for an absolute one.
        switches: columns of actions that are one of two.
        folder_poses: groups of actions that are end-effector poses; deltas are in the tool's frame.
        angle_groups: groups of the state that go in as sines and cosines: first column and number.
        statistics: `state.mean`, `actions.q01` and so on; may be longer than the names.
        action_dim, state_dim: dimensions of the network, padded.
        added_tokens: tokens that the training appended to the vocabulary.
        environment_length: numbers at the end of the state that are the environment's.
        image_size: edge of the square input image in pixels.
        image_sizes: (height, width) by camera, where images keep their size or are not square.
        image_size_key: field of the folder's configuration that states `image_size`.
        real_horizon: leading actions that the robot has; None: all.
        variant: the folder's name for the size of its language model.
        notes: how contradictory facts were read, for people.
        places: field to the place that it came from.
    """

    folder: Path
    options: ExportOptions
    missing: MissingFacts
    dataset: DatasetInfo | None = None
    wanted: Mapping[str, str] = field(default_factory=dict)
    kind: str = ''
    family: str = ''

    cameras: tuple[CameraSpec, ...] = ()
    absent_cameras: AbsentCameras | None = None
    unseen_cameras: tuple[str, ...] = ()
    images: ImageSpec = field(init=False)
    image_size: int | None = None
    image_size_key: str = ''
    image_sizes: tuple[tuple[int, int], ...] = ()

    action_names: tuple[str, ...] | None = None
    state_length: int | None = None
    action_length: int | None = None
    deltas: tuple[int | None, ...] | None = None
    switches: Mapping[int, SwitchSpec] = field(default_factory=dict)
    folder_poses: tuple[FolderPose, ...] = ()
    angle_groups: tuple[tuple[int, int], ...] = ()
    state: tuple[StateSpec, ...] = ()
    actions: tuple[ActionSpec, ...] = ()
    poses: tuple[PoseSpec, ...] = ()
    joint_space: JointSpaceName | None = None
    joint_frame: JointFrame | None = None
    rename_map: Mapping[str, str] = field(default_factory=dict)

    normalisation: NormalisationSpec = field(init=False)
    statistics: Mapping[str, np.ndarray] | None = None
    statistics_file: Path | None = None

    prompt_template: str | None = None
    prompt_cleaning: PromptCleaning = field(init=False)
    prompt_advantage: AdvantageTemplate | None = None
    prompt_state_bins: int | None = None
    prompt_state_levels: int | None = None
    prompt_words: Mapping[str, FreeText] = field(default_factory=dict)
    prompt_length: int | None = None
    tokenizer: Path | None = None
    added_tokens: tuple[str, ...] = ()

    step_time_s: float | None = None
    horizon: int | None = None
    real_horizon: int | None = None
    observation_steps: int = 1
    denoise_steps: int | None = None
    flow_times: FlowTimes | None = None
    trained_delay_steps: int = 0

    action_dim: int | None = None
    state_dim: int | None = None
    environment_length: int = 0
    variant: str | None = None

    source: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    _usual: set[str] = field(default_factory=set)

    @cached_property
    def config(self) -> JsonMapping:
        """The folder's config.json (`read_config`, with its errors)."""
        return read_config(self.folder)

    def is_of(self, kind: str, family: str) -> None:
        """Name the folder's project and the family."""
        self.kind, self.family = kind, family
        self.missing.policies = f'{kind} {family}'

    def write(self, place: str, **values: object) -> None:
        """Write fields that the folder states at this place; an empty value leaves one empty."""
        for name, value in values.items():
            if name not in _FIELDS:
                raise TypeError(f'a draft has no field {name}')
            setattr(self, name, value)
            self._usual.discard(name)
            self.places.pop(name, None)
            if value:
                self.places[name] = place

    def assume(self, place: str, **values: object) -> None:
        """Write fields that the folder does not state and that an option may overwrite."""
        self.write(place, **values)
        self._usual |= set(values)

    def write_tokenizer(self) -> None:
        """Write the folder's tokenizer, if it has one."""
        tokenizer = find_tokenizer(self.folder)
        if tokenizer is not None:
            place = tokenizer.relative_to(self.folder).as_posix()
            self.write(place, tokenizer=tokenizer)

    def is_stated(self, name: str) -> bool:
        """Return whether the folder states a field."""
        return name in self.places and name not in self._usual

    def settle(
        self, name: str, option: str, wanted: str, *, given: Any = None, usual: Any = None
    ) -> None:
        """Overwrite a field by an option; ask for one that is still empty.

        Args:
            given: value of the option, where it is not that of the same name.
            wanted: description for the user, where the family has none of its own.
            usual: value where neither folder nor option has one.
        """
        given = getattr(self.options, name) if given is None else given
        found = getattr(self, name)
        stated, usual = (found, usual) if self.is_stated(name) else (None, found or usual)
        wanted = self.wanted.get(option, wanted)
        value = self.missing.pick(option, given, stated, wanted, default=usual)
        if stated is None and value is not None:
            place = self.places.get(name, USUAL)
            self.write(place if given is None else option, **{name: value})

    def origins(self) -> list[tuple[str, str]]:
        """Fields of policy.yaml that something states, in their order, and where each is stated."""
        return [(key, self.places[name]) for name, key in KEYS.items() if name in self.places]


_FIELDS = {one.name for one in fields(Draft)}
