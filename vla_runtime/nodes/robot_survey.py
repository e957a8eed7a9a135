"""Ask a running graph what a robot is: joint states, cameras, URDF, and who takes commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import Image
from std_msgs.msg import String

from vla_runtime.messages.images import describe_encoding
from vla_runtime.nodes.doctor.streams import Stream, Streams, published_sources
from vla_runtime.nodes.executor.controller_parameters import ask_parameters
from vla_runtime.nodes.graph_faults import listener_names
from vla_runtime.nodes.qos import LATCHED
from vla_runtime.robot.draft import SeenCamera, SeenJoints, SeenOutput, Survey
from vla_runtime.robot.schema import RobotCamera

# A node without the shipped profile announces itself every 3 s.
_MEETS_WITHIN_S = 3.5
_ANSWERS_WITHIN_S = 3.0
_LATCHED_WITHIN_S = 2.0
_LOOKS_S = 0.05
_TOPIC_KINDS = {
    'trajectory_msgs/msg/JointTrajectory': 'joint_trajectory',
    'std_msgs/msg/Float64MultiArray': 'float64_multi_array',
    'interbotix_xs_msgs/msg/JointGroupCommand': 'joint_group_command',
    'interbotix_xs_msgs/msg/JointSingleCommand': 'joint_single_command',
}
_GOALS = '/_action/send_goal'
_ACTION_KINDS = {
    'control_msgs/action/GripperCommand_SendGoal': 'gripper_command',
    'control_msgs/action/ParallelGripperCommand_SendGoal': 'parallel_gripper_command',
}
# Topics of the executor's own.
_OWN = ('/action_chunk', '/committed_plan')


@contextmanager
def spun(node: Node) -> Iterator[None]:
    """Spin a node in a thread."""
    executor, ends = SingleThreadedExecutor(), threading.Event()
    executor.add_node(node)

    def spin() -> None:
        while not ends.is_set():
            executor.spin_once(timeout_sec=_LOOKS_S)

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        executor.shutdown()


class RobotSurvey:
    """Looks at the graph in a spun node's namespace; topics of the result are relative to it.

    Invariants: nothing is published, no service but that of parameters is called.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._streams = Streams(node)
        self._namespace = f'{node.get_namespace().rstrip("/")}/'
        time.sleep(_MEETS_WITHIN_S)
        for source in published_sources(node):
            if source.topic.startswith(self._namespace):
                self._streams.listen(source)

    @property
    def joint_streams(self) -> list[Stream]:
        return [one for one in self._streams.all if not isinstance(one.source, RobotCamera)]

    def listen(self, seconds: float) -> None:
        time.sleep(seconds)

    def result(self) -> Survey:
        return Survey(
            tuple(
                SeenJoints(
                    self._relative(one.topic), dict(one.names), dict(one.spans), not one.unstamped
                )
                for one in self.joint_streams
                if one.names
            ),
            tuple(
                _camera(one, self._relative(one.topic))
                for one in self._streams.all
                if isinstance(one.source, RobotCamera)
            ),
            tuple(self._outputs()),
            self._urdf(),
        )

    def _relative(self, topic: str) -> str:
        return topic.removeprefix(self._namespace)

    def _outputs(self) -> Iterator[SeenOutput]:
        found = [
            (topic, _TOPIC_KINDS[types[0]])
            for topic, types in self._node.get_topic_names_and_types()
            if types[0] in _TOPIC_KINDS
            and topic.startswith(self._namespace)
            and not topic.endswith(_OWN)
            and listener_names(self._node, topic)
        ]
        found += [
            (service.removesuffix(_GOALS), _ACTION_KINDS[types[0]])
            for service, types in self._node.get_service_names_and_types()
            if service.startswith(self._namespace)
            and service.endswith(_GOALS)
            and types[0] in _ACTION_KINDS
        ]
        names = {topic: topic.rpartition('/')[0] for topic, _ in found}
        said = ask_parameters(self._node, names.values(), _ANSWERS_WITHIN_S)
        for topic, kind in found:
            values = said.get(names[topic], {})
            joints = values.get('joints') or [values[one] for one in ('joint',) if one in values]
            taken = values.get('interface_name') or 'position'
            interface = taken if taken in ('position', 'velocity') else 'position'
            yield SeenOutput(kind, self._relative(topic), tuple(joints), interface)

    def _urdf(self) -> str | None:
        """Return the text that robot_state_publisher publishes; None where nobody does."""
        topics = [
            topic
            for topic, types in self._node.get_topic_names_and_types()
            if topic == f'{self._namespace}robot_description'
            and types[0] == 'std_msgs/msg/String'
            and self._node.count_publishers(topic)
        ]
        heard: list[String] = []
        for topic in topics[:1]:
            self._node.create_subscription(String, topic, heard.append, LATCHED)
            end_s = time.monotonic() + _LATCHED_WITHIN_S
            while not heard and time.monotonic() < end_s:
                time.sleep(_LOOKS_S)
        return heard[0].data if heard else None


def _camera(stream: Stream, topic: str) -> SeenCamera:
    source, message = stream.source, stream.newest
    assert isinstance(source, RobotCamera)
    seen = SeenCamera(topic, source.type, rate_hz=stream.rate_hz, stamped=not stream.unstamped)
    if not isinstance(message, Image):
        return seen
    return SeenCamera(
        seen.topic,
        seen.type,
        message.width,
        message.height,
        describe_encoding(message).strip("'"),
        seen.rate_hz,
        seen.stamped,
    )
