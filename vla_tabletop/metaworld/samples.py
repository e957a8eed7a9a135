"""Training batches from Meta-World demonstrations."""

from __future__ import annotations

import numpy as np

from vla_runtime.bundle.schema import ActionSpec, StateSpec
from vla_runtime.processing.images import to_pixels
from vla_runtime.processing.normalization import Normalizer
from vla_tabletop.metaworld.data import Demonstrations
from vla_tabletop.metaworld.simulator import (
    ACTION_NAMES,
    CAMERAS,
    POINTS,
    STATE_NAMES,
    STEP_TIME_S,
)
from vla_tabletop.metaworld.tasks import TASKS, sample_instruction
from vla_tabletop.sim.expert import HORIZON
from vla_tabletop.training.samples import Prompting
from vla_tabletop.training.world import IMAGE_SIZE, Batch, TrainingWorld

METAWORLD = TrainingWorld(
    name='metaworld',
    title='Meta-World, eight tasks',
    cameras=CAMERAS,
    state=tuple(StateSpec(name, '1' if 'gripper' in name else 'm') for name in STATE_NAMES),
    actions=tuple(
        ActionSpec(name, '1', 'absolute')
        if name == 'gripper'
        else ActionSpec(name, 'm/s', 'velocity')
        for name in ACTION_NAMES
    ),
    step_time_s=STEP_TIME_S,
    points=len(POINTS),
    place=3 * len(POINTS),
    half_height_px=IMAGE_SIZE / 2,
    effort=3,
)
_CENTRE_M = np.array([0.0, 0.65, 0.15])
_SCALE_M = 0.1
# Which of `POINTS` a task's instruction names: of reach the goal, whose object is nothing to it.
_NAMED = np.array([POINTS.index('goal' if task == 'reach' else 'object') for task in TASKS])
_HELD_OUT_EVERY = 25
# Lower bound of a range, so that constants are not amplified.
_SMALLEST_RANGE = 0.05


class MetaWorldSamples:
    """Training batches, and the statistics that the policy ships with.

    A chunk is the expert's actions from a frame on; the last one repeats past the episode's end.
    `prompting` None: no language, tasks are told apart by sight; `statistics` None: computed from
    the data.
    """

    world = METAWORLD

    def __init__(
        self,
        data: Demonstrations,
        prompting: Prompting | None,
        statistics: dict[str, np.ndarray] | None = None,
    ) -> None:
        self.data, self._prompting, self.episode = data, prompting, data.episode
        self.statistics = statistics or _statistics(data)
        self.action_normalizer = self._normalizer('actions', ACTION_NAMES)
        self._state = self._normalizer('state', STATE_NAMES).normalise(data.state)
        actions = self.action_normalizer.normalise(data.action)
        ends = np.searchsorted(data.episode, data.episode, side='right') - 1
        self._rows = np.minimum(np.arange(len(ends))[:, None] + np.arange(HORIZON), ends[:, None])
        self._actions = actions.astype(np.float32)

    def pixels(self, frames: np.ndarray) -> np.ndarray:
        """(B, 2, 3, 64, 64) float32 of these frames."""
        shape = (len(frames), len(CAMERAS), 3, IMAGE_SIZE, IMAGE_SIZE)
        out = np.empty(shape, dtype=np.float32)
        for row, frame in enumerate(frames):
            for image, pixels in zip(self.data.images[frame], out[row], strict=True):
                to_pixels(image, IMAGE_SIZE, padding='centre', resample='bilinear', out=pixels)
        return out

    def points(self, frames: np.ndarray) -> np.ndarray:
        """(B, 2, 2, 2) float32 object and goal in each image."""
        return self.data.pixel[frames]

    def batch(self, frames: np.ndarray, rng: np.random.Generator) -> Batch:
        """Draw one of its task's training sentences for every frame."""
        data = self.data
        task = data.task[data.episode[frames]]
        encoded = [self._encode(*pair, rng) for pair in zip(frames, task, strict=True)]
        mask = np.stack([mask for _, mask in encoded])
        longest = int(mask.sum(axis=1).max())
        place = (data.points_m[frames] - _CENTRE_M) / _SCALE_M
        return Batch(
            pixels=self.pixels(frames),
            tokens=np.stack([tokens for tokens, _ in encoded])[:, :longest],
            token_mask=mask[:, :longest],
            actions=self._actions[self._rows[frames]],
            state=self._state[frames],
            pixel=data.pixel[frames, :, _NAMED[task]],
            place=place.reshape(len(frames), -1).astype(np.float32),
            goal=task.astype(np.int64),
            frame=frames,
        )

    def _encode(
        self, frame: int, task: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._prompting is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
        instruction = sample_instruction(TASKS[task], 'training', rng)
        positive = bool(self.data.positive[self.data.episode[frame]])
        return self._prompting.encode(instruction, self._state[frame], positive, rng)

    def held_out(self) -> np.ndarray:
        """Return the frames of every 25th episode, (F,) bool: so many of each task."""
        held: np.ndarray = self.episode % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        return held

    def teaches(self) -> np.ndarray:
        """Return which frames to train on, (F,) bool: without a prompt's tag the good ones only."""
        if self._prompting is not None and self._prompting.has_tag:
            return np.ones(len(self.episode), dtype=bool)
        return self.data.positive[self.episode]

    def step_weight(self) -> np.ndarray:
        """Return the weight of each step of a chunk, (H,) float32: velocities vary alike."""
        return np.ones(HORIZON, dtype=np.float32)

    def errors(self, actions: np.ndarray, batch: Batch) -> dict[str, float]:
        """Return RMS velocity errors (m/s) of the first, first 8 and all steps, good episodes."""
        good = self.data.positive[self.episode[batch.frame]]
        wanted = self.data.action[self._rows[batch.frame]]
        error = np.square(actions - wanted)[good, :, :3]
        return {
            f'{name}_m_s': float(np.sqrt(error[:, :steps].mean()))
            for name, steps in (('first', 1), ('eight', 8), ('all', HORIZON))
        }

    def _normalizer(self, what: str, names: tuple[str, ...]) -> Normalizer:
        statistics = {name: self.statistics[f'{what}.{name}'] for name in ('q01', 'q99')}
        return Normalizer('quantiles_openpi', statistics, names)


def _statistics(data: Demonstrations) -> dict[str, np.ndarray]:
    """1% and 99% quantiles of states and actions, (4,) float64."""
    statistics = {}
    for what, values in (('state', data.state), ('actions', data.action)):
        low, high = np.quantile(values.astype(np.float64), [0.01, 0.99], axis=0)
        narrow = high - low < _SMALLEST_RANGE
        low[narrow], high[narrow] = low[narrow] - _SMALLEST_RANGE, high[narrow] + _SMALLEST_RANGE
        statistics[f'{what}.q01'], statistics[f'{what}.q99'] = low, high
    return statistics
