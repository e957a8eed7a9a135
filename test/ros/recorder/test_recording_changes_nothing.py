"""A recorded robot is commanded what an unrecorded one is: the real nodes in lock-step.

In real time no two runs are equal. Here `/clock` stands still until policy and executor have done
what is due, so that a run depends on nothing but its inputs; then a recorder is started beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import RELIABLE, SENSOR, Graph, graph
from paths import ROOT
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.ros.messages.conversions import (
    message_to_chunk,
    message_to_plan,
    ns_to_stamp,
    stamp_to_ns,
)
from vla_runtime.ros.messages.diagnostics import values_of
from vla_runtime.ros.robot.file import load_robot
from vla_runtime.tabletop.ros.messages import image_message, joint_state_message
from vla_runtime.tabletop.sim.arm import JOINT_NAMES
from vla_runtime.tabletop.sim.world import Tabletop

pytestmark = pytest.mark.graph

BUNDLE = ROOT / 'engines' / 'demo'
COMMANDS = '/arm/commands'
STEPS = 60
STEP_S = 0.025
STEP_NS = round(STEP_S * 1e9)
# A command is repeated while the clock stands; by then a request of its time has come too.
TICKS = 5
# Whoever waits, waits for this process.
PATIENT = {'max_state_age_s': 10.0, 'tick_timeout_s': 1.0, 'clock_jump_s': 10.0}
# Neither frames nor states of the step before are taken.
FRESH = {'max_observation_age_s': 0.012, 'sync_tolerance_s': 0.012}


@pytest.fixture(scope='module')
def robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tabletop robot with a controller whose commands are stamped."""
    text = (ROOT / 'config' / 'robots' / 'tabletop.yaml').read_text(encoding='utf-8')
    before, after = text.split('outputs:')[0], text[text.index('start: {') :]
    joints = ', '.join(JOINT_NAMES)
    output = f'outputs:\n  - {{kind: joint_state, topic: {COMMANDS[1:]}, joints: [{joints}]}}\n'
    path = tmp_path_factory.mktemp('robot') / 'tabletop.yaml'
    path.write_text(f'{before}{output}{after}', encoding='utf-8')
    return path


def given(**parameters: object) -> list[str]:
    return [word for name, value in parameters.items() for word in ('-p', f'{name}:={value}')]


class LockStep:
    """The tabletop world and the clock, one step at a time.

    Attributes:
        moves: stamp to the command that was in force.
        chunks: of the policy, in order.
    """

    def __init__(self, made: Graph, robot: Path) -> None:
        self.made = made
        self.cameras = load_robot(robot).cameras
        self.world = Tabletop(1.0 / STEP_S)
        self.world.reset(seed=3)
        self.now_ns = 1_700_000_000_000_000_000
        self.moves: dict[int, tuple[float, ...]] = {}
        self.ticks: dict[int, int] = {}
        self.answered: int | None = None
        node = made.node
        self.clock = node.create_publisher(Clock, '/clock', RELIABLE)
        self.states = node.create_publisher(JointState, '/joint_states', SENSOR)
        self.images = [
            (camera, node.create_publisher(Image, f'/{camera.topic}', RELIABLE))
            for camera in self.cameras
        ]
        self.plans = made.collect(JointTrajectory, '/committed_plan')
        self.chunks = made.collect(JointTrajectory, '/action_chunk')
        self.diagnostics = made.collect(DiagnosticArray, '/diagnostics')
        node.create_subscription(JointState, COMMANDS, self._on_command, RELIABLE)

    def _on_command(self, message: JointState) -> None:
        stamp_ns = stamp_to_ns(message.header.stamp)
        self.moves[stamp_ns] = tuple(message.position)
        self.ticks[stamp_ns] = self.ticks.get(stamp_ns, 0) + 1

    def value(self, status: str, name: str) -> str:
        """A value of a node's newest status; empty before the first."""
        for message in reversed(list(self.diagnostics)):
            for one in message.status:
                if one.name == status:
                    return values_of(one).get(name, '')
        return ''

    def tell(self) -> None:
        """Time and joints as they are, however often."""
        stamp = ns_to_stamp(self.now_ns)
        self.clock.publish(Clock(clock=stamp))
        state = self.world.state()
        message = joint_state_message(JOINT_NAMES, state.joint_rad, state.joint_rad_s, stamp)
        self.states.publish(message)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        self.made.wait_for(condition, what, meanwhile=self.tell)

    def wait_for_nodes(self, recorders: int) -> None:
        """Wait until policy, executor and so many recorders get what the robot sends."""
        nodes = [(self.states, 2), *((publisher, 1) for _, publisher in self.images)]
        self.wait_for(
            lambda: all(one.get_subscription_count() >= n + recorders for one, n in nodes),
            'the nodes to listen',
        )

    def answer(self) -> None:
        """Show the cameras until the open request is answered, and the answer is taken."""
        stamp, count = ns_to_stamp(self.now_ns), len(self.chunks)
        frames = [
            (publisher, image_message(camera, self.world.render(camera.name), stamp))
            for camera, publisher in self.images
        ]

        def show() -> None:
            self.tell()
            for publisher, message in frames:
                publisher.publish(message)

        self.made.wait_for(lambda: len(self.chunks) > count, 'a chunk', meanwhile=show)
        assert message_to_chunk(self.chunks[-1], step_time_s=0.05).stamp_ns == self.now_ns
        self.wait_for(
            lambda: self.value('/vla_executor: chunks', 'accepted') == str(count + 1),
            'the chunk to be taken',
        )

    def step(self) -> None:
        """The executor's commands of this time, an answer if it asked, then the next time."""
        self.wait_for(lambda: self.ticks.get(self.now_ns, 0) >= TICKS, 'commands of this time')
        request = message_to_plan(self.plans[-1]).request
        if request != self.answered:
            self.answer()
            self.answered = request
        self.world.step(np.array(self.moves[self.now_ns]))
        self.now_ns += STEP_NS


def drive(robot: Path, folder: Path | None) -> tuple[list[object], list[bytes]]:
    """Commands and chunks of a run; recorded to a folder, or not."""
    with graph() as made:
        simulated = given(use_sim_time='true', robot=robot)
        if folder is not None:
            recorder = made.start(
                'vla_runtime.ros.recorder.node', '--ros-args', *simulated, *given(folder=folder)
            )
        policy = given(bundle=BUNDLE, instruction='touch the red block', backend='torch', **FRESH)
        made.start(
            'vla_runtime.ros.policy.node',
            *('--ros-args', *simulated, *policy, *given(precision='float32', torch_threads=1)),
        )
        made.start(
            'vla_runtime.ros.executor.node',
            *('--ros-args', *simulated, *given(bundle=BUNDLE, replan_interval=8, **PATIENT)),
        )
        loop = LockStep(made, robot)
        for node in ('/vla_policy', '/vla_executor'):
            assert made.transition(node, 'configure')
            assert made.transition(node, 'activate')
        loop.wait_for_nodes(recorders=int(folder is not None))
        if folder is not None:
            found = lambda: loop.value('/vla_recorder: recording', 'policy_found') == 'true'  # noqa: E731
            loop.wait_for(found, 'the recorder to be found')
        start = lambda: made.call(Trigger, '/vla_executor/start', Trigger.Request()).success  # noqa: E731
        loop.wait_for(start, 'a start')
        loop.wait_for(lambda: loop.plans, 'a request')
        for _ in range(STEPS):
            loop.step()
        if folder is not None:
            assert recorder.stop() == 0
    return list(loop.moves.items()), [
        message_to_chunk(one, step_time_s=0.05).chunk.actions.tobytes() for one in loop.chunks
    ]


def test_commands_and_chunks_are_those_of_an_unrecorded_run(robot: Path, tmp_path: Path) -> None:
    commands, chunks = drive(robot, None)
    recorded_commands, recorded_chunks = drive(robot, tmp_path / 'bag')
    assert len(chunks) >= 5
    positions = np.array([command for _, command in commands])
    assert np.ptp(positions, axis=0).max() > 0.1
    assert recorded_chunks == chunks
    assert recorded_commands == commands
    reader = BagReader(tmp_path / 'bag')
    in_bag = {}
    for raw in reader.messages(lambda topic, _: topic == COMMANDS):
        message = reader.read(raw)
        in_bag[message.header.stamp.sec * 10**9 + message.header.stamp.nanosec] = tuple(
            message.position.tolist()
        )
    assert {stamp_ns: in_bag[stamp_ns] for stamp_ns, _ in commands} == dict(commands)
