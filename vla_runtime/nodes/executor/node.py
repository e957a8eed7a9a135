"""`executor_node`: the lifecycle node that moves the robot along the policy's chunks.

Invariants:
- while it is active the robot is in the hands of an `ExecutorSession` and its threads; what is here
  are rclpy's callbacks, which nothing that moves the robot waits for;
- it asks (`committed_plan`) and the policy answers (`action_chunk`); when the policy dies, this
  node holds the robot and goes on asking;
- of two executors of one name or one output the second is not configured, and never sends;
- an active node commands nothing until `~/start`, and each activation begins like the first, but
  for the latch of clamped chunks, which only `~/reset` opens;
- `~/stop` and `~/release` answer when the robot rests and others may command it, or after a time
  that the answer states;
- teardown, on deactivation and on shutdown: the session ends, with the hold as the last command on
  the wire, then the publishers go.
"""

from __future__ import annotations

import sys

if __name__ == '__main__':
    # Before what takes seconds to import: a Ctrl-C meanwhile ends the process quietly.
    from vla_runtime.nodes.node_main import run_module

    sys.exit(run_module('executor_node'))

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecyclePublisher
from rclpy.parameter import Parameter
from std_srvs.srv import Trigger

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.execution.command import ChunkRefusal, Reason, StartResult
from vla_runtime.execution.config import Mode
from vla_runtime.execution.guard import ClampLatch
from vla_runtime.files.package_files import share_folder
from vla_runtime.files.quotes import join_truncated
from vla_runtime.messages.diagnostics import REPEAT_LOG_S, StatusItem, Throttle, to_message
from vla_runtime.messages.trajectories import (
    TrajectoryError,
    chunk_type,
    message_to_chunk,
    plan_to_message,
    plan_type,
    spoken,
    trajectory_of,
)
from vla_runtime.nodes.executor import status as executor_status
from vla_runtime.nodes.executor.control_loop import ControlLoop
from vla_runtime.nodes.executor.controller_watch import (
    Verdict,
    warnings_of,
    why_not_yet,
    why_refused,
)
from vla_runtime.nodes.executor.episodes import EpisodeEnds
from vla_runtime.nodes.executor.leader_link import LeaderLink
from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS, executor_parameters
from vla_runtime.nodes.executor.person import PersonServices
from vla_runtime.nodes.executor.realtime import prefer_this_thread, share_interpreter
from vla_runtime.nodes.executor.robot_link import RobotLink, command_topics
from vla_runtime.nodes.executor.session import CHUNK_TOPIC, ExecutorSession, SessionHooks
from vla_runtime.nodes.executor.setup import check_fixed, check_units, make_core, read_files
from vla_runtime.nodes.executor.state_topic import StateTopic
from vla_runtime.nodes.graph_faults import other_publishers, publisher_names, why_unlike
from vla_runtime.nodes.later_service import Complete, LaterService
from vla_runtime.nodes.managed_node import ManagedNode, place_of_bug
from vla_runtime.nodes.middleware import keep_to_udp
from vla_runtime.nodes.node_parameters import refuse_unknown
from vla_runtime.nodes.node_runner import guarded, run_node
from vla_runtime.nodes.parameter_table import ParameterError
from vla_runtime.nodes.parameters import declare, values
from vla_runtime.nodes.polled_topics import HeardStatus
from vla_runtime.nodes.qos import RELIABLE
from vla_runtime.nodes.restart import note, state_before
from vla_runtime.nodes.status_board import log_item
from vla_runtime.nodes.twins import ITEM, Claim, Twins, node_item, why_second
from vla_runtime.robot.limits import beyond_urdf
from vla_runtime.robot.schema import received_topics
from vla_runtime.types import PlanRequest

PLAN_TOPIC = 'committed_plan'
_NAME = 'vla_executor'
_CLAMPED = 'clamp_latch_cause'
_OWN_NAMESPACE = 'give this one a robot and a namespace of its own (namespace:=left at launch)'
_ONE_EXECUTOR = (
    'one policy answers one executor: end the other one, or run it in a namespace of its '
    'own (a node that was killed leaves the graph after some 20 s)'
)
_ONE_POLICY = 'end one of them, or run it in a namespace of its own'
_ONE_SENDER = (
    'let it stop sending first, then call ~/start; a node that may always send there is named in '
    'shared_with of the output in the robot file'
)
_LISTENERS = (
    "start the robot's controller, or mend the topic of the output in the robot file; with dry_run "
    'nobody needs to listen'
)
_EXPECTED = (ChunkRefusal.NOT_RUNNING, ChunkRefusal.PAUSED, ChunkRefusal.LEADING)
_STATUS_PERIOD_S = 0.2
_REST_LOOK_S = 0.02
# Item of the policy's status that says what it waits for.
_OBSERVATION = 'observation'


class ExecutorNode(ManagedNode):
    """The executor's lifecycle node; see the module's invariants."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self._spec: BundleSpec | None = None
        self._link: RobotLink | None = None
        self._plan_publisher: LifecyclePublisher | None = None
        self._session: ExecutorSession | None = None
        self._leader: LeaderLink | None = None
        self._heard = HeardStatus(self, (ITEM, _OBSERVATION))
        self._twins = Twins(self, self._heard)
        # Full names of the outputs' topics, and who may send there too.
        self._commanded: dict[str, frozenset[str]] = {}
        declare(self, EXECUTOR_PARAMETERS, self._parameter_conflict)
        refuse_unknown(self, EXECUTOR_PARAMETERS)
        self.add_on_set_parameters_callback(self._refuse_other_clock)
        # Before ROS 2 Iron there is no such hook: the next status, chunk or start takes them up.
        if hasattr(self, 'add_post_set_parameters_callback'):
            self.add_post_set_parameters_callback(self._follow_parameters)
        self._fixed = values(self, EXECUTOR_PARAMETERS)
        self._cpus = check_fixed(self._fixed)
        before = state_before()
        self._latch = ClampLatch(
            self._fixed['clamp_latch'],
            cause=str(before.notes.get(_CLAMPED, '')) if before is not None else '',
            reset_call=(
                f'ros2 service call {self.get_fully_qualified_name()}/reset std_srvs/srv/Trigger'
            ),
        )
        note(_CLAMPED, lambda: self._latch.cause)
        share_interpreter()
        # Counted from the wall clock, so that a node that is started again never goes on with an
        # episode of the one before it.
        self._episode = int(time.time())
        self._throttle = Throttle(REPEAT_LOG_S)
        self._unreadable = 0
        self._last_refusal = ''
        self._steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', 10)
        self._report = self.create_publisher(DiagnosticArray, '~/report', 10)
        self._state = StateTopic(self)
        for name, callback in (('start', self._on_start), ('reset', self._on_reset)):
            self.create_service(Trigger, f'~/{name}', self._guarded(name, callback))
        self._stops = [
            LaterService(self, Trigger, f'~/{name}', begin, self._on_error)
            for name, begin in (('stop', self._on_stop), ('release', self._on_release))
        ]
        self._episodes = EpisodeEnds(
            self,
            lambda: self._loop,
            lambda items: self._publish(self._report, items),
            self._on_error,
        )
        self._person = PersonServices(
            self,
            lambda: self._session,
            self._why_not_start,
            self._begin_next,
            self._episodes.note_home,
            self._on_error,
        )
        self._every(_STATUS_PERIOD_S, 'status', self._publish_status)
        self._every(_REST_LOOK_S, 'rest', self._answer_stops)

    def destroy_node(self) -> None:
        self._heard.close()
        super().destroy_node()

    def _load(self) -> None:
        robot, spec, match = read_files(self._fixed)
        self._units = check_units(self._fixed, robot, match)
        self._spec = spec
        conflict = self._parameter_conflict(values(self, EXECUTOR_PARAMETERS))
        if conflict is not None:
            raise ParameterError(conflict)
        self._robot, self._match = robot, match
        self._commanded = command_topics(self, match)
        self._require_no_other()
        self._link = RobotLink(self, robot, match, self._on_error)
        # A dry run sends nothing, and names at its start what would refuse the commands.
        if not self.get_parameter('dry_run').value:
            self._link.require_interfaces()
        self._plan_publisher = self.create_lifecycle_publisher(plan_type(), PLAN_TOPIC, RELIABLE)
        self.get_logger().info(
            f"'{spec.name}' drives '{robot.name}': {', '.join(match.action_names)} at "
            f'{self._fixed["control_rate_hz"]:g} Hz; chunks and plans are {spoken()}'
        )
        if beyond := beyond_urdf(robot):
            self.get_logger().info(
                f'{robot.urdf} says nothing about {", ".join(beyond)}: the robot file alone limits '
                'them'
            )

        self._unit_notes = self._units.notes()
        for text in self._unit_notes:
            self.get_logger().warning(text)

    def _open(self) -> None:
        assert self._link is not None
        parameters = values(self, EXECUTOR_PARAMETERS)
        self._live = parameters
        self._require_no_other()
        use_sim_time = bool(self.get_parameter('use_sim_time').value)
        assert self._spec is not None
        core = make_core(
            parameters,
            self._robot,
            self._match,
            self._latch,
            use_sim_time=use_sim_time,
            step_time_s=self._spec.step_time_s,
        )
        self._session = ExecutorSession(
            self,
            self._link,
            self._fixed['control_rate_hz'],
            SessionHooks(
                now_ns=self._now_ns,
                on_chunk=self._on_chunk,
                publish_plan=self._publish_plan,
                prefer_thread=self._prefer_this_thread,
                on_error=self._on_error,
            ),
        )
        self._forget_answers()
        self._session.begin(core, self._episode)
        if self._robot.leader is not None and self._session.loop is not None:
            self._leader = LeaderLink(
                self, self._robot, self._match, self._session.loop, self._on_error
            )

    def _shut(self) -> None:
        session, self._session = self._session, None
        leader, self._leader = self._leader, None
        # Steps run in reverse order, and none is kept back by one that fails.
        with ExitStack() as steps:
            if session is not None:
                steps.callback(session.end)
            steps.callback(self._answer_stops)
            if leader is not None:
                steps.callback(leader.close)

    def _free(self) -> None:
        link, publisher = self._link, self._plan_publisher
        self._link = self._plan_publisher = self._spec = None
        with ExitStack() as steps:
            if publisher is not None:
                steps.callback(self.destroy_lifecycle_publisher, publisher)
            if link is not None:
                steps.callback(link.close)

    def _on_chunk(self, message: Any) -> None:
        loop, spec = self._loop, self._spec
        if loop is None or spec is None:
            return
        self._follow_parameters()
        # Before it is read: however long a message is, it must not keep the ticks waiting.
        if (points := len(trajectory_of(message).points)) > spec.real_horizon:
            self._unreadable += 1
            self._say(
                f'a chunk of {points} points on {CHUNK_TOPIC} is refused: the '
                f"policy's horizon is {spec.real_horizon}"
            )
            return
        try:
            chunk, header = message_to_chunk(message, step_time_s=spec.step_time_s)
        except TrajectoryError as error:
            self._unreadable += 1
            self._say(f'a message on {CHUNK_TOPIC} is no chunk: {error}')
            return
        result = loop.submit(chunk, header, time.monotonic())
        is_usual = result.accepted or result.refusal in _EXPECTED
        self._last_refusal = '' if is_usual else result.text
        # The answer to a request from before a stop is nothing to wonder about, nor one for the
        # record alone.
        if result.text and result.refusal not in _EXPECTED:
            self._say(f'chunk {header.number}: {result.text}')

    def _on_start(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._loop is None:
            response.message = 'the executor is not active: configure and activate it first'
            return response
        self._follow_parameters()
        refused, already = self._why_not_start(), self._loop.is_started()
        if not (refused or already):
            self._begin_next()
        result = StartResult(False, refused) if refused else self._loop.start(time.monotonic())
        text = refused or self._with_topics(result)
        if result.started and self._live['dry_run'] and (later := self._why_not_command()):
            text = f'{text or "started"}; with dry_run false ~/start is refused: {later}'
        if result.started and not already:
            text = '; '.join((text or 'started', *self._unit_notes))
        response.success, response.message = result.started, text
        if result.started:
            self.get_logger().info('started')
            watch = self._session.watch if self._session is not None else None
            if watch is not None and (unwatched := watch.unwatched()):
                self._say(unwatched)
        else:
            self.get_logger().error(f'not started: {text}')
        return response

    def _with_topics(self, result: StartResult) -> str:
        """Add the topics and nodes that the core's answer to a start is about."""
        if result.started or self._link is None:
            return result.text
        if nothing := self._link.nothing_there():
            return nothing
        return '; '.join(filter(None, (result.text, self._about_states(result.reason))))

    def _about_states(self, reason: Reason | None) -> str:
        if self._link is None or reason not in executor_status.OF_STATES:
            return ''
        if reason in executor_status.DOUBTED:
            return self._link.state_publishers()
        return self._link.state_faults(self._now_ns(), self._live['max_state_age_s'])

    def _would_refuse(self, loop: ControlLoop) -> str:
        """Return what ~/start would answer now; empty where it would start."""
        return self._why_not_start() or self._with_topics(loop.why_not_start(time.monotonic()))

    def _why_not_start(self) -> str:
        """Return why the robot must not start beside these nodes and topics; empty if it may."""
        self._heard.take()
        mine = self._claim()
        if first := self._twins.first(mine, self._commanded):
            return why_second(mine, first, _OWN_NAMESPACE)
        if several := self._several_policies():
            return f'{several}; {_ONE_POLICY}'
        if conflict := self._conflict():
            return f'{conflict}; {_ONE_EXECUTOR}'
        if self._live['dry_run']:
            return ''
        return self._why_not_command() or why_not_yet(self._verdicts())

    def _why_not_command(self) -> str:
        """Return why the robot must not be commanded now, or could not be; empty if it may."""
        if self._link is not None and (nothing := self._link.nothing_there()):
            return nothing
        if self._link is not None and (senders := self._link.senders()):
            return f'{senders}; {_ONE_SENDER}'
        # A gripper's controller that was never active has no action server: inactive says more.
        if refused := why_refused(self._verdicts()):
            return refused
        if self._link is not None and (without_subscribers := self._link.without_subscribers()):
            return f'{without_subscribers}; {_LISTENERS}'
        return self._why_led() or self._why_not_units()

    def _why_led(self) -> str:
        session = self._session
        if session is None or session.watch is None or session.loop is None:
            return ''
        return session.watch.why_led(session.loop.sent_s, time.monotonic())

    def _why_not_units(self) -> str:
        return '' if self._loop is None else self._units.why_not_start(self._loop.measured())

    def _on_stop(self, _: Trigger.Request, response: Trigger.Response) -> Complete:
        text = 'stopped: the robot rests and nothing is sent, until ~/start'
        if self._link is not None and (topics := self._link.repeated_holds()):
            text = (
                f'stopped: the robot rests; its hold is sent on {topics} on and on (hold: send): '
                'call ~/release before another node commands it'
            )
        if self._loop is not None:
            self._loop.stop()
            self.get_logger().info('stopped: holding')
        return self._at_rest(response, text)

    def _on_release(self, _: Trigger.Request, response: Trigger.Response) -> Complete:
        if self._loop is not None:
            self._loop.release()
            self.get_logger().info('released: once at rest nothing is published, until ~/start')
        return self._at_rest(response, 'released: nothing is published, until ~/start')

    def _at_rest(self, response: Trigger.Response, text: str) -> Complete:
        """Return what completes the answer to a stop, with this text where it succeeds."""
        session, loop = self._session, self._loop
        longest_s = 0.0 if session is None else session.rests_within_s
        end_s = time.monotonic() + longest_s

        def complete() -> bool:
            response.success = True
            if loop is None or loop is not self._loop:
                response.message = 'the executor is not active: nothing moves'
            elif loop.is_silent():
                response.message = text
            elif loop.is_started():
                response.success = False
                response.message = 'the robot was started again before it had come to rest'
            elif time.monotonic() > end_s:
                response.success = False
                response.message = (
                    f'the robot has not come to rest within {longest_s:g} s; the stop goes on, and '
                    '/diagnostics says what keeps it'
                )
            else:
                return False
            return True

        return complete

    def _answer_stops(self) -> None:
        self._person.look()
        if self._session is not None:
            self._episodes.look(self._now_ns(), self._live['episode_time_limit_s'])
        for service in self._stops:
            service.look()

    def _on_reset(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._forget_answers()
        if self._loop is not None:
            self._loop.reset(self._episode)
        else:
            self._latch.open()
        response.success, response.message = True, f'episode {self._episode}'
        return response

    def _forget_answers(self) -> None:
        """Begin an episode: no request in it, and no answer."""
        self._episode += 1
        self._last_refusal = ''
        self._episodes.begin(self._episode)

    def _begin_next(self) -> None:
        """Begin another episode where the last one has ended."""
        if self._episodes.is_over and self._loop is not None:
            self._forget_answers()
            self._loop.begin_episode(self._episode)

    def _publish_plan(self, plan: PlanRequest) -> bool:
        publisher = self._plan_publisher
        if publisher is None:
            return True
        publisher.publish(plan_to_message(plan))
        return True

    def _publish_status(self) -> None:
        self._heard.take()
        self._give_way_to_first()
        who = node_item(self._claim(), self._problem)
        loop, session = self._loop, self._session
        if loop is None or session is None:
            inactive = executor_status.inactive(self.lifecycle, self._problem)
            self._publish(self._diagnostics, [inactive, who])
            self._state.publish(inactive, None, '')
            return
        self._follow_parameters()
        status = loop.status()
        asked_s = status.executor.silent_since_s
        chunk_topic = self.resolve_topic_name(CHUNK_TOPIC)
        waits = status.executor.mode is not Mode.RUNNING
        nothing = self._link.nothing_there() if waits and self._link is not None else ''
        answers = executor_status.Answers(
            silent_s=None if asked_s is None else time.monotonic() - asked_s,
            policies=self.count_publishers(chunk_topic),
            topic=chunk_topic,
            unreadable=self._unreadable,
            last_refusal=self._last_refusal,
            policy_waits='' if nothing else self._policy_waits(chunk_topic),
        )
        facts = executor_status.Facts(
            status,
            answers,
            conflict=self._two_of_one(),
            without_subscribers=self._unsubscribed_outputs(),
            about_states=self._about_states(status.executor.reason),
            received=received_topics(self._robot),
            controllers=warnings_of(self._verdicts()),
            state_ages_ms={} if self._link is None else self._link.state_ages_ms(self._now_ns()),
            start_refused=nothing or self._would_refuse(loop) if waits else '',
        )
        control = executor_status.control(facts)
        self._state.publish(control, facts, self._episodes.outcome)
        if control.level > 0 and self._throttle.passes(control.text, time.monotonic()):
            log_item(self, control)
        grippers = self._link.gripper_status() if self._link is not None else []
        for gripper in grippers:
            if gripper.level > 0 and self._throttle.passes(gripper.text, time.monotonic()):
                log_item(self, gripper)
        rate_hz = self._fixed['control_rate_hz']
        timing = executor_status.timing(session.lateness(), rate_hz, status.counters)
        items = [control, executor_status.chunks(status, answers), timing, *grippers, who]
        self._publish(self._diagnostics, items)
        for change in loop.take_drivers():
            self._publish(self._report, [executor_status.driver(change)])
        for timed in loop.take_handovers():
            self._publish(self._report, [executor_status.seam(timed, self._match.column_names)])

    def _parameter_conflict(self, wanted: Mapping[str, Any]) -> str | None:
        """Return why these parameters do not go together, or with the policy; None when they do."""
        try:
            parameters = executor_parameters(wanted)
            if self._spec is not None:
                parameters.require_horizon(self._spec.real_horizon)
        except ValueError as error:
            return str(error)
        return None

    def _refuse_other_clock(self, parameters: Sequence[Parameter]) -> SetParametersResult:
        """Refuse `use_sim_time` while active: an activation chooses the clock that plans follow."""
        changes = any(
            parameter.name == 'use_sim_time'
            and parameter.value != self.get_parameter('use_sim_time').value
            for parameter in parameters
        )
        return SetParametersResult(
            successful=not (changes and self._session is not None),
            reason='use_sim_time cannot be changed while the node is active: deactivate it first',
        )

    def _follow_parameters(self, _: Sequence[Parameter] = ()) -> None:
        loop = self._loop
        if loop is None:
            return
        # First: what cannot be taken up is said once, and not tried at every status.
        before, self._live = self._live, values(self, EXECUTOR_PARAMETERS)
        wanted = self._live
        if wanted == before:
            return
        if wanted['dry_run'] != before['dry_run']:
            self._guarded('dry_run', loop.set_dry_run)(wanted['dry_run'])
        parameters = executor_parameters(wanted)
        if parameters != executor_parameters(before):
            self._guarded('parameters', loop.set_parameters)(parameters)

    def _claim(self) -> Claim:
        loop = self._loop
        if loop is None:
            return self._twins.claim(self.lifecycle)
        return self._twins.claim(
            self.lifecycle, moves=loop.has_started, topics=self._claimed_topics()
        )

    def _claimed_topics(self) -> list[str]:
        commanded = () if self.get_parameter('dry_run').value else self._commanded
        return [self.resolve_topic_name(PLAN_TOPIC), *commanded]

    def _require_no_other(self) -> None:
        """Refuse to go on beside an executor of this name, or on these topics."""
        mine = self._twins.claim(self.lifecycle, topics=self._claimed_topics())
        self._twins.require_first(mine, _OWN_NAMESPACE, self._commanded)

    def _give_way_to_first(self) -> None:
        """Give up what is configured where another executor was first and is heard only now."""
        if self.lifecycle not in ('inactive', 'active'):
            return
        mine = self._claim()
        if not mine.moves and (first := self._twins.first(mine, self._commanded)):
            self._withdraw(why_second(mine, first, _OWN_NAMESPACE))

    def _policy_waits(self, chunk_topic: str) -> str:
        """Repeat what a policy node that could answer says is missing; empty where nothing is."""
        said = [unlike] if (unlike := why_unlike(self, chunk_topic, chunk_type())) else []
        for name in dict.fromkeys(publisher_names(self, chunk_topic, 0)):
            observation, who = self._heard.of(name, _OBSERVATION), self._heard.of(name, ITEM)
            if who is not None and who.values.get('lifecycle') != 'active':
                said.append(f'{name} is {who.text}')
            elif observation is not None and observation.level > 0:
                missing = [v for k, v in observation.values.items() if k.startswith('refused.')]
                said.append(f'{name} waits: {join_truncated(dict.fromkeys(missing), "; ", 2)}')
        return '; '.join(said)

    def _two_of_one(self) -> str:
        """Name two executors that ask one policy, or policies that answer; empty without any."""
        if conflict := self._conflict():
            return f'two executors ask one policy: {conflict}'
        return self._several_policies()

    def _several_policies(self) -> str:
        topic = self.resolve_topic_name(CHUNK_TOPIC)
        found = sorted(one.describe() for one in self._twins.others() if topic in one.topics)
        return f'{len(found)} policies answer on {topic}: {", ".join(found)}' if found[1:] else ''

    def _conflict(self) -> str:
        plans = self._plan_publisher
        return '' if plans is None else other_publishers(self, [plans.topic_name])

    def _unsubscribed_outputs(self) -> str:
        link = self._link
        if link is None or self._live['dry_run']:
            return ''
        return link.without_subscribers()

    def _verdicts(self) -> Sequence[Verdict]:
        watch = self._session.watch if self._session is not None else None
        return () if watch is None else watch.verdicts

    def _now_ns(self) -> int:
        return self.get_clock().now().nanoseconds

    @property
    def _loop(self) -> ControlLoop | None:
        return self._session.loop if self._session is not None else None

    def _prefer_this_thread(self) -> None:
        for problem in prefer_this_thread(self._fixed['realtime_priority'], self._cpus):
            self._say(problem)

    def _every(self, period_s: float, name: str, callback: Any) -> Any:
        """A timer on the steady clock: it runs while `/clock` stands still."""
        return self.create_timer(period_s, self._guarded(name, callback), clock=self._steady)

    def _guarded(self, name: str, callback: Any) -> Any:
        return guarded(self._on_error, name, callback)

    def _on_exception(self, where: str, error: Exception) -> None:
        self.get_logger().error(f'{where}: {error}')
        if place := place_of_bug(error):
            self.get_logger().error(place)

    def _on_error(self, name: str, error: Exception) -> None:
        self._say(f'{name}: {type(error).__name__}: {error}')

    def _say(self, text: str) -> None:
        if self._throttle.passes(text, time.monotonic()):
            self.get_logger().warning(text)

    def _publish(self, publisher: Any, conditions: Sequence[StatusItem]) -> None:
        publisher.publish(
            to_message(
                conditions,
                node=self.get_fully_qualified_name(),
                hardware=self._robot.name if self._spec is not None else '',
                stamp=self.get_clock().now().to_msg(),
            )
        )


def main(args: list[str] | None = None) -> int:
    """`ros2 run vla_runtime executor_node --ros-args -p bundle:=... -p robot:=...`."""
    keep_to_udp(os.environ, share_folder() / 'config')
    return run_node(ExecutorNode, _NAME, args)
