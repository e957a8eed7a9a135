"""Node parameters from one table: declared, checked, read and documented from the same rows.

On-set callbacks only judge; nothing is applied in them. A node reads its parameters where it may
take them up (the next inference, the next chunk boundary), which works on every ROS 2
distribution and never leaves half a change applied. rclpy itself stores the values of one change
one after the other; `values` returns those from before until all of them are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rcl_interfaces.msg import Parameter as ParameterMessage
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

from vla_runtime.files.quotes import one_line, quoted
from vla_runtime.files.setting_fields import Setting

_TYPE_NAMES = {bool: 'bool', int: 'integer', float: 'double', str: 'string'}
_ROS_TYPES = {
    bool: Parameter.Type.BOOL,
    int: Parameter.Type.INTEGER,
    float: Parameter.Type.DOUBLE,
    str: Parameter.Type.STRING,
}
# Longer than any path or instruction.
_LONGEST_TEXT = 4096
# Parameters of every node. Some releases of rclpy declare them, others only read them.
EVERY_NODE = ('use_sim_time', 'start_type_description_service')


class ParameterError(ValueError):
    """A parameter given at start that cannot be used; names the parameter and what is allowed."""


@dataclass(frozen=True)
class ParameterSpec:
    """One row of a node's parameter table.

    Attributes:
        name: name of the parameter in ROS.
        default: also tells the type: bool, int, float or str.
        description: one line for `ros2 param describe` and docs/reference/parameters.md.
        minimum: smallest number allowed, inclusive.
        maximum: largest number allowed, inclusive.
        words: allowed words of a string; any string when empty.
        read_only: fixed when the node starts.
    """

    name: str
    default: bool | int | float | str
    description: str
    minimum: int | float | None = None
    maximum: int | float | None = None
    words: tuple[str, ...] = ()
    read_only: bool = False

    @property
    def type_name(self) -> str:
        return _TYPE_NAMES[type(self.default)]

    @property
    def allowed(self) -> str:
        """Allowed values in words; empty when anything of the type is allowed."""
        if self.words:
            return ', '.join(self.words)
        if self.minimum is None or self.maximum is None:
            return ''
        return f'{self.minimum} to {self.maximum}'

    @property
    def is_switch(self) -> bool:
        """Whether `on` and `off` are allowed, which ROS 2 reads as booleans from YAML."""
        return {'on', 'off'} <= set(self.words)

    def value_of(self, value: Any) -> Any:
        """Return a parameter's value, as one of `words` where ROS 2 has made a boolean of it."""
        return ('off', 'on')[value] if self.is_switch and isinstance(value, bool) else value

    def problem(self, parameter: Parameter) -> str | None:
        """Return why a value is refused, or None."""
        value = parameter.value
        if self.is_switch and isinstance(value, bool):
            return None
        if parameter.type_ != _ROS_TYPES[type(self.default)]:
            hint = ''
            if isinstance(self.default, float) and isinstance(value, int):
                hint = ' (write 2.0, not 2)'
            elif isinstance(self.default, str) and isinstance(value, (bool, int, float)):
                hint = ' (put it in quotes)'
            said = quoted(value)
            return f'{self.name} is {said}: it must be of type {self.type_name}{hint}'
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            length = f'{len(value)} characters; at most {_LONGEST_TEXT} are taken'
            return f'{self.name} is a text of {length}'
        if self.words and value not in self.words:
            return f'{self.name} is {quoted(value)}: it must be one of {self.allowed}'
        # rclpy's own check of ranges has a tolerance, which lets 0.999999 pass for 1.0.
        if self.minimum is None or self.maximum is None:
            return None
        if not (math.isfinite(value) and self.minimum <= value <= self.maximum):
            return f'{self.name} is {value}: it must be {self.allowed}'
        return None

    def descriptor(self) -> ParameterDescriptor:
        descriptor = ParameterDescriptor(
            name=self.name,
            description=self.description,
            type=_ROS_TYPES[type(self.default)].value,
            read_only=self.read_only,
            dynamic_typing=self.is_switch,
            additional_constraints=self.allowed,
        )
        if self.minimum is not None and self.maximum is not None:
            if isinstance(self.default, float):
                descriptor.floating_point_range = [
                    FloatingPointRange(
                        from_value=float(self.minimum), to_value=float(self.maximum), step=0.0
                    )
                ]
            else:
                descriptor.integer_range = [
                    IntegerRange(from_value=int(self.minimum), to_value=int(self.maximum), step=0)
                ]
        return descriptor


ParameterTable = Sequence[ParameterSpec]


def parameter_rows(
    settings: Iterable[Setting], *, read_only: bool = False
) -> tuple[ParameterSpec, ...]:
    """Return a parameter for each setting."""
    return tuple(
        ParameterSpec(
            row.name,
            row.default,
            row.description,
            minimum=row.minimum,
            maximum=row.maximum,
            words=row.words,
            read_only=read_only,
        )
        for row in settings
    )


# Judges values that are each in range by themselves: what they mean together, or for this policy.
JointCheck = Callable[[Mapping[str, Any]], 'str | None']


# Storing a change takes rclpy microseconds. What is there after so long is in force, even if it is
# none of the two that were expected: two threads set parameters at the same time.
_STORED_S = 1.0


@dataclass(frozen=True)
class _Change:
    """The change that was accepted last: all values before it and after it."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    at_s: float


_CHANGES: WeakKeyDictionary[Node, _Change] = WeakKeyDictionary()


def declare(node: Node, table: ParameterTable, check: JointCheck | None = None) -> None:
    """Declare a table's parameters and refuse what does not fit from then on.

    Args:
        node: the node.
        table: parameters to declare.
        check: sees all values as they would be after the change; returns why not, or None. Must
            be free of side effects.

    Raises:
        ParameterError: a value from the command line or a parameter file that does not fit.
    """
    rows = {row.name: row for row in table}

    def on_set(parameters: list[Parameter]) -> SetParametersResult:
        ours = [parameter for parameter in parameters if parameter.name in rows]
        reasons = [reason for p in ours if (reason := rows[p.name].problem(p)) is not None]
        if ours and not reasons:
            before = _stored(node, table)
            after = {**before, **{p.name: rows[p.name].value_of(p.value) for p in ours}}
            if check is not None and (reason := check(after)) is not None:
                reasons = [reason]
            else:
                _CHANGES[node] = _Change(before, after, monotonic())
        return SetParametersResult(successful=not reasons, reason='; '.join(reasons))

    for row in table:
        _declare_one(node, row)
    node.add_on_set_parameters_callback(on_set)
    _name_the_nearest(node, rows)


def is_of_rclpy(name: str) -> bool:
    """Return whether rclpy itself gives this parameter to every node."""
    return name in EVERY_NODE or name.startswith('qos_overrides.')


def _name_the_nearest(node: Node, names: Collection[str]) -> None:
    """Suggest the nearest name in the answer to setting an unknown parameter.

    rclpy refuses it before any callback is asked, with a reason for programmers.
    """
    # Imported here: the names of all nodes are made of the tables that this module is for.
    from vla_runtime.ros.node_parameters import nearest

    def unknown(parameters: Sequence[ParameterMessage]) -> str:
        return '; '.join(
            f'parameter {one_line(p.name, 100)} is unknown{nearest(p.name, names)}'
            for p in parameters
            if not node.has_parameter(p.name)
        )

    def each(answer: Callable[..., Any], request: Any, response: Any) -> Any:
        response = answer(request, response)
        for parameter, result in zip(request.parameters, response.results, strict=True):
            result.reason = unknown([parameter]) or result.reason
        return response

    def together(answer: Callable[..., Any], request: Any, response: Any) -> Any:
        response = answer(request, response)
        response.result.reason = unknown(request.parameters) or response.result.reason
        return response

    for service in node.services:
        for name, reworded in (('set_parameters', each), ('set_parameters_atomically', together)):
            if service.srv_name.endswith(f'/{name}'):
                service.callback = partial(reworded, service.callback)


def _declare_one(node: Node, row: ParameterSpec) -> None:
    try:
        parameter = node.declare_parameter(row.name, row.default, row.descriptor())
    except (InvalidParameterTypeException, InvalidParameterValueException) as error:
        hint = {float: ' (write 2.0, not 2)', int: ' (write 2, not 2.0)'}.get(type(row.default), '')
        allowed = f', {row.allowed}' if row.allowed else ''
        # rclpy says the name once more at the end.
        reason = str(error).removesuffix(f': {row.name}')
        raise ParameterError(
            f'parameter {row.name}: expected {row.type_name}{hint}{allowed}: {reason}'
        ) from error
    problem = row.problem(parameter)
    if problem is not None:
        raise ParameterError(f'parameter {problem}')


def values(node: Node, table: ParameterTable) -> dict[str, Any]:
    """Return the values in force: all from before a change, or all from after it.

    Any thread may ask, also while another one sets parameters.
    """
    while True:
        change = _CHANGES.get(node)
        stored = _stored(node, table)
        if change is _CHANGES.get(node):
            break
    if change is None or stored.keys() != change.after.keys() or stored == change.after:
        return stored
    # Not all stored yet, or refused by someone else's callback.
    return dict(change.before) if monotonic() - change.at_s < _STORED_S else stored


def _stored(node: Node, table: ParameterTable) -> dict[str, Any]:
    return {row.name: row.value_of(node.get_parameter(row.name).value) for row in table}
