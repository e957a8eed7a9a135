"""An executor's episodes from outside: its services, its verdicts and how it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.srv import SetParameters
from rclpy.node import Node
from rclpy.parameter import Parameter
from std_srvs.srv import SetBool, Trigger

from vla_runtime.execution.command import Reason
from vla_runtime.execution.config import Mode
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.nodes.polled_topics import HeardItem, HeardStatus
from vla_runtime.nodes.service_call import ServiceCall

_SPIN_S = 0.05
# An executor of this graph is discovered within seconds, and says how it stands five times a one.
_FOUND_WITHIN_S = 6.0
# Older than a status is when it comes.
_STATUS_AGE_S = 0.3
# Longer than any executor takes to come to rest.
_ANSWERS_WITHIN_S = 20.0
# A trigger that is repeated is carried out twice.
_NEVER_AGAIN_S = 1e9
_Found = TypeVar('_Found')


class NoExecutorError(ValueError):
    """No executor of that name is in the graph, or it does not answer."""


class EpisodeClient:
    """Calls one executor; for one thread.

    Args:
        name: full name of the executor node.

    Attributes:
        outcome: verdict of the newest episode that has ended; '' since `begin`.
        text: the same in words.
    """

    def __init__(self, node: Node, name: str) -> None:
        self.name = name
        self.outcome = self.text = ''
        self._node = node
        self._status = HeardStatus(node, ('control',))
        self._clients: dict[str, Any] = {}
        node.create_subscription(DiagnosticArray, f'{name}/report', self._on_report, 10)
        self._wait_for(self.control, _FOUND_WITHIN_S, 'says nothing on /diagnostics')

    def close(self) -> None:
        self._status.close()

    def spin(self) -> None:
        """Let a moment pass, and take what comes in it."""
        rclpy.spin_once(self._node, timeout_sec=_SPIN_S)
        self._status.take()

    def control(self) -> HeardItem | None:
        """How the executor stands, as it says itself."""
        return self._status.of(self.name, 'control')

    def is_started(self) -> bool:
        return self._value('mode') == Mode.RUNNING.value

    def is_paused(self) -> bool:
        return self.is_started() and self._value('reason') == Reason.PAUSED.value

    def call(self, service: str) -> Trigger.Response:
        """Call a trigger, such as `pause`.

        Raises:
            NoExecutorError: there is no answer.
        """
        return self._call(Trigger, service, Trigger.Request())

    def go_home(self, *, far: bool) -> SetBool.Response:
        return self._call(SetBool, 'home', SetBool.Request(data=far))

    def wait_until_home(self) -> None:
        """Wait for the end of the way that `go_home` has begun; ValueError where it was stopped."""
        # A status that was made before the call says nothing.
        from_s = time.monotonic() + _STATUS_AGE_S
        while True:
            self.spin()
            control = self.control()
            if control is None or control.heard_s < from_s:
                continue
            if not self.is_started():
                raise ValueError(control.text)
            if self.is_paused():
                return

    def limit_time(self, seconds: float) -> str:
        """Set the time limit of an episode; return why it was refused, or empty text."""
        request = SetParameters.Request()
        wanted = Parameter('episode_time_limit_s', value=seconds)
        request.parameters = [wanted.to_parameter_msg()]
        (result,) = self._call(SetParameters, 'set_parameters', request).results
        return '' if result.successful else str(result.reason)

    def begin(self) -> Trigger.Response:
        """Let the policy drive, in another episode where the last one has ended."""
        self.outcome = self.text = ''
        return self.go_on()

    def go_on(self) -> Trigger.Response:
        return self.call('resume' if self.is_started() else 'start')

    def _value(self, key: str) -> str:
        control = self.control()
        return '' if control is None else control.values.get(key, '')

    def _call(self, kind: Any, service: str, request: Any) -> Any:
        if service not in self._clients:
            self._clients[service] = self._node.create_client(kind, f'{self.name}/{service}')
        client = self._clients[service]
        self._wait_for(lambda: client.service_is_ready() or None, _FOUND_WITHIN_S, 'has no service')
        call = ServiceCall(client, request, _NEVER_AGAIN_S)
        return self._wait_for(call.answer, _ANSWERS_WITHIN_S, f'does not answer {service}')

    def _wait_for(self, look: Callable[[], _Found | None], longest_s: float, what: str) -> _Found:
        end_s = time.monotonic() + longest_s
        while (found := look()) is None:
            if time.monotonic() > end_s:
                raise NoExecutorError(f'{self.name} {what}: is it running? (vla_runtime status)')
            self.spin()
        return found

    def _on_report(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == f'{self.name}: instruction':
                self.outcome = values_of(status).get('outcome', '')
                self.text = status.message
