"""Tasks for real: the task node with policy, executor and the simulated robot as processes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from action_msgs.msg import GoalStatus
from graph import Graph, graph
from paths import ROOT
from rclpy.action import ActionClient
from std_srvs.srv import Trigger
from tabletop_policy import write_tabletop_policy
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.trajectories import typed_messages
from vla_runtime.nodes.task.progress import Outcome
from vla_runtime.robot.file import load_robot

pytestmark = [
    pytest.mark.graph,
    pytest.mark.skipif(
        typed_messages() is None,
        reason='vla_interfaces is not built: no C++ compiler, or not set up by ./run',
    ),
]

ROBOT = ROOT / 'config' / 'robots' / 'tabletop.yaml'
PAGE = ROOT / 'docs' / 'howto' / 'tasks.md'
RATE_HZ = 100.0
FIRST, SECOND = 'touch the red block', 'touch the blue block'
# A busy machine must not look like a fault here.
PATIENT = ('-p', 'max_state_age_s:=2.0', '-p', 'tick_timeout_s:=1.0', '-p', 'clock_jump_s:=5.0')


class Sent:
    """A goal that was accepted, what is fed back, and its result."""

    def __init__(self, handle: Any, feedback: list[Any], future: Any) -> None:
        self.handle, self.feedback, self.future = handle, feedback, future

    @property
    def phases(self) -> list[str]:
        """Phases in their order, each once."""
        return list(dict.fromkeys(one.phase for one in list(self.feedback)))


class Robot:
    """All four processes, and the client of a test.

    Attributes:
        states: of the executor.
        commands: to the arm's controller.
    """

    def __init__(self, made: Graph, bundle: Path) -> None:
        from vla_interfaces.action import RunPolicy

        self.graph, self.bundle, self._action = made, bundle, RunPolicy
        robot = bundle.parent / 'patient.yaml'
        text = ROBOT.read_text(encoding='utf-8')
        robot.write_text(f'{text}\nrestart_after_outage_s: 600.0\n', encoding='utf-8')
        self._files = ('-p', f'bundle:={bundle}', '-p', f'robot:={robot}', '-p', 'autostart:=true')
        made.start('vla_tabletop.nodes.node')
        self.policy = made.start(
            'vla_runtime.nodes.policy.node',
            '--ros-args',
            *self._files,
            *('-p', 'max_observation_age_s:=2.0', '-p', 'torch_threads:=1'),
        )
        self.executor = self.start_executor()
        self.tasks = made.start('vla_runtime.nodes.task.node')
        self.states = made.collect(typed_messages().ExecutorState, 'vla_executor/state')
        self.policy_states = made.collect(typed_messages().PolicyState, 'vla_policy/state')
        self.commands = made.collect(JointTrajectory, 'arm_controller/joint_trajectory')
        self._client = self.new_client()
        made.wait_for(self._client.server_is_ready, 'the action')
        made.wait_for(lambda: self.mode == 'idle', 'an active executor')
        made.wait_for(
            lambda: self.policy_states and self.policy_states[-1].lifecycle == 'active',
            'an active policy',
        )
        # Once images and joint states are there it starts.
        self.wait_until_ready()

    def start_executor(self) -> Any:
        return self.graph.start(
            'vla_runtime.nodes.executor.node', '--ros-args', *self._files, *PATIENT
        )

    def new_client(self) -> ActionClient:
        return ActionClient(self.graph.node, self._action, 'vla_task/run_policy')

    def wait_until_ready(self) -> None:
        from vla_interfaces.srv import SetInstruction

        request = SetInstruction.Request(instruction=FIRST)
        assert self.graph.call(SetInstruction, 'vla_policy/set_instruction', request).success
        self.graph.wait_for(
            lambda: not self.policy_states[-1].missing and not self.states[-1].start_refused,
            'a robot that can be started',
        )

    @property
    def mode(self) -> str:
        return self.states[-1].mode if self.states else ''

    def send(self, instruction: str, time_limit_s: int = 0, **fields: Any) -> Sent:
        goal = self._action.Goal(instruction=instruction, **fields)
        goal.time_limit.sec = time_limit_s
        feedback: list[Any] = []
        future = self.graph.in_spin(
            lambda: self._client.send_goal_async(
                goal, feedback_callback=lambda message: feedback.append(message.feedback)
            )
        )
        handle = self.graph.wait_for(lambda: future.result() if future.done() else None, 'a goal')
        assert handle.accepted
        return Sent(handle, feedback, self.graph.in_spin(handle.get_result_async))

    def run(self, instruction: str, **goal: Any) -> Sent:
        """Send a goal and wait until it moves the robot."""
        sent = self.send(instruction, **goal)
        self.graph.wait_for(
            lambda: (
                any(f.phase == 'running' and f.chunk >= 0 for f in list(sent.feedback))
                or sent.future.done()
            ),
            'motion',
        )
        assert not sent.future.done(), sent.future.result()
        return sent

    def result(self, sent: Sent) -> tuple[int, Any]:
        answer = self.graph.wait_for(
            lambda: sent.future.result() if sent.future.done() else None, 'a result'
        )
        return answer.status, answer.result

    def call(self, name: str) -> Any:
        return self.graph.call(Trigger, name, Trigger.Request())

    def wait_for_stop(self) -> None:
        self.graph.wait_for(lambda: self.mode == 'stopped', 'a stopped robot')


@pytest.fixture(scope='module')
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robot]:
    bundle = write_tabletop_policy(tmp_path_factory.mktemp('task') / 'tabletop')
    with graph() as made:
        yield Robot(made, bundle)


@pytest.fixture
def robot(started: Robot) -> Iterator[Robot]:
    yield started
    started.call('vla_executor/stop')
    started.commands.clear()
    started.states.clear()
    started.graph.wait_for(lambda: started.states, 'a state')


@pytest.mark.parametrize('succeeds', [False, True])
def test_a_task_runs_until_its_time_is_over_and_the_robot_is_stopped_then(
    robot: Robot, succeeds: bool
) -> None:
    sent = robot.run(FIRST, time_limit_s=6, time_limit_succeeds=succeeds)
    status, result = robot.result(sent)
    assert result.outcome == (Outcome.TIME_OVER if succeeds else Outcome.TIMED_OUT)
    assert (status == GoalStatus.STATUS_SUCCEEDED) is succeeds
    assert result.chunks > 0 and result.seconds >= 6.0
    order = [phase for phase in sent.phases if phase != 'holding']
    assert order == ['starting', 'running', 'stopping']
    robot.wait_for_stop()


def test_a_cancelled_task_brakes_within_the_limits(robot: Robot) -> None:
    sent = robot.run(FIRST)
    sent.handle.cancel_goal_async()
    status, result = robot.result(sent)
    assert (status, result.outcome) == (GoalStatus.STATUS_CANCELED, Outcome.CANCELED)
    robot.wait_for_stop()
    joints = load_robot(ROBOT).joints[:5]
    fastest = np.array([joint.velocity for joint in joints], dtype=float)
    # A late tick moves no further than one and a half periods allow.
    longest = 1.5 * fastest / RATE_HZ + 1e-6
    for message in list(robot.commands):
        way = np.ptp([point.positions for point in message.points], axis=0)
        assert (way <= longest).all(), (way, longest)


def test_a_new_goal_takes_over_without_a_stop(robot: Robot) -> None:
    first = robot.run(FIRST)
    robot.states.clear()
    second = robot.run(SECOND)
    assert robot.result(first)[1].outcome == Outcome.PREEMPTED
    assert {state.mode for state in robot.states} == {'running'}
    robot.graph.wait_for(
        lambda: robot.policy_states[-1].instruction == SECOND, 'the second instruction'
    )
    second.handle.cancel_goal_async()
    assert robot.result(second)[1].outcome == Outcome.CANCELED


def test_queued_tasks_follow_each_other_without_a_stop(robot: Robot) -> None:
    first = robot.run(FIRST)
    second = robot.send(SECOND, enqueue=True)
    robot.graph.wait_for(lambda: second.phases == ['queued'], 'a task in the queue')
    robot.states.clear()
    assert robot.call('vla_task/next').success
    status, result = robot.result(first)
    assert (status, result.outcome) == (GoalStatus.STATUS_SUCCEEDED, Outcome.ENDED_BY_NEXT)
    robot.graph.wait_for(lambda: 'running' in second.phases, 'the second task')
    assert {state.mode for state in robot.states} == {'running'}
    assert robot.call('vla_task/next').success
    assert robot.result(second)[1].outcome == Outcome.ENDED_BY_NEXT
    robot.wait_for_stop()
    assert not robot.call('vla_task/next').success


def test_a_plan_that_rests_ends_a_task_that_says_so(robot: Robot) -> None:
    goal = {'rest_tolerance': 100.0}
    sent = robot.send(FIRST, **goal, rest_duration=_duration(2))
    status, result = robot.result(sent)
    assert (status, result.outcome) == (GoalStatus.STATUS_SUCCEEDED, Outcome.AT_REST)


def test_a_robot_that_somebody_stops_is_not_started_again(robot: Robot) -> None:
    sent = robot.run(FIRST)
    waiting = robot.send(SECOND, enqueue=True)
    assert robot.call('vla_executor/stop').success
    for one in (sent, waiting):
        status, result = robot.result(one)
        assert (status, result.outcome) == (GoalStatus.STATUS_ABORTED, Outcome.STOPPED)
    # The sentinel: a task that is told to comes next, and runs.
    robot.states.clear()
    robot.graph.wait_for(lambda: len(robot.states) > 5, 'a second of states')
    assert {state.mode for state in robot.states} == {'stopped'}


def test_the_executors_state_tells_what_binds_and_how_late_chunks_are(robot: Robot) -> None:
    sent = robot.run(FIRST)
    state = robot.graph.wait_for(
        lambda: next((one for one in reversed(robot.states) if one.reason == 'tracking'), None),
        'a state in motion',
    )
    assert (state.replan_interval, state.max_open_requests) == (8, 1)
    assert state.observation_age_s > 0.0 and state.commands > 0 and not state.dry_run
    assert [one.name for one in state.inputs] == ['/joint_states']
    assert {one.joint for one in state.limits} <= {j.name for j in load_robot(ROBOT).joints}
    sent.handle.cancel_goal_async()
    robot.result(sent)


def example_client(tmp_path: Path) -> Path:
    """The client that the page shows."""
    (code,) = re.findall(r'```python\n(import sys\n.*?)```', PAGE.read_text(), re.DOTALL)
    file = tmp_path / 'tell_robot.py'
    file.write_text(code)
    return file


def start_client(robot: Robot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv('PYTHONPATH', str(example_client(tmp_path).parent))
    client = robot.graph.start('tell_robot', FIRST)
    robot.graph.wait_for(lambda: 'running' in client.text(), 'feedback to the client')
    return client


def test_the_pages_client_cancels_at_ctrl_c(
    robot: Robot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_client(robot, tmp_path, monkeypatch)
    assert client.stop(signal.SIGINT) == 0
    assert 'canceled by its client' in client.text()
    robot.wait_for_stop()


def test_a_client_that_dies_stops_the_robot(
    robot: Robot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_client(robot, tmp_path, monkeypatch)
    # This test's own client listens to the feedback too.
    robot._client.destroy()
    client.stop(signal.SIGKILL)
    robot.wait_for_stop()
    robot.graph.wait_for(lambda: 'client_lost' in robot.tasks.text(), 'the end of the task')
    robot._client = robot.new_client()
    robot.graph.wait_for(robot._client.server_is_ready, 'the action')


def test_an_executor_that_dies_ends_the_task_and_its_successor_stands(robot: Robot) -> None:
    sent = robot.run(FIRST)
    robot.executor.stop(signal.SIGKILL)
    status, result = robot.result(sent)
    assert (status, result.outcome) == (GoalStatus.STATUS_ABORTED, Outcome.EXECUTOR_LOST)
    robot.states.clear()
    robot.commands.clear()
    robot.executor = robot.start_executor()
    robot.graph.wait_for(lambda: robot.mode == 'idle', 'an active executor')
    robot.wait_until_ready()
    # Nobody starts it but the next goal.
    assert robot.mode == 'idle' and not robot.commands
    robot.run(SECOND)


def test_a_policy_that_dies_ends_the_task_and_stops_the_robot(robot: Robot) -> None:
    sent = robot.run(FIRST)
    robot.policy.stop(signal.SIGKILL)
    status, result = robot.result(sent)
    assert (status, result.outcome) == (GoalStatus.STATUS_ABORTED, Outcome.POLICY_LOST)
    robot.wait_for_stop()


def _duration(seconds: int) -> Any:
    from builtin_interfaces.msg import Duration

    return Duration(sec=seconds)
