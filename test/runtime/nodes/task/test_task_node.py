"""The task node against an executor and a policy that a test holds in its hand.

They are nodes of the test's own process, so that an answer can be late and a state can be old.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import rclpy
from action_msgs.msg import GoalStatus
from graph import Graph, graph
from rclpy.action import ActionClient
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.executors import ExternalShutdownException, MultiThreadedExecutor
from rclpy.node import Node
from std_srvs.srv import Trigger

from vla_runtime.messages.trajectories import typed_messages
from vla_runtime.nodes.qos import RELIABLE
from vla_runtime.nodes.task.progress import EXECUTOR_SILENT_S, Outcome

pytestmark = [
    pytest.mark.graph,
    pytest.mark.skipif(
        typed_messages() is None,
        reason='vla_interfaces is not built: no C++ compiler, or not set up by ./run',
    ),
]

STATES_HZ = 20


class Robot:
    """Executor and policy node, as a task node sees them.

    Attributes:
        calls: of the executor's services that were carried out, in their order.
        asked: the same, from the moment at which they were asked.
        answers: by the name of a service: cleared, its calls wait to be carried out.
        speaks: the executor publishes its state; `spoken` counts them.
        refuses_resume: what `~/resume` answers, empty where it resumes.
    """

    def __init__(self) -> None:
        from vla_interfaces.srv import SetInstruction

        self.context = rclpy.Context()
        rclpy.init(context=self.context)
        self.node = Node('fake', context=self.context)
        self.calls: list[str] = []
        self.asked: list[str] = []
        self.answers = {name: threading.Event() for name in ('start', 'stop', 'resume')}
        self.stand()
        self.speaks, self.spoken = True, 0
        self.episode, self.outcome, self.refuses_resume = 1, '', ''
        for event in self.answers.values():
            event.set()
        group = ReentrantCallbackGroup()
        typed = typed_messages()
        self._state, self._policy_state = typed.ExecutorState, typed.PolicyState
        self._states = self.node.create_publisher(self._state, 'vla_executor/state', RELIABLE)
        self._policy = self.node.create_publisher(self._policy_state, 'vla_policy/state', RELIABLE)
        for name in self.answers:
            call = self._service(name)
            self.node.create_service(Trigger, f'vla_executor/{name}', call, callback_group=group)
        self.node.create_service(
            SetInstruction,
            'vla_policy/set_instruction',
            lambda _, response: _succeed(response),
            callback_group=group,
        )
        self.node.create_timer(1.0 / STATES_HZ, self._speak, callback_group=group)
        self._executor = MultiThreadedExecutor(6, context=self.context)
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        with suppress(ExternalShutdownException):
            self._executor.spin()

    def stand(self, mode: str = 'stopped') -> None:
        self.mode, self.reason, self.driver = mode, 'stopped', 'nobody'

    def drive(self) -> None:
        self.mode, self.reason, self.driver = 'running', 'tracking', 'policy'

    def pause(self, reason: str = 'paused') -> None:
        self.mode, self.reason, self.driver = 'running', reason, 'nobody'

    def judge(self, outcome: str) -> None:
        self.outcome = outcome
        self.pause()

    def _speak(self) -> None:
        self._policy.publish(self._policy_state(lifecycle='active'))
        if self.speaks:
            self._states.publish(
                self._state(
                    mode=self.mode,
                    reason=self.reason,
                    text=f'{self.mode} {self.reason}',
                    driver=self.driver,
                    episode=self.episode,
                    episode_outcome=self.outcome,
                )
            )
        self.spoken += 1

    def _service(self, name: str) -> Any:
        def call(_: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
            self.asked.append(name)
            self.answers[name].wait()
            if name == 'resume' and self.refuses_resume:
                response.message = self.refuses_resume
                return response
            if name == 'stop':
                self.stand()
            else:
                if self.outcome:
                    self.episode, self.outcome = self.episode + 1, ''
                self.drive()
            self.calls.append(name)
            return _succeed(response)

        return call

    def close(self) -> None:
        for event in self.answers.values():
            event.set()
        self._executor.shutdown()
        self._thread.join()
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)


def _succeed(response: Any) -> Any:
    response.success = True
    return response


class Client:
    """Sends goals to a task node that runs as a process."""

    def __init__(self, made: Graph, robot: Robot) -> None:
        from vla_interfaces.action import RunPolicy

        self.graph, self.robot, self._action = made, robot, RunPolicy
        self.start()

    def start(self) -> None:
        self.tasks = self.graph.start('vla_runtime.nodes.task.node')
        self._client = ActionClient(self.graph.node, self._action, 'vla_task/run_policy')
        self.graph.wait_for(self._client.server_is_ready, 'the action')

    def send(self, **goal: Any) -> Sent:
        (sent,) = self.accepted(self.ask(goal))
        return sent

    def ask(self, *goals: dict[str, Any]) -> list[tuple[Any, list[Any]]]:
        """Send goals, and wait for no answer: of each a future, and a list for its feedback."""
        asked = []
        for goal in goals:
            feedback: list[Any] = []
            future = self.graph.in_spin(partial(self._send, goal, feedback))
            asked.append((future, feedback))
        return asked

    def _send(self, goal: dict[str, Any], feedback: list[Any]) -> Any:
        return self._client.send_goal_async(
            self._action.Goal(**goal),
            feedback_callback=lambda message: feedback.append(message.feedback),
        )

    def accepted(self, asked: list[tuple[Any, list[Any]]]) -> list[Sent]:
        sent = []
        for future, feedback in asked:
            handle = self.graph.wait_for(lambda one=future: one.done() and one.result(), 'a goal')
            assert handle.accepted
            sent.append(Sent(self, handle, feedback))
        return sent

    def run(self, **goal: Any) -> Sent:
        sent = self.send(**goal)
        sent.wait_for_phase('running')
        return sent

    def hear_states(self, seconds: float = 0.5) -> None:
        """Wait until the robot has spoken for so long."""
        until = self.robot.spoken + round(seconds * STATES_HZ)
        self.graph.wait_for(lambda: self.robot.spoken >= until, 'states')


class Sent:
    """A goal that was accepted."""

    def __init__(self, client: Client, handle: Any, feedback: list[Any]) -> None:
        self.client, self.handle, self.feedback = client, handle, feedback
        self._future = client.graph.in_spin(handle.get_result_async)

    @property
    def over(self) -> bool:
        return bool(self._future.done())

    def wait_for_phase(self, phase: str) -> None:
        self.client.graph.wait_for(
            lambda: self.over or any(one.phase == phase for one in list(self.feedback)), phase
        )
        assert not self.over, self._future.result()

    def wait_for_news(self) -> None:
        """Wait until the task node has looked at what the robot says now."""
        self.client.hear_states()
        self.feedback.clear()
        self.client.graph.wait_for(lambda: self.over or len(self.feedback) > 3, 'feedback')

    def result(self) -> tuple[int, Outcome, str]:
        answer = self.client.graph.wait_for(
            lambda: self._future.result() if self.over else None, 'a result'
        )
        return answer.status, Outcome(answer.result.outcome), answer.result.message


@pytest.fixture(scope='module')
def started() -> Iterator[Client]:
    with graph() as made:
        robot = Robot()
        yield Client(made, robot)
        robot.close()


@pytest.fixture
def client(started: Client) -> Iterator[Client]:
    robot = started.robot
    yield started
    robot.speaks, robot.refuses_resume, robot.outcome = True, '', ''
    for event in robot.answers.values():
        event.set()
    # It ends those before it, and leaves nothing behind.
    last = started.send()
    last.handle.cancel_goal_async()
    last.result()
    robot.stand()
    started.hear_states()
    robot.calls.clear()
    robot.asked.clear()


def test_an_executor_that_was_silent_and_lives_is_stopped(client: Client) -> None:
    robot, sent = client.robot, client.run()
    robot.speaks = False
    assert sent.result()[1] is Outcome.EXECUTOR_LOST
    assert robot.calls == ['start', 'stop'] and robot.mode == 'stopped'


def test_an_executor_that_was_cut_off_is_stopped_as_soon_as_it_is_heard(client: Client) -> None:
    robot, sent = client.robot, client.run()
    robot.speaks = False
    robot.answers['stop'].clear()
    assert sent.result()[1] is Outcome.EXECUTOR_LOST
    assert robot.asked == ['start', 'stop']
    robot.speaks = True
    client.graph.wait_for(lambda: robot.asked.count('stop') > 1, 'another stop')
    robot.answers['stop'].set()
    client.graph.wait_for(lambda: robot.mode == 'stopped', 'a stopped robot')


def test_an_executor_that_came_back_idle_is_started_by_the_next_goal(client: Client) -> None:
    robot, sent = client.robot, client.run()
    robot.speaks = False
    robot.answers['stop'].clear()
    assert sent.result()[1] is Outcome.EXECUTOR_LOST
    robot.stand('idle')
    robot.speaks = True
    robot.calls.clear()
    client.hear_states()
    client.run()
    assert robot.calls == ['start']


def test_a_task_node_that_stood_still_goes_on_with_its_task(client: Client) -> None:
    sent = client.run()
    os.kill(client.tasks.pid, signal.SIGSTOP)
    client.hear_states(EXECUTOR_SILENT_S + 0.5)
    os.kill(client.tasks.pid, signal.SIGCONT)
    sent.wait_for_news()
    assert not sent.over and client.robot.calls == ['start']


def test_of_two_goals_that_came_together_the_first_is_told_that_it_was_preempted(
    client: Client,
) -> None:
    os.kill(client.tasks.pid, signal.SIGSTOP)
    asked = client.ask({'instruction': 'first'}, {'instruction': 'second'})
    os.kill(client.tasks.pid, signal.SIGCONT)
    first, second = client.accepted(asked)
    status, outcome, text = first.result()
    assert (status, outcome) == (GoalStatus.STATUS_ABORTED, Outcome.PREEMPTED) and text
    second.wait_for_phase('running')
    assert 'Traceback' not in client.tasks.text()


def test_a_state_from_before_the_start_is_no_stop_to_a_goal_that_takes_over(
    client: Client,
) -> None:
    robot = client.robot
    robot.answers['start'].clear()
    client.send()
    client.graph.wait_for(lambda: robot.asked == ['start'], 'a start that takes its time')
    second = client.send()
    # The second task has heard that the robot does not run.
    client.graph.wait_for(
        lambda: second.over or any(one.reason == 'stopped' for one in list(second.feedback)),
        'an old state',
    )
    robot.answers['start'].set()
    second.wait_for_phase('running')
    assert robot.calls == ['start']


def test_a_robot_that_never_ran_for_the_task_before_is_stopped_for_sure(client: Client) -> None:
    robot = client.robot
    robot.answers['start'].clear()
    client.send()
    client.graph.wait_for(lambda: robot.asked == ['start'], 'a start that takes its time')
    second = client.send()
    assert second.result()[1] is Outcome.STOPPED
    assert robot.asked == ['start', 'stop']


def test_a_goal_after_a_cancel_waits_for_the_stop_and_runs(client: Client) -> None:
    robot, first = client.robot, client.run()
    robot.answers['stop'].clear()
    first.handle.cancel_goal_async()
    client.graph.wait_for(lambda: 'stop' in robot.asked, 'a stop that takes its time')
    second = client.send()
    second.wait_for_phase('queued')
    robot.answers['stop'].set()
    assert first.result()[:2] == (GoalStatus.STATUS_CANCELED, Outcome.CANCELED)
    second.wait_for_phase('running')
    assert robot.calls == ['start', 'stop', 'start']


def test_a_goal_resumes_a_robot_that_was_paused_before(client: Client) -> None:
    robot = client.robot
    robot.pause()
    client.hear_states()
    client.run()
    assert robot.calls == ['resume']


def test_a_goal_waits_for_the_end_of_the_way_home(client: Client) -> None:
    robot = client.robot
    robot.pause('approaching')
    client.hear_states()
    sent = client.send()
    sent.wait_for_news()
    assert not sent.over and not robot.asked
    robot.pause()
    sent.wait_for_phase('running')
    assert robot.calls == ['resume']


def test_a_refused_resume_is_the_result_and_leaves_the_robot_alone(client: Client) -> None:
    robot = client.robot
    robot.refuses_resume = 'not now'
    robot.pause()
    client.hear_states()
    assert client.send().result()[1:] == (Outcome.START_REFUSED, 'not now')
    assert robot.asked == ['resume'] and robot.mode == 'running'


def test_a_task_that_waited_ends_no_pause(client: Client) -> None:
    robot, first = client.robot, client.run()
    waiting = client.send(enqueue=True)
    robot.pause()
    first.wait_for_phase('holding')
    first.handle.cancel_goal_async()
    status, outcome, message = waiting.result()
    assert (status, outcome) == (GoalStatus.STATUS_ABORTED, Outcome.START_REFUSED)
    assert 'the pause is newer' in message and 'resume' not in robot.asked


@pytest.mark.parametrize(
    ('verdict', 'expected'),
    [
        ('success', (GoalStatus.STATUS_SUCCEEDED, Outcome.JUDGED_SUCCESS)),
        ('failure', (GoalStatus.STATUS_ABORTED, Outcome.JUDGED_FAILURE)),
    ],
)
def test_a_verdict_ends_the_task_and_the_next_one_begins_another_episode(
    client: Client, verdict: str, expected: tuple[int, Outcome]
) -> None:
    robot, first = client.robot, client.run()
    second = client.send(enqueue=True)
    robot.judge(verdict)
    assert first.result()[:2] == expected
    second.wait_for_phase('running')
    assert robot.calls == ['start', 'resume']
    robot.judge(verdict)
    assert second.result()[:2] == expected
    assert robot.calls == ['start', 'resume', 'stop']


def test_a_task_node_that_ends_stops_the_robot_and_tells_its_clients(client: Client) -> None:
    sent, waiting = client.run(), client.send(enqueue=True)
    assert client.tasks.stop(signal.SIGINT) == 0
    assert client.robot.mode == 'stopped'
    for one in (sent, waiting):
        assert one.result()[:2] == (GoalStatus.STATUS_ABORTED, Outcome.SHUT_DOWN)
    client.start()
