"""Recorded inferences as steps that a player plays to a real policy node.

A node counts its inferences from 0 in each episode: one with lost frames is played with others and
its answer ignored, so that later ones keep their numbers. An episode ends where a request is
missing.

The node must answer from a step's messages in whatever order they arrive, so:
- newest frames and state share a stamp, and the plan keeps its distance from it;
- stamps rise, and `/clock` puts the node's age limit between a step and the one before;
- the state is sent as the positions that the recorded inference was given;
- an earlier frame is as much older than the newest as the policy wants, and newer than the steps
  before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from vla_runtime.bundle.schema import earlier_name
from vla_runtime.nodes.player.steps import LiveStep, PlayedMessage
from vla_runtime.nodes.policy.description import MEASURED
from vla_runtime.recording.storage_file import RawMessage, joint_state, with_header_stamp
from vla_tools.replay.recorded import (
    CompleteInference,
    RecordedInference,
    RecordedRun,
    SkippedInference,
    with_frames,
)

_JOINTS = 'sensor_msgs/msg/JointState'
# The least `max_observation_age_s` of the policy node.
_AGE_LIMIT_S = 0.01
_AGE_LIMIT_NS = round(_AGE_LIMIT_S * 1e9)
# Least distance of two steps' stamps.
_APART_NS = 2_000


@dataclass(frozen=True)
class StandIn:
    """A step for an inference with lost frames; the node counts it, and nobody compares it.

    It has other frames under the lost ones' stamps.
    """

    skipped: SkippedInference
    step: LiveStep


def live_steps(
    run: RecordedRun,
    settings: Mapping[str, Any],
    ages_ns: Mapping[str, int],
    state_ages_ns: Sequence[int] = (),
) -> Iterator[tuple[CompleteInference, LiveStep] | StandIn | SkippedInference]:
    """Yield every inference with its step, or why it cannot be played.

    `settings` replace the recorded ones; `ages_ns`: recorded camera to how much older than its
    newest frame the policy wants it; `state_ages_ns`: of earlier states, newest first.
    """
    stepper = _Stepper(settings, ages_ns, state_ages_ns)
    before: RecordedInference | None = None
    playable = False
    # Frames in place of lost ones; of the first inference at first.
    frames = _first_frames(run)
    for found in with_frames(run):
        recorded = found.recorded
        begins = _begins(before, recorded)
        if begins:
            playable = recorded.number == 0
        elif before is not None and recorded.number != before.number + 1:
            playable = False
        before = recorded
        if isinstance(found, SkippedInference) and playable and recorded.plan and frames:
            yield StandIn(found, stepper.step(recorded, frames, begins))
        elif isinstance(found, SkippedInference):
            playable = False
            yield found
        elif not playable:
            reason = 'inferences of its episode before it are missing, so its number cannot be had'
            yield SkippedInference(recorded, reason)
        else:
            frames = found.raw
            yield found, stepper.step(recorded, frames, begins)


def _first_frames(run: RecordedRun) -> Mapping[str, RawMessage]:
    for found in with_frames(run):
        if isinstance(found, CompleteInference):
            return found.raw
    return {}


def _begins(before: RecordedInference | None, recorded: RecordedInference) -> bool:
    if before is None or before.episode != recorded.episode:
        return True
    return recorded.number <= before.number


class _Stepper:
    """Makes the steps of a recording, in order; see the module for their times."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        ages_ns: Mapping[str, int],
        state_ages_ns: Sequence[int],
    ) -> None:
        self._settings = settings
        self._ages_ns, self._state_ages_ns = ages_ns, state_ages_ns
        self._apart_ns = _APART_NS + max((*ages_ns.values(), *state_ages_ns), default=0)
        self._last_ns = 0

    def step(
        self, recorded: RecordedInference, frames: Mapping[str, RawMessage], begins: bool
    ) -> LiveStep:
        """Return the step of an inference with a plan; `begins`: an episode begins with it."""
        assert recorded.plan is not None
        # The newest stamp: an age in `cache_mode: bounded` counts from it.
        stamp_ns = max(self._last_ns + self._apart_ns, *recorded.stamps_ns.values())
        self._last_ns = stamp_ns
        shift_ns = stamp_ns - recorded.stamp_ns
        return LiveStep(
            now_ns=stamp_ns + _AGE_LIMIT_NS - _APART_NS // 2,
            stamp_ns=stamp_ns,
            begins_episode=begins,
            parameters={
                **recorded.values,
                **self._settings,
                'instruction': recorded.instruction,
                'sync_tolerance_s': 0.0,
                'max_observation_age_s': _AGE_LIMIT_S,
            },
            messages=[
                *_earlier_measured(recorded, stamp_ns, self._state_ages_ns),
                *_measured(recorded, MEASURED, recorded.state, stamp_ns),
                *self._frames(frames, stamp_ns),
            ],
            plan=replace(recorded.plan, stamp_ns=recorded.plan.stamp_ns + shift_ns),
        )

    def _frames(self, frames: Mapping[str, RawMessage], stamp_ns: int) -> list[PlayedMessage]:
        """Frames under their stamps, a camera's earlier ones first, each once."""
        played: dict[tuple[int, str], PlayedMessage] = {}
        for camera, raw in frames.items():
            if camera in self._ages_ns:
                age_ns = self._ages_ns[camera]
                serialised = with_header_stamp(raw.serialised, stamp_ns - age_ns)
                played[-age_ns, raw.topic] = PlayedMessage(raw.topic, raw.type_name, serialised)
        return [played[key] for key in sorted(played)]


def _earlier_measured(
    recorded: RecordedInference, stamp_ns: int, ages_ns: Sequence[int]
) -> list[PlayedMessage]:
    """Return the states of the steps before as messages, the oldest first."""
    earlier = zip(count(1), recorded.earlier_states, ages_ns, strict=False)
    return [
        message
        for ago, state, age_ns in reversed(list(earlier))
        for message in _measured(recorded, earlier_name(MEASURED, ago), state, stamp_ns - age_ns)
    ]


def _measured(
    recorded: RecordedInference, key: str, given: np.ndarray, stamp_ns: int
) -> list[PlayedMessage]:
    """Return a state of an inference as messages, one a topic."""
    description = recorded.description
    if key in recorded.report:
        positions = np.array([float(text) for text in recorded.report[key].split()])
        state = dict(zip(description.measured_joints, positions, strict=True))
    else:
        positions = description.state.to_robot(given)
        state = dict(zip(description.state_joints, positions, strict=True))
    messages = []
    for topic, source in zip(description.joint_states, description.robot.joint_states, strict=True):
        joints = [name for name in state if description.robot.joint_source(name) == source]
        if joints:
            serialised = joint_state(
                stamp_ns,
                [description.robot.joint(name).in_messages for name in joints],
                [state[name] for name in joints],
            )
            messages.append(PlayedMessage(topic, _JOINTS, serialised))
    return messages
