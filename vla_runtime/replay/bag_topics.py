"""Topics of a bag that are those of a robot file, and the instructions in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.replay.recorded import IMAGE_TYPES, ReplayError
from vla_runtime.ros.policy.joint_buffer import JointSource
from vla_runtime.ros.policy.robot_policy import RobotPolicy
from vla_runtime.ros.robot.file import Robot

_JOINTS = 'sensor_msgs/msg/JointState'
_STRING = 'std_msgs/msg/String'
_INSTRUCTIONS = ('/current_instruction', '/instruction')


@dataclass(frozen=True)
class BagTopics:
    """Topics of a bag that a robot file's sources came on.

    Attributes:
        cameras: policy's camera name to topic.
        joints: joint to topic and its name in messages, in the policy's order of the state.
        measured: every measured joint of the robot file to the same.
    """

    cameras: Mapping[str, str]
    joints: Sequence[JointSource]
    measured: Mapping[str, JointSource]


def find_topics(reader: BagReader, robot: Robot, policy: RobotPolicy) -> BagTopics:
    """Find the robot file's topics in a bag, in whatever namespace they were recorded.

    Raises:
        ReplayError: one is not there; names those that are.
    """
    kinds: dict[str, str] = {}
    for message in reader.messages(lambda topic, kind: kind in (*IMAGE_TYPES, _JOINTS)):
        kinds.setdefault(message.topic, message.type_name)
    cameras = {}
    for name, camera in policy.match.cameras.items():
        cameras[name] = _topic(
            reader, kinds, (camera.topic, f'{camera.topic}/compressed'), IMAGE_TYPES, name
        )
    sources = {}
    for joint in robot.joints:
        topic = next(s.topic for s in robot.joint_states if not s.joints or joint.name in s.joints)
        if joint.name in policy.match.state_joints or joint.name in policy.match.column_names:
            found = _topic(reader, kinds, (topic,), (_JOINTS,), joint.name)
            sources[joint.name] = JointSource(found, joint.in_messages, joint.continuous)
    return BagTopics(cameras, [sources[name] for name in policy.match.state_joints], sources)


def _topic(
    reader: BagReader,
    kinds: Mapping[str, str],
    wanted: Sequence[str],
    types: Sequence[str],
    source: str,
) -> str:
    for name in wanted:
        found = [
            topic
            for topic, kind in kinds.items()
            if kind in types and (topic == name or topic.endswith(f'/{name.lstrip("/")}'))
        ]
        if found:
            return min(found, key=len)
    there = sorted(topic for topic, kind in kinds.items() if kind in types)
    raise ReplayError(
        f"{reader.path}: no topic {wanted[0]} for '{source}' of the robot file; there are: "
        f'{", ".join(there) or "none of that kind"}. Give the robot file its name there'
    )


@dataclass(frozen=True)
class Instructions:
    """Instructions over time.

    Attributes:
        times_ns: at which each was recorded, rising.
        texts: of each.
    """

    times_ns: Sequence[int]
    texts: Sequence[str]

    def at(self, time_ns: int) -> str:
        """The instruction in force; empty for none."""
        index = bisect_right(self.times_ns, time_ns)
        return self.texts[index - 1] if index else ''


def find_instructions(reader: BagReader) -> Instructions:
    """Return the instructions that a policy node of a bag was given.

    Raises:
        ReplayError: there are none.
    """
    found: dict[str, list[tuple[int, str]]] = {suffix: [] for suffix in _INSTRUCTIONS}
    wanted = reader.messages(lambda topic, kind: kind == _STRING and topic.endswith(_INSTRUCTIONS))
    for raw in wanted:
        message = reader.read(raw)
        if message is not None:
            suffix = next(one for one in _INSTRUCTIONS if raw.topic.endswith(one))
            found[suffix].append((raw.time_ns, message.data))
    for said in found.values():
        if any(text.strip() for _, text in said):
            said.sort(key=lambda item: item[0])
            return Instructions([time_ns for time_ns, _ in said], [text for _, text in said])
    raise ReplayError(
        f'{reader.path}: no topic …/current_instruction or …/instruction says what the robot was '
        'to do; give it with --instruction'
    )
