"""Training samples from recorded frames.

Images, prompts, states and actions go through the functions that serve the policy (`processing/`):
a 64x48 frame is, bit for bit, the `bilinear` resize of the robot's 320x240 image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_runtime.bundle.schema import ActionSpec, StateSpec
from vla_runtime.family.listing import find_family
from vla_runtime.processing.images import to_pixels
from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.prompts import PromptFormat, PromptLayout, build_prompt
from vla_runtime.processing.tokenizer import Tokenizer
from vla_runtime.types import Advantage
from vla_tabletop.sim.expert import STEP_TIME_S
from vla_tabletop.sim.scene import CAMERAS, COLOURS, Colour
from vla_tabletop.sim.tasks import SIDES, Family, wordings
from vla_tabletop.sim.world import JOINT_NAMES
from vla_tabletop.training.dataset import GOALS, Dataset
from vla_tabletop.training.vocabulary import PROMPT_LENGTH
from vla_tabletop.training.world import IMAGE_SIZE, Batch, TrainingWorld

# Edge of the pixel square of one image token.
PATCH_SIZE = 16
# Arm joints relative to the measured state at the chunk's start, the gripper absolute.
DELTA = np.array([True, True, True, True, True, False])
ADVANTAGE_DROP = 0.3
_HELD_OUT_SHARE = 0.04

# The gripper rests closed in almost every frame: its quantiles would be a point and blow up the few
# frames where it is open. It is scaled by its range instead.
_GRIPPER_RANGE_RAD = (0.0, 0.8)
# Steps that hardly vary would otherwise weigh without bounds.
_SMALLEST_SPREAD = 0.1
_BLOCK_SCALE_M = np.array([0.1, 0.1])
_BLOCK_CENTRE_M = np.array([0.27, 0.0])

TABLETOP = TrainingWorld(
    name='tabletop',
    title='tabletop demo',
    cameras=CAMERAS,
    state=tuple(StateSpec(name, 'rad') for name in JOINT_NAMES),
    actions=tuple(
        ActionSpec(name, 'rad', 'delta', name) if delta else ActionSpec(name, 'rad', 'absolute')
        for name, delta in zip(JOINT_NAMES, DELTA, strict=True)
    ),
    step_time_s=STEP_TIME_S,
    points=len(COLOURS),
    place=2,
    # The image is 64x48 in a 64x64 square.
    half_height_px=24.0,
)


@dataclass(frozen=True)
class TaskMix:
    """Tasks that a policy is taught; the `colour` family names blocks of `colours`."""

    share: Mapping[Family, float]
    colours: tuple[Colour, ...] = COLOURS


@dataclass(frozen=True)
class Prompting:
    """A policy's prompts, padded to `length` tokens."""

    layout: PromptLayout
    form: PromptFormat
    tokenizer: Tokenizer
    length: int = PROMPT_LENGTH

    @classmethod
    def of(cls, family: str, form: PromptFormat, vocabulary: Path) -> Prompting:
        """Prompts of a family in the vocabulary of a `.model` file."""
        layout = find_family(family).templates[form.template]
        return cls(layout, form, Tokenizer.load(vocabulary, bos=layout.bos, closing=layout.closing))

    @property
    def has_tag(self) -> bool:
        """True where prompts have an advantage tag."""
        return self.form.advantage is not None

    def encode(
        self, instruction: str, state: np.ndarray, positive: bool, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and mask of a frame's prompt, (L,) each; some have no advantage tag.

        `state` is (S,) normalised; `positive` is the tag, which `rng` may drop.
        """
        advantage: Advantage | None = None
        if self.has_tag and rng.uniform() >= ADVANTAGE_DROP:
            advantage = 'positive' if positive else 'negative'
        prompt = build_prompt(self.layout, self.form, instruction, state, advantage)
        return self.tokenizer.encode(prompt, self.length)


class Samples:
    """Training batches from a data set, and the statistics that the policy ships with.

    `prompting` None: no language; `statistics` None: computed from the data.
    """

    def __init__(
        self,
        data: Dataset,
        tasks: TaskMix,
        prompting: Prompting | None,
        statistics: dict[str, np.ndarray] | None = None,
    ) -> None:
        self.world, self.episode = TABLETOP, data.episode
        self.data, self._tasks, self._prompting = data, tasks, prompting
        self.statistics = statistics or compute_statistics(data)
        self.state_normalizer = self._normalizer('state')
        self.action_normalizer = self._normalizer('actions')
        self._state = self.state_normalizer.normalise(data.state)

    def pixels(self, frames: np.ndarray) -> np.ndarray:
        """(B, 2, 3, 64, 64) float32 of these frames."""
        out = np.empty((len(frames), len(CAMERAS), 3, IMAGE_SIZE, IMAGE_SIZE), dtype=np.float32)
        for row, frame in enumerate(frames):
            for camera in range(len(CAMERAS)):
                image = self.data.images[frame, camera]
                to_pixels(
                    image, IMAGE_SIZE, padding='centre', resample='bilinear', out=out[row, camera]
                )
        return out

    def batch(self, frames: np.ndarray, rng: np.random.Generator) -> Batch:
        """Draw an instruction for every frame, whatever was followed when it was recorded."""
        data, goals, encoded = self.data, np.empty(len(frames), dtype=np.int64), []
        for row, frame in enumerate(frames):
            goals[row], instruction = draw_instruction(rng, data.block_m[frame], self._tasks)
            encoded.append(self._encode(frame, instruction, rng))
        mask = np.stack([mask for _, mask in encoded])
        longest = int(mask.sum(axis=1).max())
        named = np.array([GOALS[goal].block for goal in goals])
        place = (data.block_m[frames, named, :2] - _BLOCK_CENTRE_M) / _BLOCK_SCALE_M
        return Batch(
            pixels=self.pixels(frames),
            tokens=np.stack([tokens for tokens, _ in encoded])[:, :longest],
            token_mask=mask[:, :longest],
            actions=self.action_normalizer.normalise(
                relative(data.chunks[frames, goals], data.state[frames])
            ),
            state=self._state[frames],
            pixel=data.pixel[frames, :, named],
            place=place.astype(np.float32),
            goal=goals,
            frame=frames,
        )

    def _encode(
        self, frame: int, instruction: str, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._prompting is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
        positive = bool(self.data.positive[self.data.episode[frame]])
        return self._prompting.encode(instruction, self._state[frame], positive, rng)

    def held_out(self) -> np.ndarray:
        """Return the frames of the last episodes, (F,) bool."""
        last: np.ndarray = self.episode > int(self.episode.max() * (1 - _HELD_OUT_SHARE))
        return last

    def teaches(self) -> np.ndarray:
        """Return which frames to train on, (F,) bool; without a tag only the better half."""
        if self._prompting is not None and self._prompting.has_tag:
            return np.ones(len(self.data.state), dtype=bool)
        return self.data.positive[self.data.episode]

    def points(self, frames: np.ndarray) -> np.ndarray:
        """(B, 2, 3, 2) float32 centres of the blocks in each image."""
        return self.data.pixel[frames]

    def errors(self, actions: np.ndarray, batch: Batch) -> dict[str, float]:
        """Return `end_rad`, the RMS error of the joints at the chunk's end, and `right_block`.

        That is the fraction of touches whose chunk ends nearest to the end of the named block's
        chunk.
        """
        data, frames = self.data, batch.frame
        ends = absolute(actions, data.state[frames])[:, -1, :5]
        wanted = data.chunks[frames, :, -1, :5]  # (B, goals, 5)
        error = np.sqrt(np.square(ends - wanted[np.arange(len(frames)), batch.goal]).mean(axis=1))
        touch = batch.goal < len(COLOURS)
        distance = np.linalg.norm(ends[:, None] - wanted[:, : len(COLOURS)], axis=2)
        right = distance[touch].argmin(axis=1) == batch.goal[touch]
        return {'end_rad': float(error[touch].mean()), 'right_block': float(right.mean())}

    def step_weight(self) -> np.ndarray:
        """Return the weight of each step of a chunk in the loss, (H,) float32 of mean 1.

        Each step counts by the inverse of its spread: a chunk's first actions vary little, but are
        all that a short replan interval executes, and half a step's error there stalls the arm.
        """
        frames = np.linspace(0, len(self.data.state) - 1, 512).astype(np.int64)
        chunks = self.data.chunks[frames]  # (n, goals, H, 6)
        goals = chunks.shape[1]
        actions = relative(
            chunks.reshape(-1, *chunks.shape[2:]), np.repeat(self.data.state[frames], goals, axis=0)
        )
        spread = self.action_normalizer.normalise(actions)[..., DELTA].std(axis=0).mean(axis=1)
        weight = 1.0 / np.maximum(spread, _SMALLEST_SPREAD)
        return (weight / weight.mean()).astype(np.float32)

    def _normalizer(self, what: str) -> Normalizer:
        statistics = {name: self.statistics[f'{what}.{name}'] for name in ('q01', 'q99')}
        return Normalizer('quantiles_openpi', statistics, JOINT_NAMES)


def relative(chunks: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Setpoints (B, H, 6) relative to states (B, 6) where `DELTA` says so."""
    return chunks - np.where(DELTA, state, 0.0)[:, None].astype(chunks.dtype)


def absolute(actions: np.ndarray, state: np.ndarray) -> np.ndarray:
    """The inverse of `relative`."""
    return actions + np.where(DELTA, state, 0.0)[:, None].astype(actions.dtype)


def compute_statistics(data: Dataset) -> dict[str, np.ndarray]:
    """1% and 99% quantiles of states and of relative actions over all goals, (6,) float64."""
    actions = data.chunks - np.where(DELTA, data.state, 0.0)[:, None, None].astype(np.float32)
    flat = {'state': data.state, 'actions': actions.reshape(-1, actions.shape[-1])}
    statistics = {}
    for what, values in flat.items():
        low, high = np.quantile(values.astype(np.float64), [0.01, 0.99], axis=0)
        low[-1], high[-1] = _GRIPPER_RANGE_RAD
        statistics[f'{what}.q01'], statistics[f'{what}.q99'] = low, high
    return statistics


def draw_instruction(
    rng: np.random.Generator, block_m: np.ndarray, tasks: TaskMix
) -> tuple[int, str]:
    """A goal (index into `GOALS`) and one of its training wordings for blocks as they lie."""
    family = rng.choice(list(tasks.share), p=list(tasks.share.values()))
    if family == 'position':
        word = SIDES[rng.integers(2)]
        order = np.argsort(block_m[:, 1])
        goal = int(order[0] if word == 'left' else order[-1])
        choices = wordings('position', word)
    elif family == 'colour':
        goal = COLOURS.index(tasks.colours[rng.integers(len(tasks.colours))])
        choices = wordings('colour', COLOURS[goal])
    else:
        goal = int(rng.integers(len(COLOURS), len(GOALS)))
        choices = wordings('push', COLOURS[GOALS[goal].block], GOALS[goal].side)
    return goal, choices[rng.integers(len(choices))]


def frame_batches(
    frames: np.ndarray, batch: int, seed: int, start_step: int = 0
) -> Iterator[np.ndarray]:
    """Endless batches, each frame once an epoch; batch k is the same wherever one starts."""
    per_epoch = len(frames) // batch
    if per_epoch == 0:
        raise ValueError(
            f'{len(frames)} frames do not fill one batch of {batch}; record more with --episodes, '
            'in another folder with --work'
        )
    step = start_step
    while True:
        epoch = step // per_epoch
        order = np.random.default_rng([seed, epoch]).permutation(frames)
        while step // per_epoch == epoch:
            first = (step % per_epoch) * batch
            yield order[first : first + batch]
            step += 1
