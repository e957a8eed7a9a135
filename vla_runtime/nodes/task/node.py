"""`task_node`: the action `RunPolicy`, for whoever tells the robot what to do.

It sets the policy's instruction, starts and stops the executor by their services, and moves nothing
itself. Topics in: `vla_executor/state`, `vla_policy/state`, `committed_plan`. Action
`~/run_policy`; service `~/next`, which ends the task in hand as done and begins the next one.

Invariants:
- one task runs at a time; a new one ends those before it, unless it is to wait for them;
- from one task to the next the executor is not stopped; after the last one it is, by `~/stop`,
  which brakes within the limits, and the result is sent when the robot rests;
- a task whose policy node, executor node or client is gone ends, and the robot is stopped: an
  executor that was lost in motion as soon as it is heard again;
- a robot that somebody else stopped, or that lost a node or its client, is not started again: its
  task ends, and so do those that wait;
- a pause is ended by a goal that came after it, and by the next task where a verdict made it.
"""

from __future__ import annotations

import sys

if __name__ == '__main__':
    # Before what takes seconds to import: a Ctrl-C meanwhile ends the process quietly.
    from vla_runtime.nodes.node_main import run_module

    sys.exit(run_module('task_node'))

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.client import Client
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.task import Future
from std_srvs.srv import Trigger

from vla_runtime.execution.command import MOVING
from vla_runtime.execution.config import Mode
from vla_runtime.files.quotes import quoted
from vla_runtime.messages.trajectories import message_to_plan, plan_type, typed_messages
from vla_runtime.nodes.node_parameters import refuse_unknown
from vla_runtime.nodes.node_runner import guarded, run_node
from vla_runtime.nodes.qos import RELIABLE, REPEATED
from vla_runtime.nodes.service_call import ServiceCall
from vla_runtime.nodes.task.progress import (
    STARTS_WITHIN_S,
    Ending,
    Outcome,
    TaskLimits,
    TaskProgress,
    is_paused,
)

_NAME = 'vla_task'
_EXECUTOR, _POLICY = 'vla_executor', 'vla_policy'
_LOOK_S = 0.05
_FEEDBACK_S = 0.2
# For a service that is not there yet, and for one that is.
_APPEARS_WITHIN_S, _ANSWERS_WITHIN_S = 10.0, 15.0
# For the stop of an executor that has gone silent, which may be gone.
_LOST_ANSWERS_WITHIN_S = 1.0
# A look that is so late is of a process that stood still, and has heard nobody meanwhile.
_STOOD_STILL_S = 1.0
# At the node's end: for the stop, and for results to leave.
_STOPS_WITHIN_S, _LEAVES_WITHIN_S = 1.5, 0.2
# A trigger must not be carried out a second time behind a slow answer's back.
_TRIGGER_AGAIN_S = 40.0
NOT_BUILT = (
    'vla_interfaces is not built, so there is no action RunPolicy: `./run setup` builds it where a '
    'C++ compiler is installed, colcon with --base-paths src src/vla_runtime/interfaces'
)


@dataclass(eq=False)
class _Task:
    """A goal that was accepted.

    Attributes:
        done: resolved with its result.
        came_s: steady time at which it came; minus infinity where it was to wait for others.
        step: `queued`, `instruct`, `wait`, `start` or `resume`, `run`, `stop`, and `over` at last.
        call: service that is waited for, since `step_s` (steady); it has `answered`.
        listened: a client has listened to its feedback.
    """

    handle: Any
    progress: TaskProgress
    done: Future
    came_s: float
    step: str = 'queued'
    step_s: float = 0.0
    call: ServiceCall | None = None
    answered: bool = False
    ending: Ending | None = None
    listened: bool = False
    told: tuple[object, ...] = field(default_factory=tuple)
    told_s: float = 0.0

    @property
    def goal(self) -> Any:
        return self.handle.request


@dataclass(eq=False)
class _Start:
    """What lets the robot move: asked for by a task, and neither stopped nor ended since.

    Attributes:
        task: asked for it, at `asked_s` (steady).
        has_run: the executor has said that it runs, since it answered.
        lost: the executor has answered no stop, and may go on.
        stop: asks it again, once it is heard again.
    """

    task: _Task
    asked_s: float
    has_run: bool = False
    lost: bool = False
    stop: ServiceCall | None = None


class TaskNode(Node):
    """See the module's invariants."""

    # How long the process waits for the last callbacks: `farewell` and one that is slow.
    callback_s = 5.0

    def __init__(self) -> None:
        super().__init__(_NAME)
        refuse_unknown(self, ())
        typed = typed_messages()
        if typed is None:
            raise RuntimeError(NOT_BUILT)
        from vla_interfaces.action import RunPolicy
        from vla_interfaces.srv import SetInstruction

        self._action, self._set_instruction = RunPolicy, SetInstruction
        self._task: _Task | None = None
        self._queue: deque[_Task] = deque()
        self._start: _Start | None = None
        # Since when the executor has said that it is paused, and when it was looked (steady).
        self._paused_s: float | None = None
        self._looked_s = time.monotonic()
        # When the end was asked for, and when the last task had ended.
        self._closes_s: float | None = None
        self._ended_s: float | None = None
        self._accepted: dict[bytes, _Task] = {}
        group = MutuallyExclusiveCallbackGroup()
        self._started: Client = self.create_client(Trigger, f'{_EXECUTOR}/start')
        self._resumed: Client = self.create_client(Trigger, f'{_EXECUTOR}/resume')
        self._stopped: Client = self.create_client(Trigger, f'{_EXECUTOR}/stop')
        self._instructed: Client = self.create_client(SetInstruction, f'{_POLICY}/set_instruction')
        for kind, topic, call, qos in (
            (typed.ExecutorState, f'{_EXECUTOR}/state', self._on_executor, RELIABLE),
            (typed.PolicyState, f'{_POLICY}/state', self._on_policy, RELIABLE),
            (plan_type(), 'committed_plan', self._on_plan, REPEATED),
        ):
            callback = guarded(self._on_error, topic, call)
            self.create_subscription(kind, topic, callback, qos, callback_group=group)
        on_next = guarded(self._on_error, '~/next', self._on_next)
        self.create_service(Trigger, '~/next', on_next, callback_group=group)
        self._server = ActionServer(
            self,
            RunPolicy,
            '~/run_policy',
            self._execute,
            goal_callback=self._judge,
            handle_accepted_callback=self._accept,
            cancel_callback=lambda _: CancelResponse.ACCEPT,
            callback_group=group,
        )
        feedback = f'{self.get_fully_qualified_name()}/run_policy/_action/feedback'
        self._listeners = lambda: self.count_subscribers(feedback)
        self.create_timer(
            _LOOK_S,
            guarded(self._on_error, 'task', self._look),
            callback_group=group,
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )
        self.get_logger().info(f'tasks are taken on {self.get_fully_qualified_name()}/run_policy')

    def farewell(self) -> bool:
        """Stop the robot and end all tasks; return whether that is done and clients know it.

        Called between callbacks, again and again, when the process is to end.
        """
        if self._closes_s is None:
            self._closes_s = time.monotonic()
        return self._ended_s is not None and time.monotonic() - self._ended_s > _LEAVES_WITHIN_S

    def destroy_node(self) -> None:
        """Let no robot go on with a task that nobody looks after."""
        if self._start is not None and self._stopped.service_is_ready():
            self._stopped.call_async(Trigger.Request())
        self._server.destroy()
        super().destroy_node()

    def _judge(self, goal: Any) -> GoalResponse:
        try:
            _limits(goal)
        except ValueError as error:
            self.get_logger().error(f'a goal is rejected: {error}')
            return GoalResponse.REJECT
        return GoalResponse.ACCEPT if self._closes_s is None else GoalResponse.REJECT

    def _accept(self, handle: Any) -> None:
        self._look()
        now_s, before = time.monotonic(), self._task
        waits = handle.request.enqueue and before is not None
        task = _Task(
            handle,
            TaskProgress(_limits(handle.request), now_s),
            Future(),
            came_s=-math.inf if waits else now_s,
        )
        self._accepted[bytes(handle.goal_id.uuid)] = task
        handle.execute()
        if not waits:
            preempted = Ending(Outcome.PREEMPTED, 'another goal has taken its place')
            self._drop_waiting(preempted)
            if before is not None:
                before.ending = before.ending or preempted
        # One that is being stopped ends first.
        self._queue.append(task)
        self._look()

    def _drop_waiting(self, ending: Ending) -> None:
        for waiting in self._queue:
            self._finish(waiting, ending)
        self._queue.clear()

    async def _execute(self, handle: Any) -> Any:
        # A goal may have ended before rclpy comes to this.
        return await self._accepted.pop(bytes(handle.goal_id.uuid)).done

    def _begin(self, task: _Task) -> None:
        now_s = time.monotonic()
        self._task = task
        task.progress = TaskProgress(_limits(task.goal), now_s)
        self._go_to(task, 'instruct' if task.goal.instruction else 'wait')
        text = quoted(task.goal.instruction, 300) if task.goal.instruction else 'as instructed'
        self.get_logger().info(f'a task begins: {text}')

    def _go_to(self, task: _Task, step: str) -> None:
        task.step, task.step_s, task.call = step, time.monotonic(), None

    def _look(self) -> None:
        now_s = time.monotonic()
        stood_still, self._looked_s = now_s - self._looked_s > _STOOD_STILL_S, now_s
        for waiting in [one for one in self._queue if one.handle.is_cancel_requested]:
            self._queue.remove(waiting)
            self._finish(waiting, Ending(Outcome.CANCELED, 'canceled before it began'))
        if self._closes_s is not None:
            self._close(now_s, self._closes_s)
        if self._task is not None:
            if stood_still:
                self._task.progress.excuse(now_s)
            self._advance(self._task)
        if self._task is None and self._queue:
            self._begin(self._queue.popleft())
        if self._task is None:
            self._stop_lost()
        for place, one in enumerate((*([self._task] if self._task else []), *self._queue)):
            self._tell(one, place)

    def _close(self, now_s: float, closes_s: float) -> None:
        over = Ending(Outcome.SHUT_DOWN, 'the task node has ended')
        self._drop_waiting(over)
        if (task := self._task) is not None:
            task.ending = task.ending or over
            if now_s - closes_s > _STOPS_WITHIN_S:
                text = f'{task.ending.text}; the robot may not be at rest yet'
                self._finish(task, Ending(task.ending.outcome, text))
        elif self._ended_s is None:
            self._ended_s = now_s

    def _stop_lost(self) -> None:
        """Stop an executor that answered no stop and is heard again, still running."""
        start = self._start
        if start is None or start.stop is None:
            return
        if start.stop.answer() is not None:
            self._start = None

    def _end_where_due(self, task: _Task) -> None:
        if task.ending is not None:
            return
        now_s = time.monotonic()
        listeners = self._listeners()
        task.listened = task.listened or listeners > 0
        if task.handle.is_cancel_requested:
            task.ending = Ending(Outcome.CANCELED, 'canceled by its client')
        elif task.listened and not listeners and not task.goal.outlives_client:
            task.ending = Ending(Outcome.CLIENT_LOST, 'its client has left the graph')
        else:
            task.ending = task.progress.ending(now_s)

    def _advance(self, task: _Task) -> None:
        self._end_where_due(task)
        if (ending := task.ending) is not None and task.step != 'stop':
            if self._stands(task, ending):
                self._start = None
            if not ending.outcome.lets_next_go_on:
                # A person may have stopped the robot: nothing that waits starts it again.
                self._drop_waiting(ending)
            if self._start is None or (self._queue and ending.outcome.lets_next_go_on):
                self._finish(task, ending)
            else:
                self._go_to(task, 'stop')
        if task.step == 'instruct':
            request = self._set_instruction.Request(instruction=task.goal.instruction)
            if (answer := self._ask(task, self._instructed, request, 2.0)) is not None:
                self._go_on(task, 'wait', answer)
        elif task.step == 'wait':
            self._wait(task)
        elif task.step in ('start', 'resume'):
            client = self._started if task.step == 'start' else self._resumed
            answer = self._ask(task, client, Trigger.Request(), _TRIGGER_AGAIN_S)
            if task.call is not None and (self._start is None or self._start.lost):
                self._start = _Start(task, time.monotonic())
            if answer is not None:
                self._go_on(task, 'run', answer)
        elif task.step == 'stop' and ending is not None:
            self._finish_stopped(task, ending)

    def _stands(self, task: _Task, ending: Ending) -> bool:
        """Return whether the executor has said itself that it will not move."""
        if ending.outcome is Outcome.STOPPED:
            return self._start is not None and self._start.has_run
        return ending.outcome is Outcome.EXECUTOR_LOST and task.progress.mode == 'inactive'

    def _finish_stopped(self, task: _Task, ending: Ending) -> None:
        lost = ending.outcome is Outcome.EXECUTOR_LOST
        longest_s = _LOST_ANSWERS_WITHIN_S if lost else None
        answer = self._ask(task, self._stopped, Trigger.Request(), _TRIGGER_AGAIN_S, longest_s)
        if answer is None:
            return
        if task.answered:
            self._start = None
        elif self._start is not None:
            self._start.lost = True
        text = ending.text if answer.success else f'{ending.text}; {answer.message}'
        self._finish(task, Ending(ending.outcome, text))

    def _wait(self, task: _Task) -> None:
        """Go on where the robot may move; end the task where it may not for too long.

        A start or resume is not asked again and again: what is refused once is for a person to
        look at.
        """
        progress, start, now_s = task.progress, self._start, time.monotonic()
        if progress.start_refused is None:
            why = f'nothing has come on {_EXECUTOR}/state'
        elif progress.paused and progress.reason in MOVING:
            why = f'the robot goes home, or comes to rest: {progress.text}'
        elif progress.paused:
            if progress.judged or (self._paused_s is not None and task.came_s > self._paused_s):
                self._go_to(task, 'resume')
                return
            why = f'{progress.text}: the pause is newer than the goal'
        elif start is not None and not start.lost:
            # The task before it has left the robot moving.
            if progress.runs:
                self._go_to(task, 'run')
                progress.start(now_s)
            elif start.has_run or now_s - start.asked_s > STARTS_WITHIN_S:
                task.ending = Ending(Outcome.STOPPED, progress.text)
            return
        elif not progress.start_refused:
            self._go_to(task, 'start')
            return
        else:
            why = progress.start_refused
        if now_s - task.step_s > _APPEARS_WITHIN_S:
            task.ending = Ending(Outcome.START_REFUSED, why)

    def _go_on(self, task: _Task, step: str, answer: Any) -> None:
        if answer.success:
            self._go_to(task, step)
            if step == 'run':
                task.progress.start(time.monotonic())
            return
        task.ending = Ending(Outcome.START_REFUSED, answer.message)
        # One that was refused has moved nothing; one that was not answered may yet.
        if self._start is not None and self._start.task is task and task.answered:
            self._start = None

    def _ask(
        self,
        task: _Task,
        client: Any,
        request: Any,
        again_s: float,
        longest_s: float | None = None,
    ) -> Any:
        """Return a service's answer, None while there is none; one that says so after too long."""
        waited_s = time.monotonic() - task.step_s
        if task.call is None and client.service_is_ready():
            task.call = ServiceCall(client, request, again_s)
        answer = None if task.call is None else task.call.answer()
        task.answered = answer is not None
        if longest_s is None:
            longest_s = _APPEARS_WITHIN_S if task.call is None else _ANSWERS_WITHIN_S
        if answer is None and waited_s > longest_s:
            why = 'is not there' if task.call is None else 'does not answer'
            return Trigger.Response(message=f'{client.srv_name} {why} for {longest_s:g} s')
        return answer

    def _finish(self, task: _Task, ending: Ending) -> None:
        if task.step == 'over':
            return
        now_s = time.monotonic()
        result = self._action.Result(
            outcome=int(ending.outcome),
            message=ending.text,
            seconds=task.progress.seconds(now_s),
            seconds_held=task.progress.held_s,
            chunks=task.progress.chunks,
        )
        if ending.outcome.succeeded:
            task.handle.succeed()
        elif ending.outcome is Outcome.CANCELED:
            task.handle.canceled()
        else:
            task.handle.abort()
        self._go_to(task, 'over')
        task.done.set_result(result)
        if self._task is task:
            self._task = None
        self.get_logger().info(
            f'a task has ended after {result.seconds:.1f} s, {ending.outcome.name.lower()}: '
            f'{ending.text}'
        )

    def _tell(self, task: _Task, place: int) -> None:
        now_s = time.monotonic()
        progress, phase = task.progress, _phase(task)
        said = (phase, place, progress.chunk, progress.reason)
        if said == task.told and now_s - task.told_s < _FEEDBACK_S:
            return
        task.told, task.told_s = said, now_s
        task.handle.publish_feedback(
            self._action.Feedback(
                phase=phase,
                seconds=0.0 if phase == 'queued' else progress.seconds(now_s),
                queued_before=place,
                chunk=progress.chunk,
                reason=progress.reason,
                text=progress.text,
            )
        )

    def _on_next(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        task = self._task
        if task is None or task.ending is not None:
            response.message = 'no task runs'
            return response
        task.ending = Ending(Outcome.ENDED_BY_NEXT, '~/next was called')
        response.success = True
        response.message = (
            f'{len(self._queue)} tasks wait' if self._queue else 'none waits: the robot is stopped'
        )
        return response

    def _on_executor(self, state: Any) -> None:
        now_s, start = time.monotonic(), self._start
        if not is_paused(state.mode, state.driver):
            self._paused_s = None
        elif self._paused_s is None:
            self._paused_s = now_s
        if start is not None and start.lost:
            if state.mode != Mode.RUNNING:
                self._start = None
            elif self._task is None and start.stop is None and self._stopped.service_is_ready():
                start.stop = ServiceCall(self._stopped, Trigger.Request())
        if (task := self._task) is not None:
            task.progress.see_executor(now_s, state)
            if start is not None and task.progress.has_run:
                start.has_run = True

    def _on_policy(self, state: Any) -> None:
        if self._task is not None:
            self._task.progress.see_policy(
                time.monotonic(), lifecycle=state.lifecycle, text=state.text
            )

    def _on_plan(self, message: Any) -> None:
        if self._task is not None:
            self._task.progress.see_plan(message_to_plan(message))

    def _on_error(self, where: str, error: Exception) -> None:
        self.get_logger().error(
            f'{where}: {type(error).__name__}: {error}', throttle_duration_sec=10.0
        )


def _phase(task: _Task) -> str:
    if task.step == 'run' and task.progress.has_run:
        return 'holding' if task.progress.holds else 'running'
    return {'queued': 'queued', 'stop': 'stopping'}.get(task.step, 'starting')


def _limits(goal: Any) -> TaskLimits:
    """Return what ends a goal by itself; ValueError where a number is none."""
    return TaskLimits(
        time_s=_seconds(goal.time_limit),
        time_succeeds=goal.time_limit_succeeds,
        rest_s=_seconds(goal.rest_duration),
        rest_tolerance=goal.rest_tolerance,
    )


def _seconds(duration: Any) -> float:
    return float(duration.sec + duration.nanosec * 1e-9)


def main(args: list[str] | None = None) -> int:
    """`ros2 run vla_runtime task_node`."""
    return run_node(TaskNode, _NAME, args)
