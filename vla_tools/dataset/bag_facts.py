"""Facts that decide whether a bag can become a data set, found before its messages are read.

A quick pass decodes texts and one chunk, and no other message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from vla_runtime.messages.trajectories import TrajectoryError, message_to_chunk
from vla_runtime.nodes.policy.description import (
    DescriptionError,
    PolicyDescription,
    find_description,
    is_description,
)
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.topics import (
    CHUNK_TYPES,
    IMAGE_TYPES,
    INSTRUCTIONS,
    JOINT_STATE,
    STRING,
    TRAJECTORY,
    Namespace,
    Source,
    camera_topics,
    is_topic,
    missing_topic,
    robot_namespace,
)
from vla_runtime.robot.schema import Robot
from vla_tools.dataset.layout import DatasetError

DIAGNOSTICS = 'diagnostic_msgs/msg/DiagnosticArray'
COMMAND_KINDS: Mapping[str, str] = {
    'joint_trajectory': TRAJECTORY,
    'float64_multi_array': 'std_msgs/msg/Float64MultiArray',
    'joint_state': JOINT_STATE,
    'joint_group_command': 'interbotix_xs_msgs/msg/JointGroupCommand',
    'joint_single_command': 'interbotix_xs_msgs/msg/JointSingleCommand',
    # What the executor asked of the action's server.
    'gripper_command': JOINT_STATE,
    'parallel_gripper_command': JOINT_STATE,
    'pose_stamped': 'geometry_msgs/msg/PoseStamped',
    'twist_stamped': 'geometry_msgs/msg/TwistStamped',
}


@dataclass(frozen=True)
class RobotTopics:
    """Topics of a robot file in a bag, by camera and joint.

    `outputs`: the robot file's command topics to the bag's; `instructions`: None without one.
    """

    namespace: Namespace
    cameras: dict[str, str]
    joints: dict[str, str]
    outputs: dict[str, str]
    instructions: str | None


@dataclass(frozen=True)
class BagFacts:
    """Facts of one bag.

    `missing_outputs`: command topics that are not recorded; `instructions`: their topic, None
    without one; `needs_words`: False where the recorded policy reads no instruction;
    `step_time_s`: of the policy, None where unknown.
    """

    robot: Robot
    missing_outputs: tuple[str, ...]
    has_words: bool
    instructions: str | None
    needs_words: bool
    step_time_s: float | None


def find_topics(
    reader: BagReader, robot: Robot, kinds: Mapping[str, str], namespace: str | None
) -> RobotTopics:
    """Find a robot file's topics among those of a bag.

    `kinds`: topic to type; `namespace` None: the only one that has the topics. Raises
    MissingTopicError: a camera's or joint's topic is missing; NamespaceError: several robots.
    """
    images = {camera.name: camera_topics(camera.topic) for camera in robot.cameras}
    found = robot_namespace(
        kinds,
        [
            *(Source(names, IMAGE_TYPES) for names in images.values()),
            *(Source((source.topic,), (JOINT_STATE,)) for source in robot.joint_states),
        ],
        namespace,
    )

    def required(names: tuple[str, ...], types: tuple[str, ...], source: str) -> str:
        topic = found.find_topic(kinds, names, types)
        if topic is None:
            there = [topic for topic, kind in kinds.items() if kind in types]
            raise missing_topic(reader.path, robot.file, names[0], source, there)
        return topic

    joints = {joint.name: robot.joint_source(joint.name).topic for joint in robot.joints}
    return RobotTopics(
        namespace=found,
        cameras={name: required(topics, IMAGE_TYPES, name) for name, topics in images.items()},
        joints={name: required((topic,), (JOINT_STATE,), name) for name, topic in joints.items()},
        outputs={
            output.topic: topic
            for output in robot.outputs
            if (
                topic := found.find_topic(
                    kinds, (output.command_topic,), (COMMAND_KINDS[output.kind],)
                )
            )
            is not None
        },
        instructions=found.find_topic(kinds, INSTRUCTIONS, (STRING,)),
    )


def read_facts(reader: BagReader, robot: Robot | None, namespace: str | None) -> BagFacts:
    """Look at a bag.

    `robot` None: the one that the policy node describes. Raises DatasetError: nothing says which
    robot it is; ValueError: as `find_topics` and `find_description`.
    """
    kinds: dict[str, str] = {}
    chunks: dict[str, Any] = {}
    descriptions: list[tuple[int, str, str]] = []
    said: set[str] = set()

    def wanted(topic: str, kind: str) -> bool:
        kinds[topic] = kind
        if kind in CHUNK_TYPES:
            return topic not in chunks and is_topic(topic, 'action_chunk')
        is_said = topic not in said and any(is_topic(topic, name) for name in INSTRUCTIONS)
        return kind == STRING and (is_said or is_description(topic))

    for raw in tqdm(
        reader.messages(wanted), f'look at {reader.path.name}', disable=None, leave=False
    ):
        message = reader.read(raw)
        if message is None:
            continue
        if raw.type_name in CHUNK_TYPES:
            chunks[raw.topic] = message
        elif is_description(raw.topic):
            descriptions.append((raw.time_ns, raw.topic, message.data))
        elif message.data.strip():
            said.add(raw.topic)
    described = _described(reader, descriptions, namespace, is_needed=robot is None)
    if robot is None:
        assert described is not None
        robot = described.robot
    topics = find_topics(reader, robot, kinds, namespace)
    chunk = topics.namespace.find_topic(kinds, ('action_chunk',), CHUNK_TYPES)
    return BagFacts(
        robot=robot,
        missing_outputs=tuple(
            output.command_topic for output in robot.outputs if output.topic not in topics.outputs
        ),
        has_words=topics.instructions in said,
        instructions=topics.instructions,
        needs_words=described is None or described.reads_instruction,
        step_time_s=_step_time_s(described, None if chunk is None else chunks.get(chunk)),
    )


def _described(
    reader: BagReader,
    descriptions: Sequence[tuple[int, str, str]],
    namespace: str | None,
    *,
    is_needed: bool,
) -> PolicyDescription | None:
    """Return the policy node's description; where it is not needed, None without a usable one."""
    try:
        found = find_description(descriptions, namespace, reader.note)
    except DescriptionError:
        if is_needed:
            raise
        return None
    if found is None and is_needed:
        raise DatasetError(
            f'{reader.path}: no description of a policy node is in it, so nothing says which robot '
            'it is; give the robot file with --robot'
        )
    return found


def _step_time_s(described: PolicyDescription | None, chunk: Any) -> float | None:
    if described is not None and described.step_time_s is not None:
        return described.step_time_s
    try:
        return None if chunk is None else float(message_to_chunk(chunk)[0].step_time_s)
    except TrajectoryError:
        return None
