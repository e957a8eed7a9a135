"""Inferences of a recording, run again and compared with what was published.

Inferences run in order, with their numbers, seeds, episodes and resets: an unchanged replay is
bit-identical on the same machine. What cannot be repeated is skipped and named; under `cache_mode:
bounded` chunks after a gap are marked as uncertain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from vla_runtime.bundle.folder import Bundle
from vla_runtime.messages.images import to_rgb
from vla_runtime.messages.jpeg import through_jpeg
from vla_runtime.nodes.policy.description import PolicyDescription
from vla_runtime.nodes.policy.settings import settings_from
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.robot.match import RobotMatch
from vla_runtime.types import ActionChunk, InferenceReport, Observation, same_step_time
from vla_tools.replay.recorded import (
    CompleteInference,
    RecordedInference,
    RecordedRun,
    ReplayError,
    SkippedInference,
    read_run,
    with_frames,
)
from vla_tools.replay.setup import Changes, LoadedPolicy, fit_recording, load_policy

# --- Recorded observations


def observation_of(
    found: CompleteInference,
    match: RobotMatch,
    cameras: Mapping[str, str],
    state: Callable[[np.ndarray], np.ndarray],
) -> Observation:
    """Return what a policy is given for a recorded inference; arguments from `fit_recording`.

    Raises ImageError: a frame is not decodable or not of the robot file's size.
    """
    recorded = found.recorded
    quality = recorded.description.jpeg_quality

    def pixels(camera: str, name: str) -> np.ndarray:
        known = match.cameras[camera]
        seen = to_rgb(
            found.messages[name], width=known.width, height=known.height, encoding=known.encoding
        )
        # The policy's server had it so.
        return through_jpeg(seen, quality) if quality else seen

    return Observation(
        images={camera: pixels(camera, name) for camera, name in cameras.items()},
        state=state(recorded.state),
        earlier_states=[state(one) for one in recorded.earlier_states],
        instruction=recorded.instruction,
        stamps_ns=recorded.stamps_ns,
    )


def recorded_observations(path: Path, bundle: Bundle, most: int) -> list[Observation]:
    """Read up to `most` evenly spread observations, in the units of a bundle's policy.

    The recorded policy may be another for the same robot. Raises ReplayError: there is none, or
    the policy does not fit; ValueError: recording or image unreadable.
    """
    run = read_run(BagReader(path))
    run.inferences = run.inferences[:: -(-len(run.inferences) // most) or 1]
    observations, skipped = [], ''
    for found in with_frames(run):
        if isinstance(found, SkippedInference):
            skipped = found.reason
            continue
        fitted = fit_recording(found.recorded.description, bundle)
        observations.append(observation_of(found, *fitted))
    if not observations:
        raise ReplayError(f'{path}: no inference with its images ({skipped or "none at all"})')
    return observations


# --- Comparison of two chunks of an inference


@dataclass(frozen=True)
class ChunkError:
    """Absolute difference (steps, joints) float64 from the recorded chunk, in robot units.

    `identical`: bit for bit.
    """

    joints: tuple[str, ...]
    absolute: np.ndarray
    identical: bool


def compare_chunks(recorded: ActionChunk, replayed: ActionChunk) -> ChunkError:
    """Compare two chunks over common joints and steps; ValueError: none, or another step time."""
    if not same_step_time(recorded.step_time_s, replayed.step_time_s):
        raise ValueError(
            f'steps of {recorded.step_time_s:g} s and of {replayed.step_time_s:g} s cannot be '
            'compared'
        )
    joints = tuple(name for name in recorded.names if name in replayed.names)
    if not joints:
        raise ValueError('the chunks have no joint in common')
    steps = min(recorded.horizon, replayed.horizon)
    mine = recorded.actions[:steps, [recorded.names.index(name) for name in joints]]
    others = replayed.actions[:steps, [replayed.names.index(name) for name in joints]]
    same_shape = recorded.actions.shape == replayed.actions.shape
    identical = same_shape and recorded.names == replayed.names and bool(np.all(mine == others))
    return ChunkError(joints, np.abs(mine - others), identical)


@dataclass
class ErrorTotal:
    """Largest and mean error of many chunks, per joint and step; `identical` counts equal ones."""

    joints: tuple[str, ...] = ()
    chunks: int = 0
    identical: int = 0
    _largest: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    _sum: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    _count: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def add(self, error: ChunkError) -> None:
        """Take one chunk's error; all must be of the same joints."""
        if not self.chunks:
            self.joints = error.joints
            self._largest = np.zeros_like(error.absolute)
            self._sum, self._count = self._largest.copy(), self._largest.copy()
        self.chunks += 1
        self.identical += error.identical
        steps = min(len(self._sum), len(error.absolute))
        absolute = error.absolute[:steps]
        self._largest[:steps] = np.maximum(self._largest[:steps], absolute)
        self._sum[:steps] += absolute
        self._count[:steps] += 1

    @property
    def largest(self) -> np.ndarray:
        """(steps, joints) largest absolute error, in robot units."""
        return self._largest

    @property
    def mean(self) -> np.ndarray:
        """(steps, joints) mean absolute error, in robot units."""
        return np.divide(
            self._sum, self._count, out=np.zeros_like(self._sum), where=self._count > 0
        )


@dataclass(frozen=True)
class ReplayedInference:
    """One inference, run again; its chunk is in the robot's names and units.

    `error`: None where no chunk is recorded or comparable; `note`: why, or why the comparison says
    little; `seconds`: conversion of images included.
    """

    recorded: RecordedInference
    messages: Mapping[str, Any]
    chunk: ActionChunk
    report: InferenceReport
    error: ChunkError | None
    note: str
    seconds: float


class PolicyStore:
    """The policy that was loaded last, for the next recording of the same; closes others."""

    def __init__(self) -> None:
        self._loaded: LoadedPolicy | None = None
        self._of: tuple[PolicyDescription, Changes] | None = None

    def get(self, description: PolicyDescription, changes: Changes) -> LoadedPolicy:
        """Load a policy, or return it where it is loaded; see `load_policy`."""
        if self._loaded is None or self._of != (description, changes):
            self.close()
            self._loaded = load_policy(description, changes)
            self._of = description, changes
        return self._loaded

    def close(self) -> None:
        """Free the policy's memory."""
        if self._loaded is not None:
            self._loaded.policy.policy.close()
        self._loaded = None


class Replay:
    """Runs the inferences of one recording.

    `policies` loads and keeps the last one; None: none is kept. `differences` from the recording
    are in words.
    """

    def __init__(
        self, run: RecordedRun, changes: Changes, policies: PolicyStore | None = None
    ) -> None:
        self._run = run
        self._changes = changes
        self._policies = policies or PolicyStore()
        self._keeps = policies is not None
        self._of: PolicyDescription | None = None
        self._before: RecordedInference | None = None
        # Bounded reuse follows from all inferences of the episode.
        self._gap = True
        self.differences: dict[str, None] = {}

    def inferences(self) -> Iterator[ReplayedInference | SkippedInference]:
        """Run them; ValueError: the policy cannot be loaded."""
        try:
            for found in with_frames(self._run):
                yield self._next(found)
        finally:
            if not self._keeps:
                self._policies.close()

    def _next(
        self, found: CompleteInference | SkippedInference
    ) -> ReplayedInference | SkippedInference:
        recorded = found.recorded
        loaded = self._load(recorded)
        self._follow(recorded, loaded)
        self._before = recorded
        if isinstance(found, SkippedInference):
            self._gap = True
            return found
        try:
            return self._infer(found, loaded)
        except ValueError as error:
            self._gap = True
            return SkippedInference(recorded, str(error))

    def _load(self, recorded: RecordedInference) -> LoadedPolicy:
        loaded = self._policies.get(recorded.description, self._changes)
        if self._of is not recorded.description:
            self._of, self._before = recorded.description, None
            self.differences.update(dict.fromkeys(loaded.differences))
        return loaded

    def _follow(self, recorded: RecordedInference, loaded: LoadedPolicy) -> None:
        """Begin an episode where the recording does."""
        before = self._before
        if before is None or recorded.episode != before.episode or recorded.number <= before.number:
            loaded.policy.policy.reset()
            self._gap = recorded.number != 0
        elif recorded.number != before.number + 1:
            self._gap = True

    def _infer(self, found: CompleteInference, loaded: LoadedPolicy) -> ReplayedInference:
        recorded, robot_policy = found.recorded, loaded.policy
        assert recorded.plan is not None
        settings = settings_from({**recorded.values, **self._changes.settings})
        begin_s = perf_counter()
        observation = observation_of(found, robot_policy.match, loaded.cameras, loaded.state)
        inference = robot_policy.submit(
            observation,
            recorded.plan,
            settings,
            stamp_ns=recorded.stamp_ns,
            number=recorded.number,
        ).result()
        seconds = perf_counter() - begin_s
        error, note = None, ''
        if recorded.chunk is None:
            note = 'its action_chunk is not in the recording'
        else:
            try:
                error = compare_chunks(recorded.chunk, inference.chunk)
            except ValueError as reason:
                note = str(reason)
        if self._gap and settings.cache.mode == 'bounded':
            note = 'inferences before it are missing, and cache_mode is bounded: uncertain'
        return ReplayedInference(
            recorded, found.messages, inference.chunk, inference.report, error, note, seconds
        )
