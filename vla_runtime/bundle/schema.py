"""Contents of policy.yaml: types and allowed words; `bundle.rules` checks what must agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vla_runtime.family.declaration import PolicyDims, first_action, image_sizes, real_horizon
from vla_runtime.processing.joint_spaces import JointFrame
from vla_runtime.processing.prompts import PromptFormat
from vla_runtime.types import (
    ActionKind,
    AdvantageTemplate,
    FlowTimes,
    ImagePadding,
    ImageResample,
    JointSpaceName,
    LastResample,
    NormaliserKind,
    PoseDelta,
    PoseFrame,
    RotationForm,
    later,
)

FORMAT = 1
SPEC_FILE = 'policy.yaml'
WEIGHTS_FILE = 'weights.safetensors'
STATISTICS_FILE = 'statistics.safetensors'
VERIFICATION_FILE = 'verification.json'
# Shortest and longest time between two actions. Beyond them a rate was given in another unit.
STEP_TIMES_S = (0.001, 60.0)
# safetensors' names of the dtypes that networks load, and the bytes of one number.
WEIGHT_BYTES: Mapping[str, int] = {'F32': 4, 'BF16': 2, 'F16': 2, 'U8': 1}
# End of the names of packed weights, bytes of several each. No other tensor is in whole numbers.
PACKED = '.packed'
TOKENIZER_SUFFIXES = ('.json', '.model')
# Made on the machine that runs them, tied to its GPU and TensorRT: never listed, never hashed.
ENGINES_FOLDER = 'engines'
# Entry of `source` where tasks of the training had no words: how many of how many.
WORDLESS_TASKS = 'tasks_without_words'

# '1' is a number without a unit, such as a gripper opening between 0 and 1.
Unit = Literal['rad', 'deg', 'm', 'mm', 'rad/s', 'deg/s', 'm/s', '1', 'percent']
RATE_UNITS = ('rad/s', 'deg/s', 'm/s')

# Statistics that a normaliser reads.
STATISTICS_OF: Mapping[NormaliserKind, tuple[str, ...]] = {
    'identity': (),
    'quantiles_openpi': ('q01', 'q99'),
    'quantiles_lerobot': ('q01', 'q99'),
    'quantiles_clipped': ('q01', 'q99'),
    'mean_std_openpi': ('mean', 'std'),
    'mean_std_lerobot': ('mean', 'std'),
    'min_max': ('min', 'max'),
    'min_max_flat': ('min', 'max'),
    'clipped_range': ('low', 'high'),
}
STATISTICS = ('mean', 'std', 'min', 'max', 'q01', 'q99', 'low', 'high')


@dataclass(frozen=True)
class CameraSpec:
    """A camera the policy was trained with; `present: false` is always a masked black image.

    Attributes:
        name: unique among the cameras.
        present: the robot has it.
        frame_of: camera whose earlier frame this one is; None: a camera of its own.
        steps_ago: actions (`step_time_s`) by which the earlier frame is older; with `frame_of`.
    """

    name: str
    present: bool = True
    frame_of: str | None = later(None)
    steps_ago: int | None = later(None)


def earlier_name(camera: str, steps_ago: int) -> str:
    """Name of a camera's frame of so many steps before."""
    return f'{camera}_{steps_ago}_steps_ago'


@dataclass(frozen=True)
class CropSpec:
    """Middle of an image that the policy sees.

    Attributes:
        edge: edge of the resized image in pixels; with resample `area` its shorter edge, with
            `bilinear_uint8` its height.
        fraction: share of height and width that is kept.
        fraction_across: share of the width, where it is another one.
        size: height and width after the cut, where they are not those of the network, which the
            image is resized to once more.
        last: filter of that last resize; None: `bicubic_uint8`.
        letterbox: black bars make the image a square before all this.
    """

    edge: int
    fraction: float
    fraction_across: float | None = later(None)
    size: tuple[int, int] | None = later(None)
    last: LastResample | None = None
    letterbox: bool = later(False)


@dataclass(frozen=True)
class ImageSpec:
    """Padding and resampling of a camera's image to the network's pixels.

    Both are `none` where images go in as they are.

    Attributes:
        crop: part of the image that is kept; only with the padding `crop`.
        bars: pixels of the border, where it is not black (-1); only with a border. In the scale of
            `normalisation.images`, with which a border needs it.
        fill: grey levels of a letterbox's border, by colour channel.
        averaged: height and width that areas of the image are averaged to before all this; only
            with the resample `bicubic_float`.
    """

    padding: ImagePadding
    resample: ImageResample
    crop: CropSpec | None = later(None)
    bars: float | None = later(None)
    fill: tuple[int, int, int] | None = later(None)
    averaged: tuple[int, int] | None = later(None)


@dataclass(frozen=True)
class StateSpec:
    """One dimension of the measured state, in the order the policy was trained with."""

    name: str
    unit: Unit


@dataclass(frozen=True)
class SwitchSpec:
    """An action that is one of two, such as a gripper that is opened or closed.

    Attributes:
        at_least: normalised action from which on it is `above`; below it, it is `below`.
        above, below: in the action's unit.
    """

    at_least: float
    above: float
    below: float


@dataclass(frozen=True)
class ActionSpec:
    """One dimension of an action.

    Attributes:
        name: unique among the actions.
        unit: unit of the decoded action; a rate for `velocity`.
        kind: `delta` is relative to the measured state at the start of the chunk.
        relative_to: the state's name, for `delta` only.
        switch: the policy says which of two it is; for `absolute` only.
    """

    name: str
    unit: Unit
    kind: ActionKind
    relative_to: str | None = None
    switch: SwitchSpec | None = later(None)


@dataclass(frozen=True)
class PoseSpec:
    """Actions that form an end-effector pose; deltas of a pose compose instead of adding.

    Attributes:
        name: name of the end effector.
        position: names of the x, y and z actions.
        rotation: names of the rotation's actions, as many as `form` has numbers.
        form: representation of the rotation.
        kind: `delta` is composed with the pose measured at the start of the chunk.
        frame: frame of a delta: `base` (dR * R0) or `tool` (R0 * dR).
        euler_axes: transforms3d's order, e.g. `sxyz`; for the form `euler` only.
        state_position: names of the state's x, y and z; needed for `delta`.
        state_rotation: names of the state's rotation, same form; needed for `delta`.
        delta_from: what a delta starts from: `chunk`, the measured pose for every row; `step`, the
            row before, and the measured pose for the first.
    """

    name: str
    position: tuple[str, str, str]
    rotation: tuple[str, ...]
    form: RotationForm
    kind: ActionKind
    frame: PoseFrame
    euler_axes: str | None = None
    state_position: tuple[str, ...] = ()
    state_rotation: tuple[str, ...] = ()
    delta_from: PoseDelta = later('chunk')

    @property
    def actions(self) -> tuple[str, ...]:
        return (*self.position, *self.rotation)


@dataclass(frozen=True)
class NormalisationSpec:
    """Normalisers that the policy was trained with.

    Attributes:
        state, actions: kind of normaliser for each dimension.
        images: kind of normaliser for each camera's colour channels, from [0, 1]; None: images go
            in as [-1, 1].
        angles: groups of names of the state, neighbours in its order: in place of its normalised
            numbers a group goes in as their sines, then their cosines.
    """

    state: NormaliserKind
    actions: NormaliserKind
    images: NormaliserKind | None = later(None)
    angles: tuple[tuple[str, ...], ...] = later(())


@dataclass(frozen=True)
class BundleSpec:
    """All of policy.yaml.

    Attributes:
        name: name of the policy, for people.
        family: name of the family that the weights belong to.
        dims: sizes of the networks, the family's own dataclass (key `dimensions`).
        cameras: cameras in the order the network sees them; as many as `dims.cameras`.
        images: resize and padding.
        state: measured dimensions in order.
        actions: dimensions in order; the network's further ones are padding.
        step_time_s: seconds between two actions of a chunk.
        denoise_steps: recommended number of Euler steps.
        prompt: template and cleaning; None for a policy without language.
        normalisation: normalisers; their numbers are in statistics.safetensors.
        tokenizer: file name, `*.json` (tokenizers) or `*.model` (sentencepiece); None for a policy
            without language.
        poses: groups of actions that are end-effector poses.
        joint_space: joints that the policy was trained on; None: those of the robot.
        joint_frame: signs and zeros of the joints in training; None: those of the robot.
        trained_delay_steps: longest prefix of known actions, each at flow time 0, that the policy
            was trained with (arXiv 2512.05964); 0: all actions always shared one flow time.
        student_steps: numbers of Euler steps that a distilled policy knows, and the only ones that
            it runs with; empty: any number.
        flow_times: way in which the flow times of the steps are rounded; None: each exact.
        rename_map: features of the training's data to those of the policy, where training renamed
            them, as LeRobot's folders have it.
        source: origin of the bundle, for people: tools, versions; never a machine's path.
        files: file name to SHA-256, of every file but policy.yaml and `engines/`.
    """

    name: str
    family: str
    dims: PolicyDims = field(metadata={'key': 'dimensions'})
    cameras: tuple[CameraSpec, ...]
    images: ImageSpec
    state: tuple[StateSpec, ...]
    actions: tuple[ActionSpec, ...]
    step_time_s: float
    denoise_steps: int
    prompt: PromptFormat | None = field(default=None, kw_only=True)
    normalisation: NormalisationSpec
    tokenizer: str | None = field(default=None, kw_only=True)
    poses: tuple[PoseSpec, ...] = ()
    joint_space: JointSpaceName | None = later(None)
    joint_frame: JointFrame | None = later(None)
    trained_delay_steps: int = 0
    student_steps: tuple[int, ...] = later(())
    flow_times: FlowTimes | None = later(None)
    rename_map: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def advantage(self) -> AdvantageTemplate | None:
        """Place of the advantage tag in the prompt; None for a policy trained without tags."""
        return None if self.prompt is None else self.prompt.advantage

    @property
    def fixed_image_sizes(self) -> tuple[tuple[int, int], ...] | None:
        """(height, width) that each camera's images must have; None where they are resized."""
        return image_sizes(self.dims) if self.images.padding == 'none' else None

    @property
    def real_horizon(self) -> int:
        """Actions of a chunk that reach the robot."""
        return real_horizon(self.dims)

    @property
    def action_rows(self) -> slice:
        """Rows of the network's chunk that reach the robot."""
        first = first_action(self.dims)
        return slice(first, first + self.real_horizon)

    @property
    def camera_names(self) -> tuple[str, ...]:
        return tuple(camera.name for camera in self.cameras)

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.state)

    @property
    def action_names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.actions)
