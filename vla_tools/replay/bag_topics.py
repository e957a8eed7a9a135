"""Cameras, joints and instructions of a bag, as an open loop needs them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_runtime.nodes.policy.robot_policy import RobotPolicy
from vla_runtime.recording.bag_clock import BagClock, StampLog
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.topics import (
    IMAGE_TYPES,
    INSTRUCTIONS,
    JOINT_STATE,
    STRING,
    Namespace,
    Source,
    camera_topics,
    is_topic,
    missing_topic,
    robot_namespace,
)
from vla_runtime.robot.schema import Robot, is_received
from vla_runtime.sensors.joint_buffer import JointSource
from vla_tools.replay.recorded import ReplayError


@dataclass(frozen=True)
class BagTopics:
    """Topics of a bag that a robot file's sources came on.

    `cameras`: policy camera to topic; `joints`: in the order of the policy's state; `measured`:
    every measured joint of the robot file.
    """

    cameras: Mapping[str, str]
    joints: Sequence[JointSource]
    measured: Mapping[str, JointSource]
    namespace: Namespace
    clock: BagClock


def find_topics(
    reader: BagReader, robot: Robot, policy: RobotPolicy, namespace: str | None
) -> BagTopics:
    """Find the robot file's topics in a bag; `namespace` None: the only one that has them.

    Raises MissingTopicError: one is missing; NamespaceError: several robots; ClockError: messages
    cannot be ordered.
    """
    kinds: dict[str, str] = {}
    stamps = StampLog()
    for message in reader.messages(lambda topic, kind: kind in (*IMAGE_TYPES, JOINT_STATE)):
        kinds.setdefault(message.topic, message.type_name)
        stamps.note(message)

    cameras = {name: camera_topics(camera.topic) for name, camera in policy.match.cameras.items()}
    joints = {
        joint.name: (robot.joint_source(joint.name).topic,)
        for joint in robot.joints
        if joint.name in policy.match.measured_joints or joint.name in policy.match.column_names
    }
    place = robot_namespace(
        kinds,
        [
            *(Source(names, IMAGE_TYPES) for names in cameras.values()),
            *(Source(names, (JOINT_STATE,)) for names in joints.values()),
        ],
        namespace,
    )

    def topic(source: str, names: Sequence[str], types: Sequence[str]) -> str:
        found = place.find_topic(kinds, names, types)
        if found is None:
            there = [one for one, kind in kinds.items() if kind in types]
            raise missing_topic(reader.path, robot.file, names[0], source, there)
        return found

    found = {name: topic(name, names, IMAGE_TYPES) for name, names in cameras.items()}
    sources = {}
    for name, names in joints.items():
        joint = robot.joint(name)
        place_of = topic(name, names, (JOINT_STATE,))
        sources[name] = JointSource(place_of, joint.in_messages, joint.continuous)
    clock = stamps.clock(
        reader.path,
        [*(source.topic for source in sources.values()), *found.values()],
        {
            *(found[name] for name, one in policy.match.cameras.items() if one.stamp == 'receive'),
            *(one.topic for name, one in sources.items() if is_received(robot, name)),
        },
    )
    ordered = [sources[name] for name in policy.match.measured_joints]
    return BagTopics(found, ordered, sources, place, clock)


@dataclass(frozen=True)
class Instructions:
    """Instructions at the rising times of their recording, on the bag's clock."""

    times_ns: Sequence[int]
    texts: Sequence[str]

    def at(self, time_ns: int) -> str:
        """The instruction in force; empty for none."""
        index = bisect_right(self.times_ns, time_ns)
        return self.texts[index - 1] if index else ''


def find_instructions(reader: BagReader, topics: BagTopics) -> Instructions:
    """Return the instructions that a robot's policy node was given; ReplayError: there are none."""
    found: dict[str, list[tuple[int, str]]] = {}
    for time_ns, topic, text in reader.texts(
        lambda topic: any(is_topic(topic, name) for name in INSTRUCTIONS)
    ):
        found.setdefault(topic, []).append((time_ns, text))
    spoken = [topic for topic, texts in found.items() if any(text.strip() for _, text in texts)]
    chosen = topics.namespace.find_topic(dict.fromkeys(spoken, STRING), INSTRUCTIONS, (STRING,))
    if chosen is not None:
        texts = sorted(found[chosen], key=lambda item: item[0])
        times_ns = topics.clock.at(np.array([time_ns for time_ns, _ in texts]))
        return Instructions(times_ns.tolist(), [text for _, text in texts])
    raise ReplayError(
        f'{reader.path}: no topic …/current_instruction or …/instruction says what the robot was '
        'to do; give it with --instruction'
    )
