"""Parameters of a controller of ros2_control, asked for again and again: what it would refuse."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rcl_interfaces.msg import ParameterType, ParameterValue
from rcl_interfaces.srv import GetParameters, ListParameters
from rclpy.client import Client
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node

from vla_runtime.nodes.service_call import ServiceCall

_AGAIN_S = 3.0
# A node that has the services and does not answer within this never will.
_ANSWERS_WITHIN_S = 3.0
_SPIN_S = 0.02
_FIELDS = {
    ParameterType.PARAMETER_BOOL: 'bool_value',
    ParameterType.PARAMETER_INTEGER: 'integer_value',
    ParameterType.PARAMETER_DOUBLE: 'double_value',
    ParameterType.PARAMETER_STRING: 'string_value',
    ParameterType.PARAMETER_STRING_ARRAY: 'string_array_value',
}


def is_wanted(name: str) -> bool:
    """Return whether a parameter is one of those that say how commands are taken."""
    return name in (
        'joints',
        'joint',
        'interface_name',
        'interface_names',
        'allow_partial_joints_goal',
        'interpolation_method',
        'update_rate',
        'speed_scaling.initial_scaling_factor',
    ) or (name.startswith('constraints.') and name.endswith('.trajectory'))


class ControllerParameters:
    """Asks a node for its parameters without waiting: `look` again and again.

    `values` has those that are wanted and known, by name; `known` once this process has answered.
    """

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self._list: Client = node.create_client(ListParameters, f'{name}/list_parameters')
        self._get: Client = node.create_client(GetParameters, f'{name}/get_parameters')
        self._call: ServiceCall | None = None
        self._names: list[str] | None = None
        self._next_s = 0.0
        self.known = False
        # Since when the node is there and has not answered.
        self._silent_since_s: float | None = None
        self.values: dict[str, Any] = {}

    def look(self) -> None:
        """Take an answer, or ask what is due."""
        if self._call is None:
            self._ask()
            return
        answer = self._call.answer()
        if answer is None:
            return
        self._call = None
        if self._names is None:
            self._names = [name for name in answer.result.names if is_wanted(name)]
            return
        self.values = dict(zip(self._names, map(_value, answer.values), strict=False))
        self.known = True
        self._names, self._next_s = None, time.monotonic() + _AGAIN_S

    def is_awaited(self) -> bool:
        """Return whether the node is there and its first answer is to be expected."""
        if self.known or not self._list.service_is_ready():
            self._silent_since_s = None
            return False
        now_s = time.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        return now_s - self._silent_since_s < _ANSWERS_WITHIN_S

    def ask_anew(self) -> None:
        """Ask at once: it may be another process by now, with other parameters."""
        self.known, self._next_s = False, 0.0

    def _ask(self) -> None:
        if time.monotonic() < self._next_s:
            return
        if self._names is None and self._list.service_is_ready():
            self._call = ServiceCall(self._list, ListParameters.Request())
        elif self._names is not None and self._get.service_is_ready():
            self._call = ServiceCall(self._get, GetParameters.Request(names=self._names))

    def close(self) -> None:
        for client in (self._list, self._get):
            self._node.destroy_client(client)


def _value(value: ParameterValue) -> Any:
    field = _FIELDS.get(value.type)
    if field is None:
        return None
    found = getattr(value, field)
    return list(found) if field == 'string_array_value' else found


def ask_parameters(
    node: Node, controllers: Iterable[str], timeout_s: float
) -> Mapping[str, Mapping[str, Any]]:
    """Ask the controllers that are there for their parameters, by full name; wait for the answers.

    A node of its own asks: the given node's callbacks may be waiting for this one.
    """
    there = {
        f'{namespace.rstrip("/")}/{name}'
        for name, namespace in node.get_node_names_and_namespaces()
    }
    names = [name for name in dict.fromkeys(controllers) if name in there]
    if not names:
        return {}
    asking = Node(
        f'_{node.get_name()}_asks',
        namespace=node.get_namespace(),
        context=node.context,
        use_global_arguments=False,
        enable_rosout=False,
        start_parameter_services=False,
    )
    executor = SingleThreadedExecutor(context=node.context)
    executor.add_node(asking)
    asked = {name: ControllerParameters(asking, name) for name in names}
    try:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and not all(one.known for one in asked.values()):
            for one in asked.values():
                one.look()
            executor.spin_once(timeout_sec=_SPIN_S)
    finally:
        executor.shutdown()
        asking.destroy_node()
    return {name: one.values for name, one in asked.items()}
