"""Rows of the nodes' parameter tables: type, range, words and description of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter

from vla_runtime.files.quotes import quoted
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
class ParameterSpec(Setting):
    """One row of a node's parameter table; `read_only` is fixed when the node starts."""

    read_only: bool = False

    @property
    def type_name(self) -> str:
        return _TYPE_NAMES[type(self.default)]

    @property
    def is_switch(self) -> bool:
        """Whether `on` and `off` are allowed, which ROS 2 reads as booleans from YAML."""
        return {'on', 'off'} <= set(self.words)

    def value_of(self, value: Any) -> Any:
        """Return a parameter's value, as one of `words` where ROS 2 has made a boolean of it."""
        return ('off', 'on')[value] if self.is_switch and isinstance(value, bool) else value

    def refusal(self, parameter: Parameter) -> str:
        """Return why a parameter of any type is refused, or empty text."""
        value = parameter.value
        if self.is_switch and isinstance(value, bool):
            return ''
        if parameter.type_ != _ROS_TYPES[type(self.default)]:
            hint = ''
            if isinstance(self.default, float) and isinstance(value, int):
                hint = ' (write 2.0, not 2)'
            elif isinstance(self.default, str) and isinstance(value, (bool, int, float)):
                hint = ' (put it in quotes)'
            shown = quoted(value)
            return f'{self.name} is {shown}: it must be of type {self.type_name}{hint}'
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            length = f'{len(value)} characters; at most {_LONGEST_TEXT} are taken'
            return f'{self.name} is a text of {length}'
        # rclpy's own check of ranges has a tolerance, which lets 0.999999 pass for 1.0.
        return self.problem(value)

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
    return tuple(ParameterSpec(**vars(row), read_only=read_only) for row in settings)


def is_of_rclpy(name: str) -> bool:
    return name in EVERY_NODE or name.startswith('qos_overrides.')


# A lifecycle node brings itself up, because a transition asked for from outside can be lost: for
# some 20 s discovery believes in the services of a killed node, and a request may go to that one.

# Exit code of a node that could not be made, or not brought up; Python's own is 1.
COULD_NOT_START = 3

# What leads from unconfigured to a state.
_TRANSITIONS = {'inactive': ('configure',), 'active': ('configure', 'activate')}

AUTOSTART = ParameterSpec(
    'autostart',
    False,
    'configure and activate as soon as the node runs, and end it where that fails; false: wait to '
    'be configured',
    read_only=True,
)


def bring_up(node: Node, unwanted: Callable[[], bool], state: str = '') -> bool:
    """Configure and activate a node whose parameter `autostart` says so; True when nothing failed.

    Args:
        node: without that parameter nothing is done.
        unwanted: returns True when the node is to end meanwhile.
        state: label to bring it up to; '' for as far as `autostart` says.
    """
    if not node.has_parameter(AUTOSTART.name):
        return True
    why = f'it was {state} before it was started again' if state else AUTOSTART.name
    if not state:
        state = 'active' if node.get_parameter(AUTOSTART.name).value else 'unconfigured'
    for transition in _TRANSITIONS.get(state, ()):
        if unwanted():
            return True
        if getattr(node, f'trigger_{transition}')() is not TransitionCallbackReturn.SUCCESS:
            node.get_logger().fatal(f'could not {transition}, so this node ends ({why})')
            return False
    return True
