"""The simulated robot as a process: what its drivers publish and its controllers obey."""

from __future__ import annotations

from time import monotonic

import numpy as np
import pytest
from builtin_interfaces.msg import Duration
from diagnostic_msgs.msg import DiagnosticArray
from graph import LATCHED, RELIABLE, SENSOR, graph
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.images import to_rgb
from vla_runtime.messages.trajectories import stamp_to_ns
from vla_tabletop.sim.world import JOINT_NAMES, Tabletop

pytestmark = pytest.mark.graph

MODULE = 'vla_tabletop.nodes.node'
ARM = list(JOINT_NAMES[:5])


class Bench:
    """The node and everything that it publishes."""

    def __init__(self, made) -> None:
        self.graph = made
        self.process = made.start(MODULE)
        self.states = made.collect(JointState, 'joint_states', SENSOR)
        self.front = made.collect(Image, 'front/image_raw', SENSOR)
        self.wrist = made.collect(Image, 'wrist/image_raw', SENSOR)
        self.reports = made.collect(DiagnosticArray, 'tabletop/report')
        node = made.node
        self.arm = node.create_publisher(
            JointTrajectory, 'arm_controller/joint_trajectory', RELIABLE
        )
        self.gripper = node.create_publisher(
            Float64MultiArray, 'gripper_controller/commands', RELIABLE
        )
        self.instruction = node.create_publisher(String, 'vla_policy/current_instruction', LATCHED)
        self._moved_s = 0.0
        made.wait_for(lambda: self.front and self.wrist and self.states, 'its first messages')

    def reset(self, seed: int, variant: str = 'still') -> str:
        assert self.graph.set_parameter('/tabletop', 'seed', seed).successful
        assert self.graph.set_parameter('/tabletop', 'variant', variant).successful
        response = self.graph.call(Trigger, '/tabletop/reset', Trigger.Request())
        assert response.success
        return response.message

    def next_state(self) -> JointState:
        # By its stamp: what was sent before a reset may arrive after the reset's answer.
        begin_ns = self.graph.node.get_clock().now().nanoseconds
        self.graph.wait_for(
            lambda: self.states and stamp_to_ns(self.states[-1].header.stamp) > begin_ns,
            'a joint state from now on',
        )
        return self.states[-1]

    def move(self, positions, seconds: float = 0.2) -> None:
        point = JointTrajectoryPoint(positions=[float(position) for position in positions])
        point.time_from_start = Duration(nanosec=round(seconds * 1e9))
        self.arm.publish(JointTrajectory(joint_names=ARM, points=[point]))

    def keep_moving(self, positions) -> None:
        """Command again what may have been lost.

        Not before it can be over: each trajectory begins anew where the arm is.
        """
        if monotonic() - self._moved_s > 1.0:
            self._moved_s = monotonic()
            self.move(positions)


@pytest.fixture(scope='module')
def bench():
    with graph() as made:
        yield Bench(made)


def test_joint_states_come_at_100_hz_and_images_at_15_hz_or_more(bench):
    def period_s(received, count: int) -> float:
        stamps = [stamp_to_ns(message.header.stamp) for message in list(received)[-count:]]
        return float(np.median(np.diff(stamps))) * 1e-9 if len(stamps) == count else np.inf

    # A machine that is busy at times renders fewer images then.
    bench.graph.wait_for(
        lambda: (
            period_s(bench.states, 150) == pytest.approx(0.01, rel=0.3)
            and period_s(bench.front, 20) <= 1.0 / 15.0
        ),
        'joint states at 100 Hz and images at 15 Hz',
    )


def test_images_are_rgb8_of_240_by_320_with_the_stamp_of_a_physics_tick(bench):
    bench.states.clear()
    bench.front.clear()
    bench.wrist.clear()
    bench.graph.wait_for(lambda: len(bench.front) > 5 and len(bench.wrist) > 5, 'images')
    for image in (bench.front[-1], bench.wrist[-1]):
        assert (image.encoding, image.height, image.width) == ('rgb8', 240, 320)
        assert np.ptp(to_rgb(image)) > 50

    # Joint states are best effort, so not each one arrives; a busy machine loses most at times.
    def shows_ticks() -> bool:
        ticks = {stamp_to_ns(state.header.stamp) for state in list(bench.states)}
        stamps = [stamp_to_ns(image.header.stamp) for image in bench.front[-7:-1]]
        return sum(stamp in ticks for stamp in stamps) >= len(stamps) / 2

    bench.graph.wait_for(shows_ticks, 'images with the stamps of joint states')


def test_reset_begins_the_scene_of_its_seed(bench):
    world = Tabletop()
    assert 'seed 5' in bench.reset(5)
    five = np.array(bench.next_state().position)
    assert np.allclose(five, world.reset(5).joint_rad, atol=0.01)
    bench.reset(6)
    six = np.array(bench.next_state().position)
    assert np.allclose(six, world.reset(6).joint_rad, atol=0.01)
    assert not np.allclose(five, six, atol=0.01)


def test_an_unknown_variant_is_refused_with_the_choice(bench):
    result = bench.graph.set_parameter('/tabletop', 'variant', 'upside_down')
    assert not result.successful
    assert 'camera_jitter' in result.reason


def test_a_trajectory_moves_the_arm_there_and_it_stays(bench):
    bench.reset(1)
    goal = np.array(bench.next_state().position[:5]) + np.array([0.3, 0.1, -0.1, 0.1, 0.2])

    def there():
        return np.allclose(bench.states[-1].position[:5], goal, atol=0.03)

    bench.graph.wait_for(there, 'the arm at its goal', meanwhile=lambda: bench.keep_moving(goal))
    # The sentinel: when the next instruction of this publisher is judged, it is still there.
    bench.reports.clear()
    bench.instruction.publish(String(data='paint the table'))
    bench.graph.wait_for(lambda: bench.reports, 'a verdict')
    assert there()


def test_the_gripper_obeys_its_own_topic(bench):
    bench.reset(1)
    bench.graph.wait_for(
        lambda: bench.states[-1].position[5] == pytest.approx(0.5, abs=0.05),
        'an open gripper',
        meanwhile=lambda: bench.gripper.publish(Float64MultiArray(data=[0.5])),
    )


@pytest.mark.parametrize('positions', [[0.1] * 4, [0.1, np.nan, 0.1, 0.1, 0.1]])
def test_a_bad_command_is_said_and_moves_nothing(bench, positions):
    bench.reset(2)
    before = np.array(bench.next_state().position)
    lines = bench.process.text().count('arm_controller')
    bench.graph.wait_for(
        lambda: bench.process.text().count('arm_controller') > lines,
        'the complaint',
        meanwhile=lambda: bench.move(positions),
    )
    assert np.allclose(bench.next_state().position, before, atol=0.01)


@pytest.mark.thorough
def test_an_instruction_is_judged_by_the_simulator(bench):
    bench.reset(3)
    bench.reports.clear()
    bench.instruction.publish(String(data='paint the table'))
    bench.graph.wait_for(lambda: bench.reports, 'a verdict')
    assert 'no task' in bench.reports[0].status[0].message
    bench.reports.clear()
    bench.instruction.publish(String(data='touch the red block'))
    bench.graph.wait_for(lambda: bench.reports, 'a verdict')
    verdict = values_of(bench.reports[0].status[0])
    assert (verdict['instruction'], verdict['outcome']) == ('touch the red block', 'timeout')
