"""Run the demo: start three processes, act as the operator, record everything, write a report.

Invariants:
- executables and YAML are those of the launch files;
- at any end (time, signal, crash) the executor is stopped first if it lives, then processes end in
  order and the bag is closed;
- the executor is inactive while the scene is exchanged;
- a file that cannot be written is reported at once and ends neither session nor motion.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import rclpy
import yaml
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from vla_runtime.files.atomic_write import WriteError, write_text
from vla_runtime.files.package_files import share_folder
from vla_runtime.nodes.node_main import MODULES
from vla_runtime.nodes.node_runner import make_executor
from vla_runtime.nodes.recorder.topic_recorder import TopicRecorder
from vla_runtime.processes.interrupt import Interrupt
from vla_runtime.processes.supervisor import Child, ChildDiedError, Supervisor
from vla_runtime.recording.frame_store import DEFAULT_FRAME_BYTES
from vla_runtime.recording.recording import Recording, RecordingLimits
from vla_runtime.robot.schema import Robot
from vla_tabletop.demo.console import say
from vla_tabletop.demo.operator import ANSWER_TIMEOUT_S, Operator, OperatorError, TransitionError
from vla_tabletop.demo.options import DemoOptions
from vla_tabletop.demo.telemetry import NO_VERDICT, Attempt, Telemetry
from vla_tabletop.demo.telemetry_listener import TelemetryListener
from vla_tabletop.sim.scene import FIRST_UNSEEN_SEED, sample_scene
from vla_tabletop.sim.tasks import TIME_LIMIT_S, Family, Task, sample_task

# --- Instructions: one a scene, drawn from a seed

_FAMILIES: tuple[Family, ...] = ('colour', 'position')


@dataclass(frozen=True)
class Assignment:
    """A scene and what to do in it."""

    seed: int
    task: Task


def assignments(seed: int) -> Iterator[Assignment]:
    """Scenes and tasks without end, a function of the seed (0 and up)."""
    rng = np.random.default_rng([seed, 7])
    number = 0
    while True:
        scene_seed = FIRST_UNSEEN_SEED + 1000 * seed + number
        blocks = sample_scene(scene_seed).block_xy_m
        family = _FAMILIES[number % len(_FAMILIES)]
        yield Assignment(scene_seed, sample_task(rng, blocks, family, 'training'))
        number += 1


# --- Status line: overwritten on a terminal, repeated elsewhere

_TERMINAL_PERIOD_S = 0.2
_PLAIN_PERIOD_S = 2.0


class StatusLine:
    """Shows a session's progress on standard output.

    `begun_s` is its beginning on the steady clock, `seconds` its planned duration.
    """

    def __init__(self, telemetry: Telemetry, seconds: float, begun_s: float) -> None:
        self._telemetry = telemetry
        self._seconds = seconds
        self._begun_s = begun_s
        self._terminal = sys.stdout.isatty()
        self._due_s = 0.0

    def show(self, instruction: str) -> None:
        """Print it when due."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + (_TERMINAL_PERIOD_S if self._terminal else _PLAIN_PERIOD_S)
        text = self.text(instruction, now_s - self._begun_s)
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            say(f'\r\033[K{text[:width]}', end='')
        else:
            say(text)

    def end(self) -> None:
        if self._terminal:
            say('')

    def text(self, instruction: str, elapsed_s: float) -> str:
        telemetry = self._telemetry
        control = telemetry.executor.get('control', {})
        p99_ms = telemetry.tick_p99_ms.rows
        newest = telemetry.inferences[-1] if telemetry.inferences else None
        parts = [
            f'{min(elapsed_s, self._seconds):5.1f} s of {self._seconds:g}',
            f'chunk {len(telemetry.inferences)}',
            f'replan {control.get("replan_interval", "-")}',
            f'cache {newest.cache if newest else "-"}',
            f'{newest.milliseconds["total"]:.0f} ms' if newest else '- ms',
            f'tick p99 {p99_ms[-1][0]:.2f} ms late' if p99_ms else 'tick p99 - ms late',
            f'starved {telemetry.total("starved_ticks")}',
            f'done {telemetry.completed} of {telemetry.judged}',
            f'{control.get("kind", "-")}: {instruction}',
        ]
        return ' | '.join(parts)


_NODES = ('vla_policy', 'vla_executor', 'tabletop')
_START_TIMEOUT_S = 15.0
# What a verdict may take beyond the task's own time limit.
_VERDICT_SLACK_S = 4.0
# Longest wait after Ctrl-C; an executor without an answer by then is killed.
_STOP_TIMEOUT_S = 10.0


class Interrupted(Exception):  # noqa: N818 - it is a wish, not an error
    """The person pressed Ctrl-C, or another signal asked for the end."""


@dataclass
class DemoResult:
    """Result of a session; `failure` is '' for a normal end or Ctrl-C.

    `unwritten`: why files are missing or end early; `seconds`: of the closed loop.
    """

    telemetry: Telemetry = field(default_factory=Telemetry)
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: str = ''
    unwritten: list[str] = field(default_factory=list)
    seconds: float = 0.0
    joint_units: dict[str, str] = field(default_factory=dict)


def run_session(
    options: DemoOptions, interrupt: Interrupt, say: Callable[[str], None]
) -> DemoResult:
    """Run the demo; return whatever happened, for the report.

    `interrupt` still handles signals after the return; `say` prints a line.
    """
    robot = options.load_robot()
    result = DemoResult(joint_units={joint.in_messages: joint.unit for joint in robot.joints})
    try:
        _Session(options, robot, result, interrupt, say).run()
    except Interrupted:
        # No failure; `interrupt` knows the signal.
        pass
    except (ChildDiedError, OperatorError) as error:
        result.failure = str(error)
    return result


class _Session:
    def __init__(
        self,
        options: DemoOptions,
        robot: Robot,
        result: DemoResult,
        interrupt: Interrupt,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._robot = robot
        self._result = result
        self._interrupt = interrupt
        self._say = say
        self._assignments = assignments(options.seed)
        self._supervisor = Supervisor(options.out / 'log', self._note_unwritten)
        # Whatever becomes of it, the demo goes on.
        self._view: Child | None = None
        self._begun_s: float | None = None
        # Deadline of the robot's hold; None before the end.
        self._give_up_s: float | None = None

    def run(self) -> None:
        recording = Recording(self._options.bag, RecordingLimits(), self._note_unwritten)
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
        node = Node('vla_demo', namespace=self._options.namespace)
        executor = make_executor()
        executor.add_node(node)
        done = threading.Event()

        def spin() -> None:
            while not done.is_set():
                executor.spin_once(timeout_sec=0.1)

        spinner = threading.Thread(target=spin, name='ros', daemon=True)
        spinner.start()
        try:
            with self._supervisor:
                self._with_graph(node, recording)
        finally:
            done.set()
            spinner.join()
            recording.close()
            executor.shutdown()
            node.destroy_node()
            rclpy.try_shutdown()

    def _with_graph(self, node: Node, recording: Recording) -> None:
        telemetry = self._result.telemetry

        def on_error(where: str, error: Exception) -> None:
            telemetry.problems.append(f'recorder, {where}: {error!r}')

        listener = TelemetryListener(self._robot, telemetry, node.get_namespace())
        recorder = TopicRecorder(
            node,
            self._robot,
            recording,
            images=self._options.images,
            frame_bytes=DEFAULT_FRAME_BYTES,
            on_error=on_error,
            listeners=listener.listeners,
            on_reduced=listener.on_reduced,
        )
        operator = Operator(node, self._check)
        self._require_nobody_else(node, operator)
        first = next(self._assignments)
        self._start_nodes(first)
        self._say('starting policy, executor and tabletop robot ...')
        if self._options.view_port is not None:
            self._start_view(self._options.view_port)
        self._configure(operator)
        operator.activate('vla_policy')
        self._result.parameters = {name: operator.parameters(name) for name in _NODES}
        self._write_parameters()
        try:
            self._drive(operator, first)
        finally:
            self._end_motion(operator)
            if self._view is not None:
                self._view.stop()
            recorder.finish()

    def _configure(self, operator: Operator) -> None:
        try:
            operator.configure('vla_policy', 'vla_executor')
        except TransitionError as error:
            # Ended, so that its output is complete.
            child = self._supervisor.end(error.node.removeprefix('vla_'))
            raise OperatorError(f'{error}; {child.last_output()}') from error

    def _end_motion(self, operator: Operator) -> None:
        """End all motion and judging; the robot holds from here on."""
        self._give_up_s = time.monotonic() + _STOP_TIMEOUT_S
        if self._begun_s is not None:
            self._result.seconds = time.monotonic() - self._begun_s
        operator.instruct('')
        # Nothing to stop if the executor is dead; one that hangs is killed.
        with suppress(OperatorError, ChildDiedError):
            self._stop_motion(operator)

    def _stop_motion(self, operator: Operator) -> None:
        """Make the executor hold, and read its counters until then."""
        operator.trigger('vla_executor/stop')
        telemetry = self._result.telemetry
        before = telemetry.executor_reports

        def heard() -> bool:
            mode = telemetry.executor.get('control', {}).get('mode')
            return telemetry.executor_reports > before and mode != 'running'

        operator.wait_for(heard, 'the status of vla_executor after its stop', ANSWER_TIMEOUT_S)

    def _require_nobody_else(self, node: Node, operator: Operator) -> None:
        """Refuse to command a robot that others already use."""
        topics = [node.resolve_topic_name(output.topic) for output in self._robot.outputs]
        # Discovery on one machine; the recorder's own subscriptions are there at once.
        quiet_until_s = time.monotonic() + 1.0
        operator.wait_for(lambda: time.monotonic() > quiet_until_s, 'discovery', 5.0)
        for topic in topics:
            if node.count_subscribers(topic) > 1 or node.count_publishers(topic) > 0:
                raise OperatorError(
                    f'somebody else uses {topic}: another demo, or a robot. The demo must not '
                    'command it: give it another namespace (--namespace demo2) or ROS_DOMAIN_ID'
                )

    def _start_nodes(self, first: Assignment) -> None:
        options, config = self._options, share_folder() / 'config'
        common = [*_served(options), '-p', f'robot:={self._robot.file}']
        policy = list(common)
        if options.server is None:
            policy += ['-p', f'backend:={options.backend}', '-p', f'device:={options.device}']
        else:
            policy += ['-p', 'backend:=remote', '-p', f'jpeg_quality:={options.jpeg_quality}']
        if options.cfg_beta is not None:
            policy += ['-p', f'cfg_beta:={options.cfg_beta:f}']
        executor = list(common)
        if options.replan_interval is not None:
            executor += ['-p', f'replan_interval:={options.replan_interval}']
        tabletop = ['-p', f'robot:={self._robot.file}', '-p', f'seed:={first.seed}']
        for name, arguments in (
            ('tabletop', tabletop),
            ('policy', ['--params-file', str(config / 'policy.yaml'), *policy]),
            ('executor', ['--params-file', str(config / 'executor.yaml'), *executor]),
        ):
            self._supervisor.start(
                name,
                MODULES[f'{name}_node'],
                ['--ros-args', '-r', f'__ns:=/{options.namespace}', *arguments],
            )

    def _start_view(self, port: int) -> None:
        namespace = f'/{self._options.namespace}'
        arguments = ['view', '--namespace', namespace, '--robot', str(self._robot.file)]
        log = self._options.out / 'log' / 'view.log'
        self._view = Child(
            'view', 'vla_runtime', [*arguments, '--port', str(port)], log, self._note_unwritten
        )
        self._say(f'page: http://127.0.0.1:{port}')

    def _drive(self, operator: Operator, first: Assignment) -> None:
        assignment, is_first = first, True
        self._begun_s = time.monotonic()
        line = StatusLine(self._result.telemetry, self._options.seconds, self._begun_s)
        while self._left_s() > 0.0:
            if not is_first:
                operator.set_parameter('tabletop', 'seed', assignment.seed)
                begin_ns = time.time_ns()
                operator.trigger('tabletop/reset')
                self._result.telemetry.resets.append((begin_ns, time.time_ns()))
            operator.activate('vla_executor')
            self._carry_out(operator, assignment, line)
            self._stop_motion(operator)
            operator.deactivate('vla_executor')
            assignment, is_first = next(self._assignments), False
        line.end()

    def _carry_out(self, operator: Operator, assignment: Assignment, line: StatusLine) -> None:
        instruction = assignment.task.instruction
        attempt = Attempt(instruction, assignment.seed, time.time_ns())
        self._result.telemetry.attempts.append(attempt)
        operator.instruct(instruction)
        self._start_motion(operator)
        limit_s = TIME_LIMIT_S[assignment.task.family] + _VERDICT_SLACK_S
        left_s = self._left_s()
        end_s = time.monotonic() + min(limit_s, left_s)

        def over() -> bool:
            line.show(instruction)
            return bool(attempt.outcome) or time.monotonic() > end_s

        operator.wait_for(over, 'a verdict', limit_s + _VERDICT_SLACK_S)
        if not attempt.outcome and limit_s <= left_s:
            # Its time is up: a robot that hangs has failed.
            attempt.outcome, attempt.end_ns = NO_VERDICT, time.time_ns()

    def _start_motion(self, operator: Operator) -> None:
        """`~/start` needs fresh joint states, which may be a moment away."""
        end_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                operator.trigger('vla_executor/start')
                return
            except OperatorError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.1)

    def _left_s(self) -> float:
        assert self._begun_s is not None
        return self._begun_s + self._options.seconds - time.monotonic()

    def _check(self) -> None:
        if self._give_up_s is not None:
            # At the end only the executor must be alive.
            self._supervisor.check('executor')
            if time.monotonic() > self._give_up_s:
                raise OperatorError(f'no hold within {_STOP_TIMEOUT_S:g} s')
            return
        if self._interrupt.wanted:
            self._say('interrupted: ending in order')
            raise Interrupted
        self._supervisor.check()

    def _write_parameters(self) -> None:
        """The parameters in force, as a file that starts the same nodes again."""
        prefix = f'/{self._options.namespace}'.rstrip('/')
        document = {
            f'{prefix}/{name}': {'ros__parameters': values}
            for name, values in self._result.parameters.items()
        }
        try:
            write_text(
                self._options.out / 'parameters.yaml', yaml.safe_dump(document, sort_keys=True)
            )
        except WriteError as error:
            self._note_unwritten(str(error))

    def _note_unwritten(self, text: str) -> None:
        """Note a log that cannot be written; any thread may call."""
        self._result.unwritten.append(text)
        self._result.telemetry.problems.append(text)
        self._say(f'error: {text}')


def _served(options: DemoOptions) -> list[str]:
    """Return the parameters, which both nodes have, of where the policy is."""
    if options.server is None:
        return ['-p', f'bundle:={options.bundle}']
    given = {
        'server': options.server.url,
        'server_key_file': options.key_file,
        'server_ca_file': options.ca_file,
    }
    return [word for name, value in given.items() if value for word in ('-p', f'{name}:={value}')]
