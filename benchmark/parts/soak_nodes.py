"""Processes of the soak, each in a group of its own, and calls of their services that insist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from parts.three_cameras import ROOT, Graph, isolate
from rcl_interfaces.srv import SetParameters
from rclpy.parameter import Parameter

from vla_runtime.nodes.middleware import PROFILE_VARIABLES
from vla_runtime.nodes.service_call import TRANSITIONS
from vla_runtime.processes.parent_death import dies_with_this_process

_PROFILES = {'nodes': 'fastdds.xml', 'executor': 'fastdds_executor.xml'}
_UDP = '<type>UDPv4</type>'
_LOOPBACK = '<interfaceWhiteList><address>127.0.0.1</address></interfaceWhiteList>'
# A call may go to a dead node alone, which discovery believes in for some 20 s.
_CALL_S = 3.0
_INSIST_S = 90.0
_END_S = 60.0


@dataclass(frozen=True)
class Profiles:
    """Fast DDS profiles as shipped, but for the loopback interface alone."""

    nodes: Path
    executor: Path


@contextmanager
def robot_graph(folder: Path) -> Iterator[tuple[Graph, Profiles]]:
    """A graph as a robot's network is, that ends at this machine.

    `LOCALHOST` would end there too, but gives every process shared memory, the executor as well.
    This process, which is the robot, keeps out of shared memory as the executor does.

    Args:
        folder: the profiles are written into it.
    """
    isolate()
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'SUBNET'
    made = {}
    for user, name in _PROFILES.items():
        text = (ROOT / 'config' / name).read_text(encoding='utf-8')
        assert _UDP in text
        made[user] = folder / name
        made[user].write_text(text.replace(_UDP, _UDP + _LOOPBACK), encoding='utf-8')
    os.environ.update(use_profile(made['executor']))
    graph = Graph('benchmark')
    try:
        yield graph, Profiles(**made)
    finally:
        graph.close()


def use_profile(profile: Path) -> dict[str, str]:
    """Environment with which Fast DDS takes a profile."""
    return dict.fromkeys(PROFILE_VARIABLES, str(profile))


class Child:
    """A Python process in a process group of its own; what it writes goes to a file.

    Args:
        words: words of the command line, after the interpreter.
        log: file that the process's output is appended to.
        ends_with_stdin: True for a process that ends with its stdin, not with SIGINT.
        profile: profile of Fast DDS.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        *,
        profile: Path,
        ends_with_stdin: bool = False,
    ) -> None:
        self.log = log
        self._ends_with_stdin = ends_with_stdin
        self._frozen = False
        with log.open('a') as out:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                preexec_fn=dies_with_this_process(),
                env={**os.environ, **use_profile(profile)},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def say(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + '\n')
        self._process.stdin.flush()

    def freeze(self) -> None:
        """SIGSTOP to the group."""
        self._frozen = True
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to the group."""
        self._frozen = False
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the group, and wait."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> int:
        """End it as a user would; its exit code. What does not follow is killed: a code below 0."""
        if self._frozen:
            self.thaw()
        if self.running:
            if self._ends_with_stdin:
                assert self._process.stdin is not None
                self._process.stdin.close()
            else:
                os.killpg(self.pid, signal.SIGINT)
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def memory_mib(self) -> float:
        """Resident memory."""
        text = Path(f'/proc/{self.pid}/status').read_text(encoding='ascii')
        return int(text.split('VmRSS:')[1].split()[0]) / 1024


class Services:
    """Calls services of nodes that may be frozen, dead, or in a dead one's place."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def call(self, kind: Any, name: str, request: Any, timeout_s: float = _CALL_S) -> Any:
        """The answer, or None when none came in time."""
        node = self._graph.node
        client = node.create_client(kind, name)
        end_s = time.monotonic() + timeout_s
        future = None
        try:
            while time.monotonic() < end_s:
                if future is None and client.service_is_ready():
                    future = client.call_async(request)
                if future is not None and future.done():
                    return future.result()
                time.sleep(0.005)
        finally:
            node.destroy_client(client)
        return None

    def insist(self, kind: Any, name: str, request: Any) -> Any:
        """The answer of a call that may be repeated.

        Raises:
            TimeoutError: none came, however often.
        """
        end_s = time.monotonic() + _INSIST_S
        while time.monotonic() < end_s:
            answer = self.call(kind, name, request)
            if answer is not None:
                return answer
        raise TimeoutError(f'{name} has not answered for {_INSIST_S:g} s')

    def bring_up(self, node: str) -> None:
        """Configure and activate a lifecycle node that has just been started.

        Raises:
            RuntimeError: it refused.
        """
        for transition in ('configure', 'activate'):
            number, _, goal = TRANSITIONS[transition]
            request = ChangeState.Request(transition=Transition(id=number))
            end_s = time.monotonic() + _INSIST_S
            while self._state(node) != goal:
                answer = self.call(ChangeState, f'{node}/change_state', request, 30.0)
                if answer is not None and not answer.success and self._state(node) != goal:
                    raise RuntimeError(f'{node} did not {transition}; its log says why')
                if time.monotonic() > end_s:
                    raise TimeoutError(f'{node} did not {transition} for {_INSIST_S:g} s')

    def _state(self, node: str) -> str:
        answer = self.insist(GetState, f'{node}/get_state', GetState.Request())
        return str(answer.current_state.label)

    def set(self, node: str, **parameters: Any) -> str:
        """Set live parameters together; why they were refused, empty when they were not."""
        request = SetParameters.Request()
        request.parameters = [
            Parameter(name, value=value).to_parameter_msg() for name, value in parameters.items()
        ]
        answer = self.insist(SetParameters, f'{node}/set_parameters', request)
        return '; '.join(result.reason for result in answer.results if not result.successful)
