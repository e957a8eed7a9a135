"""A real ROS graph for tests: isolated domain, real processes, waiting for conditions.

Every test process has a domain of its own on this machine only. A test waits for a condition and
never for a time; that nothing was published is shown by a later message that did arrive.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from discovery import by_udp
from lifecycle_msgs.srv import ChangeState, GetState
from paths import ROOT
from rcl_interfaces.msg import SetParametersResult
from rcl_interfaces.srv import SetParameters
from rclpy.exceptions import InvalidHandle
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from std_srvs.srv import Trigger

from vla_runtime.nodes.middleware import REACH_VARIABLES, stay_on_this_machine
from vla_runtime.nodes.service_call import ServiceCall, TransitionCall
from vla_runtime.processes.domains import claim_domain
from vla_runtime.processes.parent_death import dies_with_this_process

# Ten seconds of commands at 100 Hz, of which a starved test must lose none.
RELIABLE = QoSProfile(depth=1000, reliability=ReliabilityPolicy.RELIABLE)
LATCHED = QoSProfile(
    depth=1,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)
SENSOR = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)

# Discovery alone can take seconds, and other tests may have the machine's cores.
TIMEOUT_S = 180.0
# Named at the end of the run: a message that was lost, or a machine that is far too busy.
_SLOW_S = 20.0
# Longer than a trigger takes: a second one must not be carried out behind a slow answer's back.
# Any other call may be carried out twice.
_TRIGGER_AGAIN_S, _ASK_AGAIN_S = 40.0, 2.0
# Of every graph that is open, because one may wait for what another has started.
_running: list[Process] = []


def isolate() -> None:
    """Choose this process's domain; its children inherit it. Call before `rclpy.init`."""
    os.environ['ROS_DOMAIN_ID'] = str(_own_domain())
    for reach in REACH_VARIABLES:
        os.environ.pop(reach, None)
    stay_on_this_machine(os.environ)
    os.environ.setdefault('AMENT_PREFIX_PATH', sys.prefix)


@functools.cache
def _own_domain() -> int:
    return claim_domain()


class Graph:
    """A node of the test's own, spun in a thread, and the processes that the test started.

    Args:
        name: name of that node.
        joining: around its joining the graph.
    """

    def __init__(
        self, name: str = 'test', joining: AbstractContextManager[None] | None = None
    ) -> None:
        self._context = rclpy.Context()
        with joining or nullcontext():
            rclpy.init(context=self._context)
            self.node = Node(name, context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._changed = threading.Condition()
        self._closing = False
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()
        self._processes: list[Process] = []
        self._clients: dict[str, Any] = {}

    def _spin(self) -> None:
        while not self._closing:
            try:
                self._executor.spin_once(timeout_sec=0.1)
            except ExternalShutdownException:
                return
            except InvalidHandle:
                # A test has destroyed a publisher or client between two spins; go on without it.
                continue
            except Exception as error:
                # Told by `wait_for`: each later test would wait in vain.
                self._fault = error
                return
            with self._changed:
                self._changed.notify_all()

    def in_spin(self, call: Callable[[], Any]) -> Any:
        """Make a call in the thread that spins the node; return what it returns.

        A goal that is sent beside that thread may be answered before rclpy's action client has
        written down that it was sent, and such an answer is thrown away.
        """
        made = self._executor.create_task(call)
        self.wait_for(made.done, 'a call in the spinning thread')
        return made.result()

    def wait_for(
        self,
        condition: Callable[[], Any],
        what: str,
        *,
        timeout_s: float = TIMEOUT_S,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """Wait until a condition holds; fails with the processes' output when it never does.

        Args:
            condition: called until the result is true; that result is returned.
            what: is waited for, for the failure.
            timeout_s: longest time to wait.
            meanwhile: called between looks, such as to go on publishing.
        """
        begin = time.monotonic()
        while True:
            value = condition()
            waited_s = time.monotonic() - begin
            if value:
                if waited_s > _SLOW_S:
                    warnings.warn(f'waited {waited_s:.0f} s for {what}', stacklevel=2)
                return value
            if waited_s > timeout_s:
                output = '\n'.join(process.output() for process in _running)
                raise AssertionError(f'waited {timeout_s:g} s in vain for {what}\n{output}')
            if self._fault is not None:
                raise AssertionError(
                    f'the test node ended while it waited for {what}'
                ) from self._fault
            if meanwhile is not None:
                meanwhile()
            with self._changed:
                self._changed.wait(0.02)

    def collect(self, message_type: type, topic: str, qos: QoSProfile = RELIABLE) -> list[Any]:
        """A list that fills with what is published on a topic."""
        received: list[Any] = []
        self.node.create_subscription(message_type, topic, received.append, qos)
        return received

    def start(self, module: str, *arguments: str, name: str | None = None) -> Process:
        """Start a module as a process; it is stopped when the graph closes."""
        process = Process(popen(module, arguments), name or module)
        self._processes.append(process)
        _running.append(process)
        return process

    def call(self, service_type: Any, name: str, request: Any) -> Any:
        """Call a service and wait for the answer.

        A service that has not discovered its client yet drops the answer, so a call without an
        answer is repeated; it may be carried out more than once.
        """
        again_s = _TRIGGER_AGAIN_S if service_type is Trigger else _ASK_AGAIN_S
        call = ServiceCall(self._client(service_type, name), request, again_s)
        return self.wait_for(call.answer, f'an answer of {name}')

    def _client(self, service_type: Any, name: str) -> Any:
        # Kept, because discovery takes longer than the call.
        if name not in self._clients:
            self._clients[name] = self.node.create_client(service_type, name)
        client = self._clients[name]
        self.wait_for(client.service_is_ready, f'service {name}')
        return client

    def transition(self, node: str, name: str) -> bool:
        """Ask a lifecycle node for a transition; whether it succeeded."""
        change = TransitionCall(
            self._client(ChangeState, f'{node}/change_state'),
            self._client(GetState, f'{node}/get_state'),
            name,
        )
        self.wait_for(change.ended, f'{node} to {name}')
        return change.succeeded

    def state(self, node: str) -> str:
        """The lifecycle state that a node is in."""
        answer = self.call(GetState, f'{node}/get_state', GetState.Request())
        return str(answer.current_state.label)

    def set_parameter(self, node: str, name: str, value: Any) -> SetParametersResult:
        """Set one parameter as `ros2 param set` does."""
        request = SetParameters.Request()
        request.parameters = [Parameter(name, value=value).to_parameter_msg()]
        return self.call(SetParameters, f'{node}/set_parameters', request).results[0]

    def close(self) -> None:
        """Stop all processes and leave the graph."""
        for process in self._processes:
            process.signal(signal.SIGINT)
        for process in self._processes:
            process.wait()
            _running.remove(process)
        self._closing = True
        self._thread.join()
        self._executor.shutdown()
        self.node.destroy_node()
        rclpy.shutdown(context=self._context)


@contextmanager
def graph() -> Iterator[Graph]:
    """A graph that is closed at the end, whatever happens."""
    made = Graph(joining=by_udp())
    try:
        yield made
    finally:
        made.close()


def statuses(diagnostics: Sequence[DiagnosticArray], name: str) -> Iterator[DiagnosticStatus]:
    """Statuses of a name in these messages, newest first."""
    for message in reversed(list(diagnostics)):
        yield from (status for status in message.status if status.name == name)


def popen(module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start a module, of this folder too, as a process that ends with this one.

    Its output is piped.
    """
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get('PYTHONPATH')])]
    return subprocess.Popen(
        [sys.executable, '-m', module, *arguments],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=dies_with_this_process(),
    )


class Process:
    """A node running as a process of its own, its output captured."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._name = name
        self._lines: list[str] = []
        self._process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def text(self) -> str:
        """Output of the process so far."""
        return ''.join(self._lines)

    def output(self) -> str:
        """The same with a headline, for failures."""
        state = 'running' if self.running else f'exited with {self._process.returncode}'
        return f'--- {self._name} ({state})\n{self.text()}'

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = TIMEOUT_S) -> int:
        """Signal it and wait for its end; killed when it does not follow. Returns the exit code."""
        self.signal(number)
        return self.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Signal it, unless it has ended."""
        if self.running:
            self._process.send_signal(number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end; killed when that does not come. Returns the exit code."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        return self._process.returncode

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
