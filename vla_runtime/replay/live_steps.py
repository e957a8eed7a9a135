"""Recorded inferences as steps that a player plays to a real policy node.

A node counts its inferences from 0 in each episode. So an inference whose frames were lost is
played with other frames of the recording, and its answer is not used: those after it have their
numbers. An episode ends where a request is missing; what cannot be played is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.cdr import header_stamp_ns, joint_state, with_header_stamp
from vla_runtime.recording.storage_file import RawMessage
from vla_runtime.replay.frames import CompleteInference, SkippedInference, with_frames
from vla_runtime.replay.recorded import RecordedInference, RecordedRun
from vla_runtime.ros.player.steps import LiveStep, PlayedMessage
from vla_runtime.ros.policy.description import MEASURED, PolicyDescription
from vla_runtime.ros.robot.schema import received_topics

_JOINTS = 'sensor_msgs/msg/JointState'
_STATE = 'state'
_NO_STATE = 'the joint state that it used is not in the recording'
# Two frames of a camera are further apart than this.
_APART_NS = 2_000_000
# Of the node's parameter.
_LEAST_LIMIT_S = 0.01


@dataclass(frozen=True)
class StandIn:
    """A step for an inference whose frames were lost; the node counts it, and nobody compares it.

    Attributes:
        skipped: the inference, and what was lost.
        step: step with frames of another inference under the stamps of those that were lost.
    """

    skipped: SkippedInference
    step: LiveStep


def live_steps(
    run: RecordedRun, settings: Mapping[str, Any]
) -> Iterator[tuple[CompleteInference, LiveStep, str] | StandIn | SkippedInference]:
    """Yield every inference with its step, or why it cannot be played.

    With a step comes why its chunk may be another one, empty when nothing is missing.

    Args:
        run: the recording.
        settings: settings of every inference, in place of the recorded ones.
    """
    joints = _JointStates(run)
    before: RecordedInference | None = None
    playable = False
    # Frames for those that were lost; of the recording's first inference until another one comes.
    frames = _first_frames(run)
    for found in with_frames(run):
        recorded = found.recorded
        if _begins(before, recorded):
            playable = recorded.number == 0
        elif before is not None and recorded.number != before.number + 1:
            playable = False
        begins, last, before = _begins(before, recorded), before, recorded
        if isinstance(found, SkippedInference) and playable and recorded.plan and frames:
            whole = CompleteInference(recorded, {}, frames)
            yield StandIn(found, _step(whole, last, begins, settings, joints))
        elif isinstance(found, SkippedInference):
            playable = False
            yield found
        elif not playable:
            reason = 'inferences of its episode before it are missing, so its number cannot be had'
            yield SkippedInference(recorded, reason)
        else:
            frames = found.raw
            note = '' if joints.has(recorded) else _NO_STATE
            yield found, _step(found, last, begins, settings, joints), note


def _first_frames(run: RecordedRun) -> Mapping[str, RawMessage]:
    for found in with_frames(run):
        if isinstance(found, CompleteInference):
            return found.raw
    return {}


def _begins(before: RecordedInference | None, recorded: RecordedInference) -> bool:
    if before is None or before.episode != recorded.episode:
        return True
    return recorded.number <= before.number


def _age_limit_s(
    recorded: RecordedInference, before: RecordedInference | None, now_ns: int, oldest_ns: int
) -> float:
    """Return a limit on ages that the frames from before exceed, and those that were used do not.

    A node that had it would wait for the frames that were used, in whatever order messages come.
    """
    limit_s = float(recorded.report['parameter.max_observation_age_s'])
    if before is not None:
        others = [
            stamp_ns
            for name, stamp_ns in before.stamps_ns.items()
            if name != _STATE and stamp_ns != recorded.stamps_ns.get(name)
        ]
        if others:
            limit_s = min(limit_s, (now_ns - max(others) - _APART_NS) * 1e-9)
    return max(limit_s, (oldest_ns + _APART_NS) * 1e-9, _LEAST_LIMIT_S)


def _step(
    found: CompleteInference,
    before: RecordedInference | None,
    begins: bool,
    settings: Mapping[str, Any],
    joints: _JointStates,
) -> LiveStep:
    recorded = found.recorded
    assert recorded.plan is not None
    ages_ns = {
        source: round(float(recorded.report[f'age_ms.{source}']) * 1e6)
        for source in recorded.stamps_ns
    }
    source, stamp_ns = next(iter(recorded.stamps_ns.items()))
    # Also of those that were stamped when they were received: the node is told to take stamps.
    frames = [
        PlayedMessage(
            raw.topic,
            raw.type_name,
            with_header_stamp(raw.serialised, recorded.stamps_ns[camera]),
        )
        for camera, raw in found.raw.items()
    ]
    now_ns = stamp_ns + ages_ns[source]
    return LiveStep(
        now_ns=now_ns,
        stamp_ns=recorded.stamp_ns,
        begins_episode=begins,
        parameters={
            **recorded.values,
            **settings,
            'instruction': recorded.instruction,
            'sync_tolerance_s': float(recorded.report['parameter.sync_tolerance_s']),
            'max_observation_age_s': _age_limit_s(recorded, before, now_ns, max(ages_ns.values())),
        },
        messages=[*joints.until(recorded), *frames],
        plan=recorded.plan,
    )


class _JointStates:
    """Joint states of a recording, each given once, up to the newest that an inference used."""

    def __init__(self, run: RecordedRun) -> None:
        descriptions: list[PolicyDescription] = [one.description for one in run.inferences]
        topics = {topic for one in descriptions for topic in one.joint_states}
        self._waiting = _sorted(run.reader, topics)
        self._stamps_ns = {stamp_ns for stamp_ns, _ in self._waiting}
        self._received = any(received_topics(one.robot) for one in descriptions)
        self._place = 0

    def has(self, recorded: RecordedInference) -> bool:
        """Return whether the newest message that the inference's state was made of is there."""
        return self._received or recorded.stamps_ns[_STATE] in self._stamps_ns

    def until(self, recorded: RecordedInference) -> list[PlayedMessage]:
        """Messages since the last call, up to those that the inference's state was made of."""
        if self._received:
            return _measured(recorded)
        stamp_ns, begin = recorded.stamps_ns[_STATE], self._place
        while self._place < len(self._waiting) and self._waiting[self._place][0] <= stamp_ns:
            self._place += 1
        # A node drops what is older than a second or so anyway.
        recent = [
            raw
            for at_ns, raw in self._waiting[begin : self._place]
            if at_ns > stamp_ns - 1_000_000_000
        ]
        return [PlayedMessage(raw.topic, raw.type_name, raw.serialised) for raw in recent]


def _measured(recorded: RecordedInference) -> list[PlayedMessage]:
    """The state of an inference as messages, one a topic.

    Which time each joint state was given when it was received, only the node knew.
    """
    description = recorded.description
    numbers = (float(text) for text in recorded.report[MEASURED].split())
    state = dict(zip(description.state_joints, numbers, strict=True))
    messages = []
    for topic, source in zip(description.joint_states, description.robot.joint_states, strict=True):
        joints = [name for name in state if description.robot.joint_source(name) == source]
        if joints:
            serialised = joint_state(
                min(recorded.stamp_ns, recorded.stamps_ns[_STATE]),
                [description.robot.joint(name).in_messages for name in joints],
                [state[name] for name in joints],
            )
            messages.append(PlayedMessage(topic, _JOINTS, serialised))
    return messages


def _sorted(reader: BagReader, topics: set[str]) -> list[tuple[int, RawMessage]]:
    found = []
    for raw in reader.messages(lambda topic, kind: topic in topics and kind == _JOINTS):
        stamp_ns = header_stamp_ns(raw.serialised)
        if stamp_ns is not None:
            found.append((stamp_ns, raw))
    return sorted(found, key=lambda item: item[0])
