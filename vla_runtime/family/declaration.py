"""Declaration of a policy family: all that needs neither a network nor its weights.

A policy is a vision network, a prefix network and a head. The prefix hands the head an opaque
set of named tensors: a prefix output feeds the head input of the same name, with the shape of the
traced network, the ONNX file or the engine. A family declares only the inputs that come from an
observation. A prefix output of booleans marks the positions that the head sees, a row input of
booleans the tokens of a prompt that are no padding. Of several masks of equal length one belongs
to the tensors whose names begin alike, up to the first `_`: `text_seen` to `text_key` and
`text_value`. Tensors without such a mask have all masks of their length.

A family is three files of one name:
- `vla_runtime/declarations/NAME.py`: `FAMILIES`, a tuple of `Family`; imports neither PyTorch nor
  ROS 2;
- `vla_runtime/models/NAME.py`: `NETWORKS`, family name to a function that builds its
  `FlowNetwork`;
- `vla_convert/readers/NAME.py`: `READER`, which reads its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np

from vla_runtime.family.noise_schedule import Scheduler
from vla_runtime.family.performance_figures import PerformanceFigures
from vla_runtime.files.safetensors_reader import SafetensorsReader
from vla_runtime.processing.prompts import PromptFormat, PromptLayout
from vla_runtime.processing.tiles import Tiling

# `flow`: denoised over N steps. `single`: one pass, without noise and time. `tokens`: actions
# written as tokens, one a pass, greedy. `diffusion`: a scheduler's steps, with fresh noise where
# it draws some (`noise_schedule`).
Head = Literal['flow', 'single', 'tokens', 'diffusion']
# `normal`: standard normal. `uniform`: in [-1, 1).
Noise = Literal['normal', 'uniform']
Shape = tuple[int, ...]
# Row inputs of every prompt.
TOKENS, TOKEN_MASK = 'tokens', 'token_mask'
# Denoise steps of an inference, recommended or set live, and those of a flow.
MOST_DENOISE_STEPS, MOST_FLOW_STEPS = 1000, 100


class PolicyDims(Protocol):
    """Dimensions that every family has; a family's own dataclass adds those of its networks.

    Every family also has one of two fields or properties, which `image_sizes` reads:
    - `image_size`, S, the edge of the square images of all cameras in pixels;
    - `image_sizes`, (height, width) of each camera's image in pixels.

    Optional ones, each read by the function of that name: `real_actions` (padded actions are
    masked; `real_action_dim`), `real_horizon` (the chunk is longer than a robot's), `first_action`
    (it begins before the observation), `observation_steps` (T states; earlier frames are cameras of
    their own, `CameraSpec.frame_of`), `prompt_marks` (texts of the prompt that follow from
    dimensions), `stages` of a `flow` head that looks at its flow more than once a step, `tiles` (an
    image goes in with tiles of it; `image_tiles`), `image_places` (images inside the prompt: text
    tokens before each; its `tokens` are the text alone). A `diffusion` head has `scheduler`, a
    `noise_schedule.Scheduler`; a family with language (`Family.templates`) the fields of
    `LanguageDims`.
    """

    def __hash__(self) -> int:
        """Frozen, so that it can be a dictionary key."""

    @property
    def cameras(self) -> int:
        """V, camera inputs of the network."""

    @property
    def prefix_length(self) -> int:
        """P, tokens of all images, the prompt and whatever else the prefix holds."""

    @property
    def horizon(self) -> int:
        """H, actions of a chunk."""

    @property
    def action_dim(self) -> int:
        """A, padded action dimensions."""

    @property
    def state_dim(self) -> int:
        """Padded state dimensions of a network with a state token; 0 without one."""


class LanguageDims(PolicyDims, Protocol):
    """Dimensions of a family whose policies read a prompt."""

    @property
    def vocabulary(self) -> int:
        """Tokens that the network knows."""

    @property
    def prompt_length(self) -> int:
        """L, tokens of the padded prompt."""


class TokenDims(LanguageDims, Protocol):
    """Dimensions of a family with a `tokens` head."""

    @property
    def answer_length(self) -> int:
        """K, most tokens of an answer."""


def token_dims(dims: PolicyDims) -> TokenDims:
    return cast(TokenDims, dims)


def free_places(dims: TokenDims) -> int:
    """F, places for the tokens of an answer that are read back; one where none is."""
    return max(1, dims.answer_length - 1)


class AnswerDecoder(Protocol):
    """Decodes an answer of a `tokens` head.

    `end` is the token that ends an answer; None: every answer has all its tokens.
    """

    end: int | None

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return the normalised actions (H, A) float32 of an answer's tokens (n,) int64.

        Raises:
            ValueError: tokens that are no chunk; says what is wrong with them.
        """


def image_sizes(dims: PolicyDims) -> tuple[tuple[int, int], ...]:
    """Height and width of each camera's image, in pixels, in the order of the cameras."""
    stated: tuple[tuple[int, int], ...] | None = getattr(dims, 'image_sizes', None)
    if stated is not None:
        return stated
    edge: int = dims.image_size  # type: ignore[attr-defined]
    return ((edge, edge),) * dims.cameras


def real_action_dim(dims: PolicyDims) -> int:
    """Action dimensions that noise is drawn for; it is zero in the further ones."""
    real: int = getattr(dims, 'real_actions', dims.action_dim)
    return real


def real_horizon(dims: PolicyDims) -> int:
    """Actions of a chunk that the robot gets; the network's further ones are padding."""
    real: int = getattr(dims, 'real_horizon', dims.horizon)
    return real


def first_action(dims: PolicyDims) -> int:
    """Row of a chunk that is due at the observation's time; those before it are of the past."""
    first: int = getattr(dims, 'first_action', 0)
    return first


def observation_steps(dims: PolicyDims) -> int | None:
    """Steps whose states the policy is given, the newest included; None: one state, no history."""
    return getattr(dims, 'observation_steps', None)


def scheduler_of(dims: PolicyDims) -> Scheduler:
    scheduler: Scheduler = dims.scheduler  # type: ignore[attr-defined]
    return scheduler


def stages(dims: PolicyDims) -> tuple[float, ...]:
    """Places of a step, as shares of it, whose flow times its head sees: most its beginning."""
    found: tuple[float, ...] = getattr(dims, 'stages', (0.0,))
    return found


def distinct_image_sizes(dims: PolicyDims) -> tuple[tuple[int, int], ...]:
    """Return the different sizes among the cameras' images; the first camera's comes first."""
    return tuple(dict.fromkeys(image_sizes(dims)))


def image_places(dims: PolicyDims) -> tuple[int, ...] | None:
    """Text tokens before each camera's image; None where images stand before the prompt."""
    return getattr(dims, 'image_places', None)


def prompt_marks(dims: PolicyDims) -> Mapping[str, str]:
    """Text of the prompt by the mark that stands for it in the layout."""
    found: Mapping[str, str] = getattr(dims, 'prompt_marks', {})
    return found


def image_tiles(dims: PolicyDims) -> tuple[Tiling, ...] | None:
    """Tiles that each camera's image goes in with; None where it goes in alone."""
    return getattr(dims, 'tiles', None)


def with_cameras(dims: PolicyDims, cameras: int) -> PolicyDims:
    """Return the dimensions with another number of cameras.

    Of images inside the prompt the first ones stay in their places; further ones take the last's.
    """
    changed: dict[str, Any] = {'cameras': cameras}
    places = image_places(dims)
    if places is not None:
        changed['image_places'] = (places + places[-1:] * cameras)[:cameras]
    return cast(PolicyDims, replace(cast(Any, dims), **changed))


def language_dims(dims: PolicyDims) -> LanguageDims:
    return cast(LanguageDims, dims)


class TimeTable(Protocol):
    """Conditioning of the head on flow times, one row per time; an input of the head."""

    @property
    def width(self) -> int:
        """C, numbers per row."""

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """Return the rows (N, C) float32 of flow times (N,) in [0, 1]."""


@dataclass(frozen=True)
class RowInput:
    """An input with a value for each prompt row; `shape` is without the row axis, the first."""

    kind: Literal['float32', 'int64', 'bool']
    shape: Shape


@dataclass(frozen=True)
class Family:
    """One family of policies.

    Attributes:
        name: name in policy.yaml.
        title: title for people, with its source.
        head: kind of the head that outputs actions.
        dims: dataclass of `dimensions` in policy.yaml; a `PolicyDims`. Its fields say which tensors
            show them (`vla_runtime.family.dimensions`).
        presets: published sizes by name.
        templates: layouts of the prompts that its policies were trained with, by the name in
            policy.yaml; {} for policies without language.
        prefix_inputs: inputs of the prefix besides images: `tokens`, `token_mask`, `state`.
        head_inputs: inputs of the head besides the prefix's outputs: `state`.
        time_table: makes the time table from dimensions and weights.
        answer_decoder: of a `tokens` head: makes the decoder of its answers from dimensions, the
            file of the tokenizer, and the further `files` by name.
        files: files that its bundles hold beside those of every family.
        noise: distribution that a `flow` begins with.
        cuts_padding: padding may be cut off the end of a prompt: the head's tensors are shorter,
            and zeros behind them change nothing.
        rounds_activations: networks round numbers to 8 bits, as they were trained: one on the edge
            of two codes goes where the last bit of a sum sends it, and moves a chunk by up to 0.1,
            whatever the precision.
        freezes_actions: a `flow` whose training ties a chunk to the one before by actions in place
            of noise, of which the first do not move (`rtc_mode` frozen).
        flow_steps: denoise steps of its published policies; heads of one pass have none.
        figures: performance figures by name of the published size, a key of `presets`.
    """

    name: str
    title: str
    head: Head
    dims: type
    presets: Mapping[str, Any]
    templates: Mapping[str, PromptLayout]
    prefix_inputs: Callable[[Any], Mapping[str, RowInput]]
    head_inputs: Callable[[Any], Mapping[str, RowInput]]
    time_table: Callable[[Any, SafetensorsReader], TimeTable]
    answer_decoder: Callable[[Any, Path, Mapping[str, Path]], AnswerDecoder] | None = None
    files: tuple[str, ...] = ()
    noise: Noise = 'normal'
    cuts_padding: bool = False
    rounds_activations: bool = False
    freezes_actions: bool = False
    flow_steps: int = 10
    figures: Mapping[str, PerformanceFigures] = field(default_factory=dict)

    def layout(self, form: PromptFormat, dims: PolicyDims) -> PromptLayout:
        """Return the layout of a policy's prompts, its words in it; ValueError: unknown ones."""
        found = self.templates[form.template].filled(form.words or {})
        for mark, text in prompt_marks(dims).items():
            found = replace(found, text=found.text.replace(mark, text))
        return found

    @property
    def denoise_steps(self) -> int:
        """Runs of the head for a chunk, as its published policies are run."""
        return self.flow_steps if self.takes_steps else 1

    @property
    def takes_steps(self) -> bool:
        """True for a head that denoises over steps, from noise."""
        return self.head == 'flow' or self.has_scheduler

    @property
    def has_scheduler(self) -> bool:
        """True for a `diffusion` head: its dimensions have a `scheduler`."""
        return self.head == 'diffusion'

    @property
    def is_unrolled(self) -> bool:
        """True where an export writes a baseline with all steps unrolled in one file."""
        return self.head in ('flow', 'single')

    @property
    def has_language(self) -> bool:
        return bool(self.templates)


def answer_decoder(
    family: Family, dims: PolicyDims, folder: Path, tokenizer: str | None
) -> AnswerDecoder | None:
    """Make the decoder of a policy's answers; None for other heads than `tokens`.

    Raises:
        ValueError: a file of the bundle that cannot be read.
    """
    make = family.answer_decoder
    files = {name: folder / name for name in family.files}
    return None if make is None else make(dims, folder / (tokenizer or ''), files)


class NoTimes:
    """Time table of a head that no time conditions: one zero per row."""

    width = 1

    def __init__(self, dims: PolicyDims, weights: SafetensorsReader) -> None:
        pass

    def __call__(self, times: np.ndarray) -> np.ndarray:
        return np.zeros((len(times), 1), dtype=np.float32)


def prompt_inputs(dims: LanguageDims) -> dict[str, RowInput]:
    return {
        TOKENS: RowInput('int64', (dims.prompt_length,)),
        TOKEN_MASK: RowInput('bool', (dims.prompt_length,)),
    }


def state_input(dims: PolicyDims) -> dict[str, RowInput]:
    """Input of a state token: the state, normalised and padded."""
    return {'state': RowInput('float32', (dims.state_dim,))}


def prompt_and_state(dims: LanguageDims) -> dict[str, RowInput]:
    """Inputs of a prefix that reads a prompt and has a state token."""
    return prompt_inputs(dims) | state_input(dims)


def states_input(dims: PolicyDims) -> dict[str, RowInput]:
    """Input of the states of all steps of an observation, the oldest first, each normalised."""
    return {'state': RowInput('float32', (observation_steps(dims) or 1, dims.state_dim))}


def no_inputs(dims: PolicyDims) -> dict[str, RowInput]:
    return {}
