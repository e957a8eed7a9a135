"""The policy node: a lifecycle node that answers the executor's requests with action chunks.

Topics in: the robot file's cameras and joint states, `~/instruction` (std_msgs/String, reliable,
transient local), `committed_plan` (the executor's request; `messages.trajectories` has its form).
Topics out: `action_chunk`, `~/report` (one DiagnosticArray a chunk),
`~/current_instruction` and `~/description` (String, transient local), `/diagnostics` (every second,
and at once when there is news). Service `~/reset`: a new episode. `typed_interface` adds `~/state`
and services of `vla_interfaces`.

Invariants:
- configure loads and warms up, activate opens, deactivate waits for what is under way, cleanup
  frees the memory; a transition that fails logs its cause;
- inference runs in threads of its own, so no callback waits for it; as many requests as the policy
  takes at once are answered in their order, and of more the newest;
- nothing is published for a request from before a reset, a deactivation or another episode, nor an
  answer to an instruction that was changed since: its request is answered anew;
- parameters are read at the start of each inference;
- the instruction is a parameter, which a message on `~/instruction` sets as well, in any state;
- of two policy nodes of one name the second is not configured; of two on one topic it is not
  activated;
- no exception leaves a callback.
"""

from __future__ import annotations

import sys

if __name__ == '__main__':
    # Before what takes seconds to import: a Ctrl-C meanwhile ends the process quietly.
    from vla_runtime.nodes.node_main import run_module

    sys.exit(run_module('policy_node'))

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic_ns
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.subscription import Subscription
from std_msgs.msg import String
from std_srvs.srv import Trigger

from vla_runtime.engines.preflight import unused_gpu
from vla_runtime.files.package_files import share_folder
from vla_runtime.inference.chunk_policy import ChunkPolicy
from vla_runtime.inference.packed import DroppedError
from vla_runtime.messages.diagnostics import Level, StatusItem
from vla_runtime.messages.trajectories import (
    chunk_to_message,
    chunk_type,
    message_to_plan,
    plan_type,
    spoken,
)
from vla_runtime.nodes.graph_faults import several_publishers
from vla_runtime.nodes.managed_node import ManagedNode, place_of_bug
from vla_runtime.nodes.node_parameters import refuse_unknown
from vla_runtime.nodes.node_runner import guarded, run_node
from vla_runtime.nodes.parameters import declare, values
from vla_runtime.nodes.policy import status as policy_status
from vla_runtime.nodes.policy.description import Run, describe
from vla_runtime.nodes.policy.incoming_requests import IncomingRequests
from vla_runtime.nodes.policy.instruction import Instruction
from vla_runtime.nodes.policy.loading import load_policy
from vla_runtime.nodes.policy.parameters import (
    INSTRUCTION,
    POLICY_PARAMETERS,
    REMOTE,
    limits_from,
)
from vla_runtime.nodes.policy.prepared_settings import PreparedSettings
from vla_runtime.nodes.policy.responder import Responder
from vla_runtime.nodes.policy.robot_policy import Answer
from vla_runtime.nodes.policy.settings import check_answerable, settings_from
from vla_runtime.nodes.policy.subscriptions import Sensors, make_synchronizer
from vla_runtime.nodes.policy.typed_interface import PolicyFacts, TypedInterface, empty_plan
from vla_runtime.nodes.polled_topics import HeardStatus
from vla_runtime.nodes.qos import LATCHED, RELIABLE, REPEATED
from vla_runtime.nodes.status_board import StatusBoard
from vla_runtime.nodes.twins import ITEM, Claim, Twins, node_item, why_second
from vla_runtime.nodes.worker import LatestJobWorker
from vla_runtime.processing.fast_tokens import AnswerError
from vla_runtime.remote.policy import RemotePolicy
from vla_runtime.robot.file import find_robot, load_robot
from vla_runtime.robot.match import RobotMatch
from vla_runtime.robot.schema import Robot, received_topics
from vla_runtime.sensors.synchronizer import Synchronizer
from vla_runtime.types import PlanRequest

_NAME = 'vla_policy'
_REQUEST_TOPIC = 'committed_plan'
_OWN_NAMESPACE = 'give this one a namespace of its own (namespace:=left at launch)'
# A waiting request is tried again when data comes, and this often for a clock that starts again.
_POLL_S = 0.05
# A request that waits no longer than this, for the next frame usually, is nothing to report.
_PATIENCE_NS = 200_000_000
# Cameras and joint states that are there are found and heard within this time of activation.
_FIRST_MESSAGES_NS = 1_000_000_000
# Longest that the inference thread keeps the interpreter from callbacks; Python's default is 5 ms.
_SWITCH_INTERVAL_S = 0.001


class PolicyNode(ManagedNode):
    """The policy's lifecycle node; see the module."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self._policy: ChunkPolicy | None = None
        self._robot: Robot | None = None
        self._match: RobotMatch | None = None
        self._run: Run | None = None
        self._synchronizer: Synchronizer | None = None
        self._responder: Responder | None = None
        self._prepared: PreparedSettings | None = None
        self._sensors: Sensors | None = None
        self._worker: LatestJobWorker[PlanRequest] | None = None
        self._requests: Subscription | None = None
        self._incoming = IncomingRequests()
        self._opened_ns = 0
        # Counts resets and activations: an answer from before the last one is not published.
        self._generation = 0
        self._generation_lock = threading.Lock()
        self._episode_over = False
        self._by_content: tuple[str, ...] = ()
        self._said = ''
        # Inferences since the last report whose chunks were not published.
        self._discarded = 0
        # Answers since the start of the node whose tokens were no chunk.
        self._refused_answers = 0
        self._heard = HeardStatus(self, (ITEM,))
        self._twins = Twins(self, self._heard)

        declare(self, POLICY_PARAMETERS, self._check_parameters)
        refuse_unknown(self, POLICY_PARAMETERS)
        group = MutuallyExclusiveCallbackGroup()
        self._status = StatusBoard(self, self._status_and_state, group)
        self._chunks = self.create_lifecycle_publisher(chunk_type(), 'action_chunk', RELIABLE)
        self._reports = self.create_lifecycle_publisher(DiagnosticArray, '~/report', RELIABLE)
        self._descriptions = self.create_publisher(String, '~/description', LATCHED)
        self.create_service(
            Trigger,
            '~/reset',
            guarded(self._on_exception, '~/reset', self._on_reset),
            callback_group=group,
        )
        self._instruction = Instruction(self, self._on_instruction, self._on_exception)
        self._typed = TypedInterface(
            self,
            self._instruction,
            self._on_exception,
            self._request_chunk,
            self._missing,
            active=lambda: self._worker is not None,
        )
        # Not before ROS 2 Iron: there a chunk on its way out may follow the answer to a change.
        if hasattr(self, 'add_post_set_parameters_callback'):
            self.add_post_set_parameters_callback(self._await_publication)
        self._say(Level.OK, 'unconfigured')

    def destroy_node(self) -> None:
        self._heard.close()
        super().destroy_node()

    def _load(self) -> None:
        self._say(Level.OK, 'loading the policy')
        given = values(self, POLICY_PARAMETERS)
        if not given['robot']:
            raise ValueError("parameter 'robot' is not set; give it as -p robot:=PATH")
        settings = settings_from(given)
        self._require_no_other()
        self.get_logger().info(f'loading {given["server"] or given["bundle"]} ...')
        if given['backend'] != REMOTE and (warning := unused_gpu(given['device'])):
            self.get_logger().warning(warning)
        robot = load_robot(find_robot(given['robot'], share_folder() / 'config' / 'robots'))
        loaded = load_policy(given, robot, settings, self._on_server_news)
        self._policy, self._match, run = loaded.policy, loaded.match, loaded.run
        self._run = run
        cameras = self._match.cameras.items()
        self._by_content = tuple(name for name, one in cameras if one.stamp == 'receive')
        milliseconds = self._policy.warm_up()
        self._robot, self._status.hardware = robot, robot.name
        described = describe(
            self._policy.spec, robot, self._match, run, topic_name=self.resolve_topic_name
        )
        self._descriptions.publish(String(data=described))
        self.get_logger().info(
            f"policy '{self._policy.spec.name}' on robot '{robot.name}', {run.backend} in "
            f'{run.precision} on {run.device}, {run.threads} thread(s)'
            + (f' at {run.server}' if run.server else '')
            + f': ready in {milliseconds:.0f} ms'
            + (f' (chosen: {loaded.why})' if loaded.why else '')
            + f'; chunks and plans are {spoken()}'
        )

    def _open(self) -> None:
        self._require_no_other()
        self._say(Level.OK, 'preparing settings')
        assert self._policy is not None and self._robot is not None and self._match is not None
        limits = limits_from(values(self, POLICY_PARAMETERS))
        self._synchronizer = make_synchronizer(self, self._robot, self._match, limits)
        self._responder = Responder(
            self._policy,
            self._match,
            self._synchronizer,
            now_ns=self._ros_time_ns(),
            steady_ns=monotonic_ns(),
        )
        self._prepared = PreparedSettings(self._policy, values(self, POLICY_PARAMETERS))
        self._instruction.read_by(self._policy)
        self._begin_generation()
        self._worker = LatestJobWorker(
            self._attempt,
            lambda error: self._on_exception('inference', error),
            poll_s=_POLL_S,
            name='inference',
        )
        self._sensors = Sensors(
            self,
            self._robot,
            self._match,
            self._synchronizer,
            on_data=self._worker.poke,
            on_error=self._on_exception,
        )
        self._requests = self.create_subscription(
            plan_type(),
            _REQUEST_TOPIC,
            guarded(self._on_exception, _REQUEST_TOPIC, self._on_request),
            REPEATED,
        )
        self._opened_ns = monotonic_ns()
        self._say(Level.OK, f'waiting for a request on {_REQUEST_TOPIC}')

    def _shut(self) -> None:
        """Undo `_open`, once an inference in progress is over."""
        self._instruction.read_by(None)
        self._begin_generation()
        if self._requests is not None:
            self.destroy_subscription(self._requests)
        self._requests = None
        if self._sensors is not None:
            self._sensors.destroy()
        if self._worker is not None and self._responder is not None:
            self._worker.stop()
            self._responder.drain()
        self._sensors = self._worker = self._responder = self._synchronizer = None
        self._prepared = None
        self._status.drop('settings')
        self._status.drop('observation')
        self._status.drop('requests')

    def _free(self) -> None:
        policy, self._policy = self._policy, None
        self._robot = self._match = self._run = None
        if policy is not None:
            policy.close()
        self._status.drop('server')

    def _on_server_news(self, text: str) -> None:
        """Tell what became of the server; in any thread."""
        if isinstance(self._policy, RemotePolicy):
            self._status.set(policy_status.server(self._policy, text))
        if self._worker is not None:
            self._worker.poke()

    def _on_instruction(self) -> None:
        if self._worker is not None:
            self._worker.poke()

    def _on_request(self, message: Any) -> None:
        arrived_ns = monotonic_ns()
        worker = self._worker
        if worker is None:
            return
        request = self._incoming.receive(message_to_plan(message), arrived_ns)
        self._typed.note_request()
        if request is not None:
            worker.submit(request)

    def _request_chunk(self) -> PlanRequest | None:
        """Ask for a chunk for no executor; None while not active."""
        worker, match = self._worker, self._match
        if worker is None or match is None:
            return None
        plan = empty_plan(
            match.action_names,
            match.action_kinds,
            episode=self._incoming.episode or 0,
            now_ns=self._ros_time_ns(),
        )
        request = self._incoming.receive(plan, monotonic_ns())
        assert request is not None
        worker.submit(request)
        return request

    def _missing(self) -> list[str]:
        """What keeps a request from being answered now, a sentence each."""
        responder = self._responder
        if responder is None:
            return [f'the policy node is {self.lifecycle}']
        missing = responder.readiness(self._ros_time_ns(), monotonic_ns(), self._instruction.text)
        return list(dict.fromkeys(item.text for item in missing))

    def _on_reset(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._worker is None or self._synchronizer is None:
            response.message = 'not active: there is no episode to end'
            return response
        self._worker.drop()
        self._begin_generation()
        self._synchronizer.clear()
        response.success = True
        response.message = 'a new episode begins with the next request'
        return response

    def _begin_generation(self) -> None:
        with self._generation_lock:
            self._generation += 1
            self._episode_over = True
        self._incoming.forget()

    def _attempt(self, _: PlanRequest) -> bool:
        """Begin the answers to all requests that wait, oldest first; False where one must wait."""
        while self._incoming.next() is not None:
            if not self._begin_answer():
                return False
        return True

    def _begin_answer(self) -> bool:
        responder, synchronizer = self._responder, self._synchronizer
        prepared, policy = self._prepared, self._policy
        assert responder is not None and synchronizer is not None
        assert prepared is not None and policy is not None
        if not responder.has_room:
            return False
        now = values(self, POLICY_PARAMETERS)
        # What this drops waits again, and is older than what came since.
        policy.turn_to(now[INSTRUCTION])
        request = self._incoming.next()
        if request is None:
            return True
        with self._generation_lock:
            generation, episode_over, self._episode_over = (
                self._generation,
                self._episode_over,
                False,
            )
        if responder.begin(request.episode, anew=episode_over):
            self._discarded = 0
        self._incoming.begin(request, now[INSTRUCTION])
        try:
            given = prepared.of(now)
            synchronizer.limits = limits_from(given)
            settings = prepared.settings
            self._incoming.most = policy.open_requests(settings)
            # The time last, so that few messages come between it and the selection of frames.
            now_ns = self._ros_time_ns()
            answer = responder.answer(request, given[INSTRUCTION], settings, now_ns=now_ns)
        except Exception as error:
            self._incoming.fail(request)
            self._typed.take_error(request, error)
            # What fails with the settings in force may run with those that wait.
            self._prepare(prepared)
            raise
        if not isinstance(answer, Future):
            self._incoming.wait(request)
            patient_ns = request.arrived_ns + _PATIENCE_NS, self._opened_ns + _FIRST_MESSAGES_NS
            if monotonic_ns() > max(patient_ns):
                self._status.set(policy_status.observation(answer))
            return False
        answer.add_done_callback(lambda done: self._on_answer(request, done, generation, given))
        # After this answer, in the time until the next request, which waits for one graph at most.
        self._prepare(prepared)
        return True

    def _prepare(self, prepared: PreparedSettings) -> None:
        try:
            if milliseconds := prepared.prepare():
                self.get_logger().info(f'new settings prepared in {milliseconds:.0f} ms')
        except Exception as error:
            text = (
                f'{", ".join(prepared.refused)} cannot change: {error}. All live settings stay as '
            )
            text += 'they were until one is changed again: set back what does not fit'
            self._status.set(StatusItem('settings', Level.ERROR, text))
        if not prepared.refused:
            self._status.drop('settings')

    def _on_answer(
        self,
        request: PlanRequest,
        answer: Future[Answer],
        generation: int,
        given: Mapping[str, Any],
    ) -> None:
        """Publish an answer, and make room again; in the inference thread or the pipeline's."""
        worker = self._worker
        try:
            # Once a reset is answered, no chunk from before it follows.
            with self._generation_lock:
                current = request.episode == self._incoming.episode
                if generation == self._generation and current:
                    done = answer.result()
                    if self._is_superseded(done.observation.instruction):
                        self._discarded += 1
                        self._incoming.turn_to(self._instruction.text, request)
                        if worker is not None:
                            # A job of its own, whatever the worker is about to finish.
                            worker.submit(replace(request))
                    else:
                        self._publish(done, given)
                        self._incoming.answer(request, monotonic_ns())
        except DroppedError:
            # Another instruction: it is answered anew, before newer ones.
            self._incoming.wait(request)
        except Exception as error:
            self._incoming.fail(request)
            self._typed.take_error(request, error)
            self._on_exception('inference', error)
        if worker is not None:
            worker.poke()

    def _await_publication(self, _: object) -> None:
        """Once a change is answered, no chunk of the instruction before follows."""
        with self._generation_lock:
            pass

    def _is_superseded(self, instruction: str) -> bool:
        policy = self._policy
        reads = policy is not None and policy.reads_instruction
        return reads and instruction != self._instruction.text

    def _publish(self, answer: Answer, given: Mapping[str, Any]) -> None:
        if not self._typed.takes(answer):
            self._chunks.publish(chunk_to_message(answer.chunk, answer.header))
        overhead_ms = answer.overhead_ms(monotonic_ns())
        self._typed.note_answer(answer, overhead_ms)
        live = {row.name: given[row.name] for row in POLICY_PARAMETERS if not row.read_only}
        discarded, self._discarded = self._discarded, 0
        report = policy_status.report(answer, live, overhead_ms, self._by_content, discarded)
        self._reports.publish(self._status.to_message([report]))
        self._status.set(policy_status.observation(()))
        self._say(Level.OK, report.text)

    def _status_and_state(self) -> Iterator[StatusItem]:
        yield from self._sensor_status()
        self._typed.publish(self._facts())

    def _facts(self) -> PolicyFacts:
        policy, run, synchronizer = self._policy, self._run, self._synchronizer
        now_ns = self._ros_time_ns()
        cameras = () if synchronizer is None else synchronizer.camera_statuses(now_ns)
        return PolicyFacts(
            lifecycle=self.lifecycle,
            text=self._problem or self._said,
            policy='' if policy is None else policy.spec.name,
            run={}
            if run is None
            else {name: getattr(run, name) for name in ('backend', 'device', 'precision')},
            episode=self._incoming.episode or 0,
            requests_replaced=self._incoming.superseded,
            ages_s={camera.name: camera.age_s for camera in cameras},
        )

    def _sensor_status(self) -> Iterator[StatusItem]:
        self._instruction.follow()
        self._heard.take()
        self._give_way_to_first()
        yield node_item(self._claim(self.lifecycle), self._problem)
        if isinstance(policy := self._policy, RemotePolicy):
            self._status.set(policy_status.server(policy))
        synchronizer, responder = self._synchronizer, self._responder
        if synchronizer is None or responder is None:
            return
        if monotonic_ns() - self._opened_ns < _FIRST_MESSAGES_NS:
            return
        if (sensors := self._sensors) is not None:
            synchronizer.note_silences(sensors.silences())
        now_ns = self._ros_time_ns()
        missing = responder.readiness(now_ns, monotonic_ns(), self._instruction.text)
        self._status.set(policy_status.observation(missing))
        several = several_publishers(self, self.resolve_topic_name(_REQUEST_TOPIC))
        self._status.set(policy_status.requests(several))
        robot, match = self._robot, self._match
        assert robot is not None and match is not None
        for status in synchronizer.camera_statuses(now_ns):
            yield policy_status.camera(status, match.cameras[status.name].stamp)
        yield policy_status.joints(
            synchronizer.joint_problems(now_ns),
            synchronizer.joint_warnings(),
            synchronizer.clock_jumps,
            received_topics(robot),
        )

    def _claim(self, lifecycle: str, *, is_opened: bool = False) -> Claim:
        is_active = is_opened or self._responder is not None
        return self._twins.claim(lifecycle, topics=[self._chunks.topic_name] if is_active else [])

    def _require_no_other(self) -> None:
        """Refuse to go on beside a policy node of this name; to be activated, on this topic."""
        is_opened = self.lifecycle == 'activating'
        mine = self._claim(self.lifecycle, is_opened=is_opened)
        self._twins.require_first(mine, _OWN_NAMESPACE)

    def _give_way_to_first(self) -> None:
        """Give up the work where another node was first and is heard only now."""
        if self.lifecycle in ('inactive', 'active'):
            mine = self._claim(self.lifecycle)
            if first := self._twins.first(mine):
                self._withdraw(why_second(mine, first, _OWN_NAMESPACE))

    def _check_parameters(self, given: Mapping[str, Any]) -> str | None:
        """Return why this policy cannot run with these values, or None; free of side effects."""
        try:
            settings = settings_from(given)
            policy = self._policy
            if policy is not None:
                check_answerable(policy.spec, settings)
                policy.check(settings)
        except ValueError as error:
            return str(error)
        return None

    def _say(self, level: Level, text: str) -> None:
        counts = {
            'requests_replaced': self._incoming.superseded,
            'refused_answers': self._refused_answers,
        }
        self._said = text
        self._status.set(StatusItem('inference', level, text, counts))

    def _on_state(self, label: str) -> None:
        self._say(Level.OK, label)

    def _on_exception(self, where: str, error: Exception) -> None:
        if isinstance(error, AnswerError):
            self._refused_answers += 1
        self._say(Level.ERROR, f'{where}: {error}')
        if place := place_of_bug(error):
            self.get_logger().error(place, throttle_duration_sec=10.0)

    def _ros_time_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)


def main(args: list[str] | None = None) -> int:
    """`ros2 run vla_runtime policy_node --ros-args -p bundle:=... -p robot:=...`."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    return run_node(PolicyNode, _NAME, args)
