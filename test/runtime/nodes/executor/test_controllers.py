"""The executor hears what a controller of ros2_control says about itself, on a real graph."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec

import numpy as np
import pytest
from action_msgs.msg import GoalStatus, GoalStatusArray
from executor_bench import HOME, PATIENT_ROBOT, Arm, ExecutorProcess, start
from graph import LATCHED, RELIABLE, Graph, graph
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from std_msgs.msg import Float64
from std_srvs.srv import Trigger
from tabletop_policy import write_tabletop_policy
from trajectory_controller import TrajectoryController
from trajectory_msgs.msg import JointTrajectory
from velocity_robot import VelocityRobot, write_velocity_robot

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import ns_to_stamp, stamp_to_ns
from vla_tabletop.sim.world import JOINT_NAMES

pytestmark = pytest.mark.graph

JOINTS = list(JOINT_NAMES[:5])
needs_control_msgs = pytest.mark.skipif(
    find_spec('control_msgs') is None,
    reason='control_msgs is not installed: sudo apt install ros-$ROS_DISTRO-control-msgs',
)


class Controller:
    """`arm_controller` as a node: parameters, state, and an arm that is where it commands.

    Attributes:
        rules: its rules.
    """

    def __init__(
        self, made: Graph, namespace: str, arm: Arm, joints=JOINTS, **parameters: object
    ) -> None:
        self.rules = TrajectoryController(joints, 0.004, HOME[:5].copy())
        self._arm = arm
        self._node = Node('arm_controller', namespace=namespace, context=made.node.context)
        given = {
            'joints': joints,
            'interpolation_method': 'splines',
            'allow_partial_joints_goal': False,
            'update_rate': 250,
            **parameters,
        }
        for name, value in given.items():
            self._node.declare_parameter(name, value)
        self._node.create_subscription(
            JointTrajectory, f'{namespace}/arm_controller/joint_trajectory', self._take, RELIABLE
        )
        self._states = None
        if find_spec('control_msgs') is not None:
            from control_msgs.msg import JointTrajectoryControllerState

            self._state_type = JointTrajectoryControllerState
            self._states = self._node.create_publisher(
                self._state_type, f'{namespace}/arm_controller/controller_state', 10
            )
        self._executor = SingleThreadedExecutor(context=made.node.context)
        self._executor.add_node(self._node)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._spin, self._cycle)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._node.destroy_node()

    def switch(self, *, on: bool) -> None:
        with self._lock:
            self.rules.switch(on=on)

    def _spin(self) -> None:
        while not self._stop.is_set():
            self._executor.spin_once(timeout_sec=0.1)

    def _now_s(self) -> float:
        return self._node.get_clock().now().nanoseconds * 1e-9

    def _take(self, message: JointTrajectory) -> None:
        with self._lock:
            self.rules.take(message, self._now_s())

    def _cycle(self) -> None:
        earlier_s = self._now_s()
        while not self._stop.wait(self.rules.period_s):
            with self._lock:
                now_s = self._now_s()
                output = self.rules.update(now_s, now_s - earlier_s).copy()
                earlier_s, self.rules.measured = now_s, output
                active = self.rules.active
            self._arm.positions[:5] = output
            if active and self._states is not None:
                self._publish(now_s)

    def _publish(self, now_s: float) -> None:
        state = self._state_type(joint_names=list(self.rules.joints))
        state.header.stamp = ns_to_stamp(round(now_s * 1e9))
        state.reference.positions = self.rules.reference.tolist()
        state.feedback.positions = self.rules.measured.tolist()
        state.error.positions = (self.rules.reference - self.rules.measured).tolist()
        self._states.publish(state)


class Bench(ExecutorProcess):
    """One executor in a namespace of its own, its arm and the arm's controller."""

    def __init__(self, made: Graph, bundle, folder, namespace: str, more='', **controller) -> None:
        robot = folder / f'{namespace.strip("/")}.yaml'
        robot.write_text(f'{PATIENT_ROBOT}\n{more}\n')
        super().__init__(made, bundle, namespace, robot=robot)
        self.arm = Arm(made, namespace)
        # Its controller moves it, not the messages.
        self.arm.follows = False
        self.controller = Controller(made, namespace, self.arm, **controller)
        self.scaling = made.node.create_publisher(Float64, f'{namespace}/speed_scaling', 10)
        assert made.transition(self.node, 'configure')
        assert made.transition(self.node, 'activate')

    def close(self) -> None:
        self.controller.close()
        self.arm.close()
        self.process.stop()

    def start(self) -> None:
        self.graph.wait_for(lambda: self.call('start').success, 'a start')
        self.graph.wait_for(lambda: self.arm.plans, 'a request')

    def counts_after(self, stamp_ns: int, count: int) -> list[str]:
        """Wait for statuses from after a time; return how many commands had been sent at each."""

        def found() -> list[str]:
            return [
                values_of(status)['sent']
                for message in list(self.diagnostics)
                if stamp_to_ns(message.header.stamp) > stamp_ns
                for status in message.status
                if status.name == f'{self.node}: control'
            ]

        return self.graph.wait_for(lambda: len(found()) >= count and found(), 'statuses')

    def wait_for_reason(self, reason: str):
        return self.wait_for_status(f'reason {reason}', lambda s: s['reason'] == reason)

    def refusal(self, word: str) -> str:
        """Call `~/start` until it is refused with a text that has this word."""

        def refused() -> str:
            answer = self.call('start')
            return '' if answer.success or word not in answer.message else answer.message

        return self.graph.wait_for(refused, f'a refusal with {word}')

    def points(self) -> int:
        return len(self.arm.commands[-1].points)


@pytest.fixture(scope='module')
def made():
    with graph() as one:
        yield one


@pytest.fixture
def bench(made, bundle, tmp_path):
    benches = []

    def make(namespace: str, more: str = '', **controller) -> Bench:
        benches.append(Bench(made, bundle, tmp_path, namespace, more, **controller))
        return benches[-1]

    yield make
    for one in benches:
        one.close()


def test_a_controller_that_would_refuse_its_joints_is_named_at_start(bench):
    one = bench('/joints', joints=[*JOINTS, 'seventh'])
    text = one.refusal('/joints/arm_controller')
    assert 'seventh' in text and 'arm_controller/joint_trajectory' in text
    # A dry run is told of it too, and goes on.
    assert one.graph.set_parameter(one.node, 'dry_run', True).successful
    answer = one.graph.wait_for(
        lambda: (said := one.call('start')).success and 'seventh' in said.message and said,
        'a start that names the controller',
    )
    assert '/joints/arm_controller' in answer.message


@pytest.mark.skipif(
    find_spec('control_msgs') is not None or find_spec('controller_manager_msgs') is not None,
    reason='the messages of ros2_control are installed',
)
def test_controllers_that_cannot_be_watched_are_warned_of_with_the_packages(bench, made):
    one = bench('/blind')
    one.start()
    assert 'controller-manager-msgs' not in one.process.output()
    states = made.node.create_publisher(Float64, '/blind/arm_controller/controller_state', 10)
    manager = made.node.create_service(
        Trigger, '/blind/controller_manager/list_controllers', lambda _, answer: answer
    )
    try:
        one.graph.wait_for(
            lambda: (
                one.call('start').success
                and 'ros-$ROS_DISTRO-control-msgs ros-$ROS_DISTRO-controller-manager-msgs'
                in one.process.output()
            ),
            'a warning',
        )
    finally:
        made.node.destroy_publisher(states)
        made.node.destroy_service(manager)


def test_a_controller_that_allows_some_of_its_joints_is_started_and_steps_are_warned_of(bench):
    joints = {'joints': [*JOINTS, 'seventh'], 'allow_partial_joints_goal': True}
    one = bench('/partial', interpolation_method='none', **joints)
    one.start()
    one.wait_for_status('a warning', lambda s: 'interpolation_method' in s['text'])


def test_a_trajectory_controller_is_sent_the_delayed_way_and_follows_it(bench, made):
    one = bench('/way')
    one.start()
    one.graph.wait_for(lambda: one.arm.commands and one.points() > 2, 'the delayed way')
    one.arm.answer(1, rise_rad=0.02)
    at = HOME[:5].copy()
    one.graph.wait_for(
        lambda: (np.abs(one.controller.rules.output - at) > 0.1).all(), 'an arm that follows'
    )
    # A stop answers when nothing is sent any more.
    assert one.call('stop').success
    counts = one.counts_after(made.node.get_clock().now().nanoseconds, 4)
    assert len(set(counts)) == 1
    one.graph.wait_for(
        lambda: np.allclose(
            one.controller.rules.output, one.arm.commands[-1].points[-1].positions, atol=1e-6
        ),
        'an arm that stands where the last command is',
    )
    assert one.controller.rules.refused == 0
    # One that rests already answers as well, and nothing is sent for it.
    assert one.call('stop').success and one.call('release').success
    assert one.counts_after(made.node.get_clock().now().nanoseconds, 2)[-1] == counts[0]


def test_speed_scaling_slows_the_plan_down_and_holds_it_at_zero(bench):
    one = bench('/scaled', 'speed_scaling: {topic: speed_scaling, full: 100.0}\n')
    stop = threading.Event()
    percent = [0.0]

    def say() -> None:
        while not stop.wait(0.01):
            one.scaling.publish(Float64(data=percent[0]))

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        one.start()
        one.wait_for_reason('speed_scaled_to_zero')
        one.arm.answer(1, rise_rad=0.02)
        one.wait_for_status('a chunk', lambda s: s['pending_chunk'] != '-1')
        assert np.allclose(one.controller.rules.output, HOME[:5], atol=1e-6)
        # From before the motion on: what is heard late makes this longer, never shorter.
        begun_s, percent[0] = time.monotonic(), 25.0
        one.graph.wait_for(
            lambda: (np.abs(one.controller.rules.output - HOME[:5]) > 0.08).all(), 'motion'
        )
        # A full step of 0.02 rad takes four times 0.05 s.
        assert time.monotonic() - begun_s > 0.08 / 0.02 * 0.05 / 0.25 * 0.9
        one.wait_for_reason('tracking')
        percent[0] = 0.0
        one.wait_for_reason('speed_scaled_to_zero')
    finally:
        stop.set()
        thread.join()


def test_a_start_amid_the_goal_of_another_node_is_refused_with_its_name(bench, made):
    one = bench('/amid')
    action = '/amid/arm_controller/follow_joint_trajectory'
    statuses = made.node.create_publisher(GoalStatusArray, f'{action}/_action/status', LATCHED)

    def say(status: int) -> None:
        said = GoalStatus(status=status)
        said.goal_info.goal_id.uuid[0] = 7
        statuses.publish(GoalStatusArray(status_list=[said]))

    say(GoalStatus.STATUS_EXECUTING)
    text = one.refusal('carries out a goal')
    assert '/amid/arm_controller' in text and action in text
    assert not one.arm.commands
    say(GoalStatus.STATUS_SUCCEEDED)
    one.graph.wait_for(lambda: one.call('start').success, 'a start after the goal')
    # A goal that comes while commands are sent is replaced by them: it is no reason.
    say(GoalStatus.STATUS_EXECUTING)
    sent = len(one.arm.commands)
    one.graph.wait_for(lambda: len(one.arm.commands) > sent + 20, 'commands')
    assert one.call('stop').success
    one.graph.wait_for(lambda: one.call('start').success, 'a start after the stop')


def test_a_controller_that_takes_velocities_for_something_else_is_refused(made, tmp_path):
    namespace = '/takes_effort'
    bundle = write_tabletop_policy(tmp_path / 'rates', velocities=True)
    robot, arm = write_velocity_robot(tmp_path / 'rates.yaml'), VelocityRobot(made, namespace)
    controller = Node('arm', namespace=namespace, context=made.node.context)
    controller.declare_parameter('interface_name', 'effort')
    spinning = SingleThreadedExecutor(context=made.node.context)
    spinning.add_node(controller)
    thread = threading.Thread(target=spinning.spin, daemon=True)
    thread.start()
    node = f'{namespace}/vla_executor'
    process = start(made, bundle, '-r', f'__ns:={namespace}', robot=robot, name=node)

    def refused() -> bool:
        # Until the controller is discovered only a start can find out.
        if not made.transition(node, 'configure'):
            return True
        assert made.transition(node, 'activate')
        assert not made.call(Trigger, f'{node}/start', Trigger.Request()).success
        assert made.transition(node, 'deactivate') and made.transition(node, 'cleanup')
        return False

    try:
        made.wait_for(refused, 'a refused transition')
        # What a process says comes by another way than its answers.
        made.wait_for(lambda: 'configure failed' in process.text(), 'the reason')
        (said,) = [line for line in process.text().splitlines() if 'configure failed' in line]
        assert f'{namespace}/arm' in said and 'interface_name: effort' in said
        assert "'arm/rates'" in said and 'interface: velocity' in said
        assert not arm.arm
    finally:
        process.stop()
        spinning.shutdown()
        thread.join()
        controller.destroy_node()


@needs_control_msgs
def test_a_controllers_state_tells_its_clock_and_whether_it_is_active(bench):
    """What follows on it is in `test_returning_controller` and on the core."""
    one = bench('/inactive')
    one.controller.switch(on=False)
    assert '/inactive/arm_controller' in one.refusal('not active')
    one.controller.switch(on=True)
    one.start()
    # On the same clock it is sent stamps.
    one.graph.wait_for(
        lambda: one.arm.commands and one.arm.commands[-1].header.stamp.sec > 0, 'a stamp'
    )
    one.controller.switch(on=False)
    status = one.wait_for_reason('controller')
    assert '/inactive/arm_controller' in status['detail'] and status['mode'] == 'stopped'
    one.controller.switch(on=True)
    one.start()
