"""An executor under test and its surroundings: an arm that follows, and chunks by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from graph import RELIABLE, SENSOR, Graph, Process, statuses
from paths import ROOT
from rclpy.qos import QoSProfile
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger
from tabletop_policy import HORIZON, STEP_TIME_S
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import (
    chunk_to_message,
    chunk_type,
    message_to_plan,
    ns_to_stamp,
    plan_type,
)
from vla_runtime.types import ActionChunk, ChunkHeader
from vla_tabletop.sim.world import JOINT_NAMES

HOME = np.array([0.1, -0.3, 1.6, 1.7, 0.0, 0.2])
# A busy machine must not look like a fault; what the limits do is tested on the core.
PATIENT = {'max_state_age_s': 1.0, 'tick_timeout_s': 1.0, 'clock_jump_s': 5.0}
TABLETOP = (ROOT / 'config' / 'robots' / 'tabletop.yaml').read_text(encoding='utf-8')
# Nor an outage that needs a person's start; those are in `test_stopped_robot_stays`.
PATIENT_ROBOT = f'{TABLETOP}\nrestart_after_outage_s: 600.0\n'
# Below the robot file's max_step of 0.5 rad, which would keep the command near by itself.
MAX_TRACKING_ERROR = 0.3
# Of every joint in a step.
RISE_RAD = 0.02
# From here the gripper's way of a chunk is inside its limits, up and down.
_HIGHEST = 0.4
_PERIOD_S = 0.02


def chunk_message(
    actions: np.ndarray,
    header: ChunkHeader,
    names: tuple[str, ...] = JOINT_NAMES,
    kind: str = 'position',
) -> Any:
    """A policy's answer of the tabletop's steps."""
    chunk = ActionChunk(
        actions=actions,
        names=names,
        kinds=(kind,) * len(names),
        step_time_s=STEP_TIME_S,
        normalised=np.zeros((len(actions), 0), dtype=np.float32),
    )
    return chunk_to_message(chunk, header)


class Arm:
    """Publishes joint states all the time; the joints are wherever they were last commanded.

    Attributes:
        follows: True while the joints go where they are commanded.
        silent: True while nothing is published.
        names: in its messages.
        positions: (6,) of its joints.
        commands: messages that the arm's controller got, in order.
        plans: requests of the executor.
    """

    # Of the joint states.
    QOS: QoSProfile | int = SENSOR

    def __init__(self, graph: Graph, namespace: str = '') -> None:
        self._graph = graph
        self.heal()
        self.go_home()
        self.commands: list[JointTrajectory] = []
        self.plans: list[Any] = []
        node = graph.node
        self._states = node.create_publisher(JointState, f'{namespace}/joint_states', self.QOS)
        self._chunks = node.create_publisher(chunk_type(), f'{namespace}/action_chunk', RELIABLE)
        self._subscriptions = [
            node.create_subscription(kind, f'{namespace}/{topic}', call, RELIABLE)
            for kind, topic, call in (
                (JointTrajectory, 'arm_controller/joint_trajectory', self._on_arm),
                (plan_type(), 'committed_plan', self._on_request),
            )
        ]
        self._gripper_topic = f'{namespace}/gripper_controller/commands'
        self.plug_gripper_in()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def plug_gripper_in(self) -> None:
        """Take the gripper's commands."""
        self._gripper = self._graph.node.create_subscription(
            Float64MultiArray, self._gripper_topic, self._on_gripper, RELIABLE
        )

    def unplug_gripper(self) -> None:
        """End the gripper's controller."""
        self._graph.node.destroy_subscription(self._gripper)

    def close(self) -> None:
        """Stop publishing and leave the graph."""
        self._stop.set()
        self._thread.join()
        for subscription in (*self._subscriptions, self._gripper):
            self._graph.node.destroy_subscription(subscription)
        for publisher in (self._states, self._chunks):
            self._graph.node.destroy_publisher(publisher)

    def go_home(self) -> None:
        """Be where it began, by hand."""
        self.positions = HOME.copy()

    def heal(self) -> None:
        """Publish and follow as it should."""
        self.follows, self.silent = True, False
        self.names = list(JOINT_NAMES)

    def now_ns(self) -> int:
        return int(self._graph.node.get_clock().now().nanoseconds)

    def state_ns(self) -> int:
        """Stamp of a joint state."""
        return self.now_ns()

    def commanded(self) -> np.ndarray:
        """(n, 5) positions that the arm was commanded, in order."""
        return np.array([list(command.points[-1].positions) for command in self.commands])

    def longest_way(self) -> float:
        """Longest way of a joint within one command, rad.

        Each command carries the one before it, so that one that a busy machine loses between two
        others is no step.
        """
        ways = [np.ptp([p.positions for p in command.points], axis=0) for command in self.commands]
        return float(np.max(ways))

    def answer(self, number: int, rise_rad: float = RISE_RAD, **changes) -> Any:
        """Answer the newest request: every joint rises by `rise_rad` a step, from where it is."""
        plan = message_to_plan(self.plans[-1])
        actions = self.positions + rise_rad * np.arange(1, HORIZON + 1)[:, None]
        header = ChunkHeader(
            changes.get('stamp_ns', self.now_ns()),
            changes.get('episode', plan.episode),
            number,
            tied=False,
        )
        message = chunk_message(
            changes.get('actions', actions), header, changes.get('names', JOINT_NAMES)
        )
        self.send(message)
        return message

    def send(self, message: Any) -> None:
        """Publish a chunk as it is."""
        self._chunks.publish(message)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            if self.silent:
                continue
            message = JointState(name=self.names, position=self.positions.tolist())
            message.header.stamp = ns_to_stamp(self.state_ns())
            self._states.publish(message)

    def _on_request(self, message: Any) -> None:
        self.plans.append(message)

    def _on_arm(self, message: JointTrajectory) -> None:
        self.commands.append(message)
        if self.follows:
            self.positions[:5] = message.points[-1].positions

    def _on_gripper(self, message: Float64MultiArray) -> None:
        if self.follows:
            self.positions[5] = message.data[0]


Status = dict[str, Any]


def start(
    made: Graph,
    bundle: Path,
    *arguments: str,
    robot: Path | str | None = None,
    name: str | None = None,
) -> Process:
    """Start an executor node, which is patient unless a robot file is given."""
    if robot is None:
        robot = bundle.parent / 'patient.yaml'
        robot.write_text(PATIENT_ROBOT, encoding='utf-8')
    given = {'bundle': bundle, 'robot': robot, 'replan_interval': 8, **PATIENT}
    words = [word for key, value in given.items() for word in ('-p', f'{key}:={value}')]
    return made.start(
        'vla_runtime.nodes.executor.node', '--ros-args', *words, *arguments, name=name
    )


class ExecutorProcess:
    """An executor node as a process, and its status.

    Attributes:
        node: its full name.
        process: it, running.
        diagnostics: messages of the test's graph, which a test may clear.
    """

    def __init__(
        self,
        made: Graph,
        bundle: Path,
        namespace: str = '',
        *arguments: str,
        robot: Path | str | None = None,
    ) -> None:
        self.graph = made
        self.node = f'{namespace}/vla_executor'
        remap = ('-r', f'__ns:={namespace}') if namespace else ()
        self.process = start(made, bundle, *remap, *arguments, robot=robot, name=self.node)
        self.diagnostics = made.collect(DiagnosticArray, '/diagnostics')

    def become_inactive(self) -> None:
        """Configured, with nothing left of the test before."""
        if self.graph.state(self.node) == 'active':
            assert self.graph.transition(self.node, 'deactivate')
        if self.graph.state(self.node) == 'unconfigured':
            assert self.graph.transition(self.node, 'configure')

    def call(self, service: str) -> Trigger.Response:
        return self.graph.call(Trigger, f'{self.node}/{service}', Trigger.Request())

    def statuses(self, condition: str = 'control') -> Iterator[Status]:
        """Statuses of a condition, newest first: their values, with `text` and `level`."""
        for status in statuses(self.diagnostics, f'{self.node}: {condition}'):
            yield {**values_of(status), 'text': status.message, 'level': status.level[0]}

    def status(self, condition: str = 'control') -> Status | None:
        """The newest of them; None before the first."""
        return next(self.statuses(condition), None)

    def wait_for_status(
        self,
        what: str,
        holds: Callable[[Status], bool],
        condition: str = 'control',
        meanwhile: Callable[[], None] | None = None,
    ) -> Status:
        """Wait until a status that comes from now on fulfils `holds`; returns it."""
        self.diagnostics.clear()
        return self.graph.wait_for(
            lambda: next(filter(holds, self.statuses(condition)), None), what, meanwhile=meanwhile
        )


class Bench(ExecutorProcess):
    """One executor, the arm that it moves, and its status.

    The one that most tests of a module share has no namespace; all others need one of their own.
    """

    def __init__(self, made: Graph, bundle: Path, namespace: str = '', *arguments: str) -> None:
        error = ('-p', f'max_tracking_error:={MAX_TRACKING_ERROR}')
        super().__init__(made, bundle, namespace, *error, *arguments)
        self.arm = Arm(made, namespace)
        self.reports = made.collect(DiagnosticArray, f'{self.node}/report')
        self._answered: Any | None = None

    def begin(self) -> None:
        """Active and not started, with nothing left of the test before."""
        self.become_inactive()
        self.arm.heal()
        self.arm.go_home()
        self.arm.commands.clear()
        self.arm.plans.clear()
        self.reports.clear()
        assert self.graph.transition(self.node, 'activate')

    def start(self) -> None:
        self.graph.wait_for(lambda: self.call('start').success, 'a start')
        self.graph.wait_for(lambda: self.arm.plans, 'a request')

    def answer_new(self, number: int = 0, **changes: Any) -> None:
        """Answer the newest request, once; for motion that does not end during a wait.

        The arm goes to and fro: one that rose for eight seconds would be at its limits, and twenty
        chunks outside of them latch.
        """
        newest = self.arm.plans[-1]
        if newest is not self._answered:
            self._answered = newest
            rise_rad = RISE_RAD if self.arm.positions[5] < _HIGHEST else -RISE_RAD
            self.arm.answer(number, **{'rise_rad': rise_rad, **changes})

    def move(self, number: int = 0, **changes: Any) -> Status:
        """Answer until a status tells of it: one chunk lasts for three statuses at most."""
        return self.wait_for_status(
            'motion',
            lambda s: s['kind'] == 'track' and s['chunk'] == str(number),
            meanwhile=lambda: self.answer_new(number, **changes),
        )

    def next_seam(self, number: int) -> Status:
        """Answer with this chunk; what is reported when it takes over."""
        self.arm.answer(number)

        def look() -> Status | None:
            found = map(values_of, statuses(self.reports, f'{self.node}: seam'))
            return next((values for values in found if values['chunk'] == str(number)), None)

        return self.graph.wait_for(look, f'the seam of chunk {number}')

    def wait_for_commands(self, count: int) -> None:
        """Wait until so many more commands have come."""
        target = len(self.arm.commands) + count
        self.graph.wait_for(lambda: len(self.arm.commands) >= target, f'{count} more commands')
