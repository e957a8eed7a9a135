"""The executor drives a gripper through a real action server, beside an arm on a topic."""

from __future__ import annotations

import itertools
import re
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from action_msgs.srv import CancelGoal
from executor_bench import PATIENT_ROBOT, Arm, ExecutorProcess
from graph import Graph, graph
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.task import Future
from sensor_msgs.msg import JointState
from tabletop_policy import HORIZON
from thorough import thorough_but

from vla_runtime.messages.diagnostics import Level

pytestmark = pytest.mark.graph

ACTION = 'gripper_controller/gripper_cmd'
MISSING = (
    'control_msgs is not installed: sudo apt install ros-$ROS_DISTRO-control-msgs, or build it '
    'beside this project'
)
needs_control_msgs = pytest.mark.skipif(find_spec('control_msgs') is None, reason=MISSING)
# Of the joint's range of 0.8 rad.
DEADBAND = 0.008


def write_robot(folder, kind: str, command: str = ''):
    """The tabletop's file with its gripper behind an action."""
    text, count = re.subn(
        r'(name: gripper.*max_step: 0.8)\}', rf'\1, grips: true{command}}}', PATIENT_ROBOT
    )
    assert count == 1
    text, count = re.subn(
        r'kind: float64_multi_array\s+topic: \S+', f'kind: {kind}\n    topic: {ACTION}', text
    )
    assert count == 1
    file = folder / 'robot.yaml'
    file.write_text(text)
    return file


class Gripper:
    """An action server in front of a gripper that goes where it is told, at once.

    Attributes:
        goals: positions that were asked for, in order, refused ones too.
        names: joint names of the goals; empty where the action has none.
        efforts: of the goals.
        accepts: False: refuses every goal.
        hangs: True: a goal ends only when it is cancelled.
        object_at: position, in the command's unit, that it stops at on its way down; None: none.
    """

    def __init__(self, made: Graph, kind: str, namespace: str, arm: Arm, to_joint) -> None:
        from control_msgs import action

        self._parallel = kind == 'parallel_gripper_command'
        self._type = action.ParallelGripperCommand if self._parallel else action.GripperCommand
        self._arm, self._to_joint = arm, to_joint
        self.goals: list[float] = []
        self.names: list[list[str]] = []
        self.efforts: list[Any] = []
        self.accepts, self.hangs = True, False
        self.object_at: float | None = None
        self._held: list[tuple[Any, Future]] = []
        self.server = ActionServer(
            made.node,
            self._type,
            f'{namespace}/{ACTION}',
            self._execute,
            goal_callback=self._on_goal,
            cancel_callback=self._on_cancel,
        )

    def _on_goal(self, goal) -> GoalResponse:
        command = goal.command
        if self._parallel:
            self.goals.append(command.position[0])
            self.names.append(list(command.name))
            self.efforts.append(list(command.effort))
        else:
            self.goals.append(command.position)
            self.efforts.append(command.max_effort)
        return GoalResponse.ACCEPT if self.accepts else GoalResponse.REJECT

    def _on_cancel(self, handle) -> CancelResponse:
        for held, cancelled in self._held:
            if bytes(held.goal_id.uuid) == bytes(handle.goal_id.uuid):
                cancelled.set_result(True)
        return CancelResponse.ACCEPT

    async def _execute(self, handle):
        command = handle.request.command
        wanted = command.position[0] if self._parallel else command.position
        result = self._type.Result()
        if self.hangs:
            cancelled = Future()
            self._held.append((handle, cancelled))
            await cancelled
            handle.canceled()
            return result
        stalled = self.object_at is not None and wanted < self.object_at
        reached = self.object_at if stalled else wanted
        self._arm.positions[5] = self._to_joint(reached)
        if self._parallel:
            result.state = JointState(name=list(command.name), position=[reached])
        else:
            result.position = reached
        result.stalled, result.reached_goal = stalled, not stalled
        handle.succeed()
        return result


class Bench(ExecutorProcess):
    """One executor, its arm, and the gripper's server."""

    def __init__(self, made: Graph, bundle, robot, namespace: str) -> None:
        super().__init__(made, bundle, namespace, robot=robot)
        self.arm = Arm(made, namespace)
        self.said = made.collect(JointState, f'{namespace}/{ACTION}/goal')
        self._numbers = itertools.count(1)
        self._answered = 0

    def begin(self) -> None:
        assert self.graph.transition(self.node, 'configure')
        assert self.graph.transition(self.node, 'activate')

    def drive(self, gripper: float) -> None:
        """Answer a new request, if there is one: the arm rests, the gripper goes to a position."""
        if len(self.arm.plans) == self._answered:
            return
        self._answered = len(self.arm.plans)
        share = np.linspace(1.0 / HORIZON, 1.0, HORIZON)
        actions = np.tile(self.arm.positions, (HORIZON, 1))
        actions[:, 5] += share * (gripper - actions[0, 5])
        self.arm.answer(next(self._numbers), actions=actions)

    def wait_for(self, state: str, gripper: float | None, meanwhile=None):
        """Drive the gripper, or leave it, until its status says this; returns the status."""
        if gripper is not None:
            meanwhile = lambda: self.drive(gripper)  # noqa: E731
        return self.wait_for_status(
            f'a gripper that has {state}',
            lambda s: s['state'] == state,
            f'gripper {ACTION}',
            meanwhile,
        )


# Kind, words of the robot file, and the joint's position of a command: 0 to 0.8 rad is 40 to 0 mm.
KINDS = {
    'gripper_command': ('', lambda command: command),
    'parallel_gripper_command': (
        ', zero: 0.0, one: 0.8, command: {name: jaw, unit: mm, zero: 40.0, one: 0.0}',
        lambda command: 0.8 * (40.0 - command) / 40.0,
    ),
}


@needs_control_msgs
@pytest.mark.parametrize('kind', thorough_but(['parallel_gripper_command'], KINDS))
def test_a_gripper_behind_an_action_from_start_to_deactivation(bundle, tmp_path, kind):
    command, to_joint = KINDS[kind]
    to_command = (lambda position: position) if not command else (lambda p: 40.0 - 50.0 * p)
    with graph() as made:
        namespace = f'/{kind}'
        bench = Bench(made, bundle, write_robot(tmp_path, kind, command), namespace)
        arm = bench.arm
        try:
            bench.begin()

            # Without its server a start is refused, and names it.
            made.wait_for(
                lambda: (
                    (answer := bench.call('start')).message.count(ACTION) and not answer.success
                ),
                'a refusal that names the action',
            )
            gripper = Gripper(made, kind, namespace, arm, to_joint)
            made.wait_for(lambda: bench.call('start').success, 'a start')

            # The first goal is where the gripper is.
            made.wait_for(lambda: gripper.goals, 'the first goal')
            assert to_joint(gripper.goals[0]) == pytest.approx(0.2, abs=1e-6)

            # It follows the policy, and each goal differs from the one before.
            status = bench.wait_for('reached', 0.6)
            made.wait_for(
                lambda: abs(arm.positions[5] - 0.6) <= 0.02,
                'a closed gripper',
                meanwhile=lambda: bench.drive(0.6),
            )
            positions = np.array([to_joint(goal) for goal in gripper.goals])
            assert status['level'] == Level.OK
            assert np.all(np.abs(np.diff(positions)) > DEADBAND)
            if kind == 'parallel_gripper_command':
                assert {tuple(names) for names in gripper.names} == {('jaw',)}
                assert gripper.efforts[0] == []
            else:
                assert gripper.efforts[0] == 0.0

            # What rests is not asked for again: the arm's commands go on meanwhile.
            count, commands = len(gripper.goals), len(arm.commands)
            made.wait_for(lambda: len(arm.commands) > commands + 100, 'a hundred commands')
            assert len(gripper.goals) <= count + 1

            # A stall is reported, and no fault of a gripper that grips.
            opens = 0.1
            gripper.object_at = to_command(0.3) if not command else to_command(0.5)
            target = opens if not command else 0.75
            status = bench.wait_for('stalled', target)
            assert status['level'] == Level.OK
            assert float(status['stopped_at']) == pytest.approx(gripper.object_at)
            assert int(status['stalled']) >= 1
            gripper.object_at = None

            # A refusal is an error, and the same goal is taken later.
            gripper.accepts = False
            status = bench.wait_for('refused', 0.4)
            assert status['level'] == Level.ERROR
            gripper.accepts = True
            status = bench.wait_for('reached', 0.4)
            assert int(status['refused']) >= 1

            # Another client that cancels it is noticed.
            gripper.hangs = True
            bench.wait_for('moving', 0.55)
            cancel = f'{namespace}/{ACTION}/_action/cancel_goal'
            status = bench.wait_for(
                'taken_over', None, lambda: made.call(CancelGoal, cancel, CancelGoal.Request())
            )
            assert status['level'] == Level.WARN
            gripper.hangs = False

            # A server that goes and comes back is missed meanwhile, and needs no restart.
            gripper.server.destroy()
            status = bench.wait_for('no_server', 0.3)
            assert status['level'] == Level.ERROR
            former, gripper = gripper.goals, Gripper(made, kind, namespace, arm, to_joint)
            bench.wait_for('reached', 0.3)

            # The last goal is the hold, and what was asked for can be heard.
            assert made.transition(bench.node, 'deactivate')
            asked = former + gripper.goals
            made.wait_for(lambda: len(bench.said) >= len(asked), 'every goal')
            assert [one.position[0] for one in bench.said] == pytest.approx(asked)
            assert bench.process.running
        finally:
            arm.close()


@needs_control_msgs
def test_a_goal_that_never_ends_is_noticed_and_one_that_its_server_dropped_is_sent_again(
    bundle, tmp_path
):
    kind = 'gripper_command'
    with graph() as made:
        bench = Bench(made, bundle, write_robot(tmp_path, kind), '/dropped')
        gripper = Gripper(made, kind, '/dropped', bench.arm, lambda command: command)
        try:
            bench.begin()
            made.wait_for(lambda: bench.call('start').success, 'a start')
            bench.wait_for('reached', 0.4)

            # As a controller that is not active: it takes the goal, and nothing moves.
            gripper.hangs = True
            bench.wait_for('moving', 0.6)
            status = bench.wait_for('unended', None)
            assert status['level'] == Level.ERROR
            assert float(status['stopped_at']) == pytest.approx(bench.arm.positions[5], abs=0.01)

            # As one that is switched off and on: a new server, which knows nothing of the goal.
            former, gripper = gripper, Gripper(made, kind, '/dropped', bench.arm, lambda one: one)
            former.server.destroy()
            status = bench.wait_for('reached', None)
            assert int(status['forgotten']) + int(status['no_server']) >= 1
            assert gripper.goals == pytest.approx([former.goals[-1]])
        finally:
            bench.arm.close()


@pytest.mark.skipif(find_spec('control_msgs') is not None, reason='control_msgs is installed')
def test_configuring_without_control_msgs_says_what_to_install(bundle, tmp_path):
    robot = write_robot(tmp_path, 'gripper_command')
    with graph() as made:
        bench = Bench(made, bundle, robot, '/missing')
        try:
            assert not made.transition(bench.node, 'configure')
            made.wait_for(lambda: 'control-msgs' in bench.process.text(), 'the words')
            assert 'outputs[1].kind' in bench.process.text()
            assert 'sudo apt install ros-$ROS_DISTRO-control-msgs' in bench.process.text()
        finally:
            bench.arm.close()
