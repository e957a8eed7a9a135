"""Parameters of a controller of ros2_control, asked for again and again: what it would refuse."""

from __future__ import annotations

import time
from typing import Any

from rcl_interfaces.msg import ParameterType, ParameterValue
from rcl_interfaces.srv import GetParameters, ListParameters
from rclpy.node import Node

from vla_runtime.nodes.service_call import ServiceCall

_AGAIN_S = 3.0
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
        'command_joints',
        'command_interfaces',
        'interface_name',
        'interface_names',
        'allow_partial_joints_goal',
        'interpolation_method',
        'update_rate',
        'speed_scaling.initial_scaling_factor',
    ) or (name.startswith('constraints.') and name.endswith('.trajectory'))


class ControllerParameters:
    """Asks a node for its parameters without waiting: `look` again and again.

    Args:
        node: asks.
        name: full name of the controller's node.

    Attributes:
        values: those that are wanted and known, by name; empty before the first answer.
        known: there was an answer.
    """

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self._list = node.create_client(ListParameters, f'{name}/list_parameters')
        self._get = node.create_client(GetParameters, f'{name}/get_parameters')
        self._call: ServiceCall | None = None
        self._names: list[str] | None = None
        self._next_s = 0.0
        self.values: dict[str, Any] = {}
        self.known = False

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
