"""A lifecycle node that brings itself up, so that a launch file need not chain its transitions.

A transition asked for from outside can be lost: discovery believes in the services of a node that
was killed for some 20 s, and a request may go to that one alone.
"""

from __future__ import annotations

from collections.abc import Callable

from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.node import Node

from vla_runtime.nodes.parameter_table import ParameterSpec

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
    """Configure and activate a node whose parameter `autostart` says so.

    Args:
        node: any node; without that parameter nothing is done.
        unwanted: function that returns True when the node is to end meanwhile.
        state: bring it as far up as this label; '' for as far as `autostart` says.

    Returns:
        True when nothing failed
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
