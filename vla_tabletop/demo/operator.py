"""Operator of the demo: lifecycle, services, parameters and instructions, as calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.srv import GetParameters, ListParameters, SetParameters
from rclpy.node import Node
from rclpy.parameter import Parameter, parameter_value_to_python
from std_msgs.msg import String
from std_srvs.srv import Trigger

from vla_runtime.nodes.qos import LATCHED
from vla_runtime.nodes.service_call import ServiceCall, TransitionCall

_POLL_S = 0.02
# Loading a policy on a busy machine takes its time.
CONFIGURE_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 20.0
READY_TIMEOUT_S = 60.0


class OperatorError(RuntimeError):
    """A node refused, or does not answer; the message says which and why."""


class TransitionError(OperatorError):
    """A lifecycle node refused a transition."""

    def __init__(self, node: str, verb: str) -> None:
        super().__init__(f'{node} could not {verb}')
        self.node = node


class Operator:
    """Calls services of the session's nodes and waits for the answers.

    The caller spins `node`; `check` is called while waiting and raises what should end it (a dead
    child, Ctrl-C).
    """

    def __init__(self, node: Node, check: Callable[[], None]) -> None:
        self._node = node
        self._check = check
        self._clients: dict[str, Any] = {}
        self._instructions = node.create_publisher(String, 'vla_policy/instruction', LATCHED)

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """Wait until `condition` is true, and return its value; OperatorError: not in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            self._check()
            value = condition()
            if value:
                return value
            if time.monotonic() > end_s:
                raise OperatorError(f'waited {timeout_s:g} s in vain for {what}')
            time.sleep(_POLL_S)

    def instruct(self, instruction: str) -> None:
        """Send an instruction to the policy."""
        self._instructions.publish(String(data=instruction))

    def trigger(self, service: str) -> str:
        """Call a `std_srvs/Trigger` and return its message; OperatorError: it failed."""
        response = self._call(Trigger, service, Trigger.Request())
        if not response.success:
            raise OperatorError(f'{service}: {response.message}')
        return str(response.message)

    def configure(self, *nodes: str) -> None:
        """Configure lifecycle nodes, all at once."""
        self._transition('configure', nodes, CONFIGURE_TIMEOUT_S)

    def activate(self, *nodes: str) -> None:
        """Activate lifecycle nodes."""
        self._transition('activate', nodes, ANSWER_TIMEOUT_S)

    def deactivate(self, *nodes: str) -> None:
        """Deactivate lifecycle nodes."""
        self._transition('deactivate', nodes, ANSWER_TIMEOUT_S)

    def set_parameter(self, node: str, name: str, value: Any) -> None:
        """Set one parameter; OperatorError: refused, with the reason."""
        request = SetParameters.Request()
        request.parameters = [Parameter(name, value=value).to_parameter_msg()]
        result = self._call(SetParameters, f'{node}/set_parameters', request).results[0]
        if not result.successful:
            raise OperatorError(f'{node}: {result.reason}')

    def parameters(self, node: str) -> dict[str, Any]:
        """All parameters of a node, as they are now."""
        listed = self._call(ListParameters, f'{node}/list_parameters', ListParameters.Request())
        names = sorted(listed.result.names)
        request = GetParameters.Request(names=names)
        answer = self._call(GetParameters, f'{node}/get_parameters', request)
        return {
            name: parameter_value_to_python(value)
            for name, value in zip(names, answer.values, strict=True)
        }

    def _transition(self, name: str, nodes: tuple[str, ...], timeout_s: float) -> None:
        changes = [
            TransitionCall(
                self._client(ChangeState, f'{node}/change_state'),
                self._client(GetState, f'{node}/get_state'),
                name,
            )
            for node in nodes
        ]
        for node, change in zip(nodes, changes, strict=True):
            self.wait_for(change.ended, f'{node} to {name}', timeout_s)
            if not change.succeeded:
                raise TransitionError(node, name)

    def _call(self, service_type: Any, name: str, request: Any) -> Any:
        call = ServiceCall(self._client(service_type, name), request)
        return self.wait_for(call.answer, f'an answer of {name}', ANSWER_TIMEOUT_S)

    def _client(self, service_type: Any, name: str) -> Any:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = self._node.create_client(service_type, name)
        self.wait_for(client.service_is_ready, f'service {name}', READY_TIMEOUT_S)
        return client
