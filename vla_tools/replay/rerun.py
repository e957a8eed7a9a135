"""Inferences of a recording, run again and compared with what was published.

Invariants:
- inferences run in their order, with their numbers and seeds; episodes and resets are followed, so
  a replay without changes is bit-identical on the same machine;
- what cannot be repeated is skipped and named; under `cache_mode: bounded` a chunk depends on the
  inferences before it, so those after a gap are marked as uncertain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from vla_runtime.nodes.policy.description import PolicyDescription
from vla_runtime.nodes.policy.settings import settings_from
from vla_runtime.types import ActionChunk, InferenceReport
from vla_tools.replay.comparison import ChunkError, compare_chunks
from vla_tools.replay.frames import CompleteInference, SkippedInference, with_frames
from vla_tools.replay.observations import observation_of
from vla_tools.replay.recorded import RecordedInference, RecordedRun
from vla_tools.replay.setup import Changes, LoadedPolicy, load_policy


@dataclass(frozen=True)
class ReplayedInference:
    """One inference, run again.

    Attributes:
        recorded: inference as it was reported.
        messages: camera to its message.
        chunk: chunk in the robot's names and units.
        report: report of the policy.
        error: difference from the recorded chunk; None where none is in the recording, or where
            the two cannot be compared.
        note: reason why they cannot, or why the comparison says little; empty when it does.
        seconds: duration of the inference, its images' conversion included.
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

    Args:
        run: the recording.
        changes: changes from the recording.
        policies: loads the policies and keeps the last; None: none is kept.

    Attributes:
        differences: between the recording and this run, in words.
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
        """Run them.

        Raises:
            ValueError: the policy cannot be loaded.
        """
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
