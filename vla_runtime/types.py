"""Data classes that all packages share; imports neither torch nor rclpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np

# The closed vocabularies of a bundle's policy.yaml.
# `none`: an image goes in at its own size, which must be that of the network. `stretch`: resized to
# the square without keeping its aspect. `crop`: resized, its middle cut out, and resized again.
# `letterbox`: padded to a square of its longer side, then resized.
ImagePadding = Literal['centre', 'left_top', 'stretch', 'crop', 'letterbox', 'none']
StretchedResample = Literal[
    'bicubic', 'bicubic_uint8', 'bicubic_pillow', 'bicubic_float', 'bilinear_points'
]
CroppedResample = Literal['bicubic_uint8', 'bilinear_uint8', 'area', 'lanczos']
# Last resize of a cropped image, to the network's size.
LastResample = Literal['bicubic_uint8', 'bicubic_pillow']
ImageResample = Literal[
    'bilinear', 'antialias', StretchedResample, 'bilinear_uint8', 'area', 'lanczos', 'none'
]
PromptCleaning = Literal['openpi', 'lerobot', 'python_list', 'letters', 'lower', 'unchanged']
AdvantageTemplate = Literal['task_newline', 'in_task_space', 'before_action']
Advantage = Literal['positive', 'negative']
NormaliserKind = Literal[
    'identity',
    'quantiles_openpi',
    'quantiles_lerobot',
    'quantiles_clipped',
    'mean_std_openpi',
    'mean_std_lerobot',
    'min_max',
    'min_max_flat',
    'clipped_range',
]
# `summed`: step upon step in float32, as training code that counts time down does.
FlowTimes = Literal['summed']
# openpi's `adapt_to_pi`.
JointSpaceName = Literal['openpi_aloha']
ActionKind = Literal['absolute', 'delta', 'velocity']
RotationForm = Literal[
    'quaternion_wxyz',
    'quaternion_xyzw',
    'euler',
    'axis_angle',
    'rotation_6d',
    'rotation_6d_rows',
    'rotation_6d_interleaved',
]
# How many numbers a rotation takes in each form.
ROTATION_LENGTH: Mapping[RotationForm, int] = {
    'quaternion_wxyz': 4,
    'quaternion_xyzw': 4,
    'euler': 3,
    'axis_angle': 3,
    'rotation_6d': 6,
    'rotation_6d_rows': 6,
    'rotation_6d_interleaved': 6,
}
PoseFrame = Literal['base', 'tool']
# What a delta of a pose starts from: the pose at the start of the chunk, or that of the row before.
PoseDelta = Literal['chunk', 'step']


@dataclass(frozen=True)
class Observation:
    """One consistent look at the robot and its surroundings.

    Attributes:
        images: camera name to uint8 array (height, width, 3), RGB, any size. `None` means that
            this camera is absent: the policy then sees a masked black image. A name left out is an
            error, never a silent mask.
        state: (state_dim,) measured state in robot units, in the order of the bundle's `state`.
        earlier_states: (T - 1, state_dim) states of the steps before, the newest first, for a
            policy that sees T steps; none for others. Earlier images have names of their own
            (`CameraSpec.frame_of`).
        instruction: the task in plain words; must not be empty, unless the policy has no language
            (`BundleSpec.prompt` None).
        stamps_ns: source name (camera, or `state`) to message stamp in nanoseconds on the ROS
            clock; for the report and the age of cache entries, never a network input.
    """

    images: Mapping[str, np.ndarray | None]
    state: np.ndarray
    instruction: str
    stamps_ns: Mapping[str, int] = field(default_factory=dict)
    earlier_states: Sequence[np.ndarray] = ()


# A message carries whole nanoseconds, and a file few digits.
_STEP_TIME_SLACK_S = 1e-6
_LATER = 'later'


def later(default: Any) -> Any:
    """Declare a field of policy.yaml that bundles of older releases lack.

    With its default it is no part of a bundle's identity, which recordings and receipts name.
    """
    return field(default=default, metadata={_LATER: True})


def is_left_out(one: Field[Any], value: Any) -> bool:
    """Whether a bundle's identity leaves a field out: declared `later`, and at its default."""
    return _LATER in one.metadata and bool(value == one.default)


def same_step_time(a_s: float, b_s: float) -> bool:
    """Whether two step times (s) are the same within their rounding in messages and files."""
    return abs(a_s - b_s) <= _STEP_TIME_SLACK_S


@dataclass(frozen=True)
class ActionChunk:
    """The horizon of actions that one inference returns, in robot units.

    Attributes:
        actions: (horizon, number of actions) float64, without the network's padding. Deltas are
            absolute targets here, anchored to the observed state; velocities stay velocities.
        names: action names, in column order.
        kinds: command kind per column: `position` or `velocity`.
        step_time_s: seconds between two rows; row i is meant for `observation time + i * step`.
        normalised: (horizon, model action dim) float32, as the network returned it.
    """

    actions: np.ndarray
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    step_time_s: float
    normalised: np.ndarray

    @property
    def horizon(self) -> int:
        return int(self.actions.shape[0])


@dataclass(frozen=True)
class ChunkHeader:
    """Facts that travel with a chunk besides its actions.

    Attributes:
        observation_ns: stamp of its observation, ROS clock.
        episode: episode that it was made for.
        tied: it was made to continue the plan that the request carried.
        step: step of that plan at which row 0 of such a chunk stands; None: the step that was
            current at its observation.
        request: number of the request that it answers; None where it is not given.
        open_requests: requests that its policy takes before it answers the first of them.
    """

    observation_ns: int
    episode: int
    number: int
    tied: bool = True
    step: int | None = None
    request: int | None = None
    open_requests: int = 1


@dataclass(frozen=True)
class PlanRequest:
    """The executor's request for a chunk: the plan that it goes on with meanwhile.

    Attributes:
        rows: (n, names) float64 setpoints as chunks write them, n >= 0; row i belongs to the plan
            step `step + i`.
        names: names of a chunk's numbers.
        kinds: per name `position` or `velocity`.
        step_time_s: seconds from row to row; None where fewer than two rows do not tell.
        stamp_ns: ROS time at which the step of row 0 began, or begins.
        certain: rows, from row 0 on, that are executed before the answer can take over.
        request: number of the request, for the answer; None where it is not given.
        step: plan step of row 0, for the answer; None where it is not given.
        arrived_ns: steady time at which the request first reached the policy node; 0 elsewhere.
    """

    rows: np.ndarray
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    step_time_s: float | None
    stamp_ns: int
    episode: int
    certain: int
    request: int | None = None
    step: int | None = None
    arrived_ns: int = 0


@dataclass(frozen=True)
class CommittedPlan:
    """The setpoints that the executor will still execute, as the policy sees them.

    Attributes:
        actions: (steps, number of actions) in robot units; row 0 is due at the observation's time.
        delay_steps: rows that will be executed before the new chunk can take over.
        execution_horizon: rows over which the new chunk is conditioned on the plan (delay
            included).
    """

    actions: np.ndarray
    delay_steps: int
    execution_horizon: int


class Reuse(str, Enum):
    """Result of a cache look-up: equal entry, nearly equal (`bounded`), none, or cache off."""

    HIT = 'hit'
    REUSED = 'reused'
    MISS = 'miss'
    OFF = 'off'


class MissReason(str, Enum):
    """Reason of a cache miss."""

    FIRST = 'first'
    PIXELS = 'pixels'
    INPUTS = 'inputs'
    IMAGE_CHANGE = 'image_change'
    STATE_CHANGE = 'state_change'
    AGE = 'age'
    REUSES = 'reuses'
    OTHER_CLOCK = 'other_clock'
    CLOCK_BACK = 'clock_back'
    NOT_LATEST = 'not_latest'


@dataclass(frozen=True)
class CacheOutcome:
    """Cache outcome for one camera's image tokens or for one prefix.

    Attributes:
        age_s: age of the entry, seconds; negative after the clock went back, NaN on another clock.
        reuses: reuses in a row, this one included.
        grey_levels: mean change of an image's pixels, where it was measured.
        bins: largest change of the state's bins in the prompt, where it was measured.
        limit: the limit that a miss exceeded.
        changed: inputs of a prefix that differ from the entry.
        on_reused_images: True for a hit on a prefix computed from reused image tokens.
    """

    reuse: Reuse
    reason: MissReason | None = None
    age_s: float = float('nan')
    reuses: int = 0
    grey_levels: float | None = None
    bins: int | None = None
    limit: float | None = None
    changed: tuple[str, ...] = ()
    on_reused_images: bool = False

    @property
    def found(self) -> bool:
        """True when no network had to run."""
        return self.reuse in (Reuse.HIT, Reuse.REUSED)


@dataclass(frozen=True)
class CacheReport:
    """Prefix cache outcomes of one inference; `inference.request.cache_words` puts them in words.

    `images` are by visible camera; `prefixes` one, or under serial guidance one for each row.
    """

    images: Mapping[str, CacheOutcome]
    prefixes: tuple[CacheOutcome, ...]


@dataclass(frozen=True)
class InferenceReport:
    """Settings, inputs and cost of the inference that returned a chunk.

    Attributes:
        number: inference number since `reset`; with `seed` it names the noise.
        milliseconds: wall time per phase (`images`, `tokens`, `vision`, `prefix`, `denoise`,
            `actions`, `total`; in the throughput pipeline also `wait`, for the one before it).
        pipeline: `latency` (one inference after the other), `throughput` (two at a time) or
            `packed` (one pass for all that are open).
        overlap_ms: time for which this encoding overlapped the denoising of the one before.
        cache: outcomes of the prefix cache.
        runs: number of runs of each network: `vision`, `prefix`, `expert`.
        beta: guidance scale in force; 1.0 without guidance.
        guidance: mode in which the prompt rows ran: `none` (one row), `fused` or `serial`.
        rtc_mode: mode that conditioned the chunk on the committed plan; `off` where none did.
        clean_steps: number of first actions given to the network as known, at flow time 0.
        tokens: valid tokens per prompt row.
        cuda_graph: per network (`vision`, `prefix`, `denoise`) `captured`, `eager`, or why there is
            no graph, as under serial guidance.
        noise: (horizon, model action dim) float32, noise of the chunk.
        stamps_ns: stamps of the frames and the state that went in.
        ticks: passes that an answer takes, with `packed`: an action is as many ticks old when it
            comes.
        answers_per_s: rate of the last answers, with `packed`; None for the first of them.
        together: requests of a batch whose denoise steps ran as rows of the same passes.
    """

    number: int
    seed: int
    milliseconds: Mapping[str, float]
    pipeline: str
    overlap_ms: float
    cache: CacheReport
    runs: Mapping[str, int]
    beta: float
    guidance: str
    rtc_mode: str
    clean_steps: int
    denoise_steps: int
    tokens: tuple[int, ...]
    cuda_graph: Mapping[str, str]
    noise: np.ndarray
    stamps_ns: Mapping[str, int]
    ticks: int = 0
    answers_per_s: float | None = None
    together: int = 1

    @property
    def age_ms(self) -> float:
        """Age of the observation when its actions came, counted from when it was handed over."""
        return self.milliseconds['total']
