"""Node parameters from one table: declared, checked, read and documented from the same rows.

On-set callbacks only judge. A node reads its parameters where it may take them up (the next
inference, the next chunk boundary), so that half a change is never applied. rclpy stores the values
of one change one after the other; `values` returns the old ones until all of them are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.msg import SetParametersResult
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

from vla_runtime.files.quotes import one_line
from vla_runtime.nodes.node_parameters import nearest
from vla_runtime.nodes.parameter_table import ParameterError, ParameterSpec, ParameterTable

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
        check: sees all values as they would be after the change; returns why not, or None. Must
            be free of side effects.

    Raises:
        ParameterError: a value from the command line or a parameter file that does not fit.
    """
    rows = {row.name: row for row in table}

    def on_set(parameters: list[Parameter]) -> SetParametersResult:
        ours = [parameter for parameter in parameters if parameter.name in rows]
        reasons = [text for p in ours if (text := rows[p.name].refusal(p))]
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
    _say_what_mends(node, rows)


def _say_what_mends(node: Node, rows: Mapping[str, ParameterSpec]) -> None:
    """Say what mends setting an unknown or a read-only parameter; rclpy's reason does not."""

    def why(parameter: ParameterMessage) -> str:
        name = one_line(parameter.name, 100)
        if not node.has_parameter(parameter.name):
            return f'parameter {name} is unknown{nearest(parameter.name, rows)}'
        if parameter.name in rows and rows[parameter.name].read_only:
            return (
                f'parameter {name} is read-only, because it is read when the node starts: end the '
                f'node and launch again with another {name}, as a launch argument or in params_file'
            )
        return ''

    def refused(parameters: Sequence[ParameterMessage]) -> str:
        return '; '.join(filter(None, map(why, parameters)))

    def each(answer: Callable[..., Any], request: Any, response: Any) -> Any:
        response = answer(request, response)
        for parameter, result in zip(request.parameters, response.results, strict=True):
            result.reason = refused([parameter]) or result.reason
        return response

    def together(answer: Callable[..., Any], request: Any, response: Any) -> Any:
        response = answer(request, response)
        response.result.reason = refused(request.parameters) or response.result.reason
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
    if problem := row.refusal(parameter):
        raise ParameterError(f'parameter {problem}')


def values(node: Node, table: ParameterTable) -> dict[str, Any]:
    """Return the values in force: all from before a change, or all from after it; any thread."""
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
