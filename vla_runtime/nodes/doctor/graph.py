"""Join the graph as the policy node does, listen for some seconds, and judge what came."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions

from vla_runtime.nodes.doctor.controllers import Controllers
from vla_runtime.nodes.doctor.domains import domains_here, topics_in
from vla_runtime.nodes.doctor.findings import Finding, note, ok, problem
from vla_runtime.nodes.doctor.joints import joint_findings, leader_findings
from vla_runtime.nodes.doctor.streams import Source, Stream, Streams, published_sources
from vla_runtime.nodes.doctor.subject import Subject
from vla_runtime.nodes.doctor.topics import OLDEST_STATE_S, Pace, topic_findings
from vla_runtime.nodes.graph_faults import nothing_of_robot
from vla_runtime.nodes.graph_status import GraphStatus
from vla_runtime.nodes.robot_report import RobotReport
from vla_runtime.robot.schema import JointStateTopic, RobotCamera, RobotLeader

AREA = 'graph'
_NAME = '_vla_doctor'
# A node without the shipped profile announces itself every 3 s.
_MEETS_WITHIN_S = 3.5
_LOOKS_S = 0.02
_DIED = 'docs/howto/launch.md#when-a-node-has-died'
_EMPTY = 'docs/howto/why_stopped.md#nothing-in-the-graph'
_EMPTY_GRAPH = 'no camera and no joint state is published in this graph'


def graph_findings(subject: Subject | None, namespace: str, listen_s: float) -> list[Finding]:
    """Look at the graph of this process's environment.

    Args:
        subject: None looks at every camera and joint state that is published.
        namespace: of the robot's nodes; topics of the robot file are relative to it.
        listen_s: seconds for which messages are counted.
    """
    with joined(namespace) as node:
        return _Look(node, subject, listen_s).findings()


@contextmanager
def joined(namespace: str) -> Iterator[Node]:
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    node = Node(
        _NAME,
        namespace=namespace or '/',
        use_global_arguments=False,
        enable_rosout=False,
        start_parameter_services=False,
    )
    try:
        yield node
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


class _Look:
    def __init__(self, node: Node, subject: Subject | None, listen_s: float) -> None:
        self._node, self._subject, self._listen_s = node, subject, listen_s
        self._domain = int(os.environ.get('ROS_DOMAIN_ID') or 0)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(node)
        self._status = GraphStatus(node)

    def findings(self) -> list[Finding]:
        found = self._meet()
        if found:
            return found
        uses_sim_time = self._follow_clock()
        streams = Streams(self._node)
        for source in self._sources():
            streams.listen(source)
        outputs = () if self._subject is None else self._subject.outputs
        controllers = Controllers(self._node, outputs, use_sim_time=uses_sim_time)
        end_s = time.monotonic() + self._listen_s
        while time.monotonic() < end_s:
            self._executor.spin_once(timeout_sec=_LOOKS_S)
            controllers.look()
        streams.end()
        found = [
            *self._of_clock(uses_sim_time),
            *self._of_streams(streams.all),
            *self._of_joints(streams.all, controllers.feedback),
            *controllers.findings(),
            *self._of_nodes(),
        ]
        controllers.close()
        self._executor.shutdown()
        return found

    def _full(self, names: Sequence[str]) -> list[str]:
        return [self._node.resolve_topic_name(name) for name in names]

    def _meet(self) -> list[Finding]:
        """Wait until the graph is known; return why the robot is not in it, else nothing."""
        heard = [] if self._subject is None else self._full([one.topic for one in self._needed()])
        end_s = time.monotonic() + _MEETS_WITHIN_S
        while time.monotonic() < end_s:
            if heard and all(map(self._node.count_publishers, heard)):
                return []
            time.sleep(_LOOKS_S)
        if self._subject is None:
            return [] if published_sources(self._node) else [self._nothing(_EMPTY_GRAPH, [])]
        commanded = self._full([one.output.command_topic for one in self._subject.outputs])
        missing = nothing_of_robot(self._node, heard, commanded, own_subscriptions=0)
        return [self._nothing(missing, heard)] if missing else []

    def _nothing(self, text: str, wanted: list[str]) -> Finding:
        """Say where the robot is instead: in another namespace or domain, or elsewhere."""
        text = text.partition(': is its')[0]
        if near := self._elsewhere():
            namespace = near.removesuffix(self._needed()[0].topic).rstrip('/') or '/'
            return problem(
                AREA,
                'namespace',
                f'{text}, in the namespace {self._node.get_namespace()}: {near} is published',
                f'--namespace {namespace}, and the launch argument namespace:={namespace}'
                if namespace != '/'
                else "leave out --namespace, and the launch's namespace",
            )
        others = [domain for domain in domains_here() if domain != self._domain]
        for domain in others if wanted else ():
            if found := topics_in(domain, wanted):
                return problem(
                    AREA,
                    'domain',
                    f'{text}, and {found[0]} is published in domain {domain} of this machine',
                    f'export ROS_DOMAIN_ID={domain} in this shell and in that of the launch, or '
                    'start the driver in this domain',
                )
        there = ', '.join(map(str, others))
        nodes = f'; on this machine there are nodes in domain {there}' if others else ''
        return problem(
            AREA,
            'domain',
            f'{text}{nodes}',
            f'start the driver, with the same ROS_DOMAIN_ID, discovery range and middleware: '
            f'{_EMPTY}',
        )

    def _elsewhere(self) -> str:
        """Return a topic with the first name of the robot file in another namespace; else ''."""
        if self._subject is None or (wanted := self._needed()[0].topic).startswith('/'):
            return ''
        found = [
            topic
            for topic, _ in self._node.get_topic_names_and_types()
            if topic.endswith(f'/{wanted}') and self._node.count_publishers(topic)
        ]
        return found[0] if found else ''

    def _needed(self) -> list[JointStateTopic | RobotCamera]:
        assert self._subject is not None
        return [*self._subject.robot.joint_states, *self._subject.cameras]

    def _sources(self) -> Sequence[Source]:
        if self._subject is None:
            return published_sources(self._node)
        leader = self._subject.robot.leader
        if leader is None:
            return self._needed()
        button = () if leader.button is None else (leader.button,)
        return [*self._needed(), leader, *button]

    def _follow_clock(self) -> bool:
        """Follow `/clock` where somebody publishes it, as the robot's nodes then should."""
        if not self._node.count_publishers('/clock'):
            return False
        self._node.set_parameters([Parameter('use_sim_time', value=True)])
        return True

    def _of_clock(self, uses_sim_time: bool) -> Iterator[Finding]:
        if self._subject is None:
            yield note(
                AREA,
                'robot',
                'none is named: every camera and joint state is listed',
                '--robot FILE compares them; vla_runtime robot new writes a draft from this graph',
            )
        if uses_sim_time:
            yield note(
                AREA,
                'clock',
                'simulated: /clock is published, and stamps are compared with it',
                'launch with use_sim_time:=true; on a real robot end what publishes it',
            )

    def _of_streams(self, streams: Sequence[Stream]) -> Iterator[Finding]:
        for stream in streams:
            yield from topic_findings(self._node, stream, self._domain, self._pace(stream.source))

    def _pace(self, source: Source) -> Pace:
        if isinstance(source, RobotCamera):
            return Pace(rate_hz=self._rate_of(source))
        if self._subject is None:
            return Pace()
        leader = self._subject.robot.leader
        if isinstance(source, JointStateTopic) or leader is None:
            return Pace(gap_s=(OLDEST_STATE_S, 'the robot holds (max_state_age_s)'))
        lost = 'the leader is' if isinstance(source, RobotLeader) else 'a held button is'
        return Pace(gap_s=(leader.timeout_s, f'{lost} lost (leader.timeout_s)'))

    def _rate_of(self, camera: RobotCamera) -> tuple[float, str] | None:
        """Return the rate that a camera should have, and who says so."""
        if camera.rate_hz is not None:
            return camera.rate_hz, "the robot file's rate_hz is"
        step_hz = None if self._subject is None else self._subject.step_hz
        return None if step_hz is None else (step_hz, 'the policy was trained with steps at')

    def _of_joints(self, streams: Sequence[Stream], feedback: Mapping[str, float]) -> list[Finding]:
        if self._subject is None:
            return []
        of = {one.source.topic: one for one in streams if isinstance(one.source, JointStateTopic)}
        subject = self._subject
        found = joint_findings(subject.robot, of, subject.units, subject.trained, feedback)
        for stream in streams:
            if isinstance(stream.source, RobotLeader):
                found += leader_findings(subject.robot, stream.source, stream)
        return found

    def _of_nodes(self) -> Iterator[Finding]:
        own = self._node.get_namespace().rstrip('/')
        return node_findings(self._status.look(own if self._subject is not None else None))


def node_findings(robots: Iterable[RobotReport]) -> Iterator[Finding]:
    """Judge what the nodes of each robot say."""
    for robot in robots:
        what = robot.namespace or '/'
        if robot.executor is None:
            yield note('nodes', what, 'no executor runs: not launched yet?', _DIED)
        elif robot.is_paused:
            # It rests as it should, as after every episode.
            yield note('nodes', what, robot.why(), robot.remedy())
        elif why := robot.why():
            yield problem('nodes', what, why, robot.remedy())
        else:
            yield ok('nodes', what, robot.state())
