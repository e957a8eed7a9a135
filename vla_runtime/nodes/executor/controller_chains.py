"""What only controller_manager's list says: which controllers a controller commands in a chain, and
whether one of a gripper's action, of poses or of twists is active.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_THEN = ', then ~/start'


class ControllerChains:
    """Entries of one controller_manager's list, and the way from one to the next."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def take(self, entries: Sequence[Any]) -> None:
        self._found = {one.name: one for one in entries}

    def refusal_of(self, controller: str, manager: str, *, then_start: bool = True) -> str:
        """Name what keeps a controller, or one that it commands, from following its topic.

        With `then_start` the robot stops for it and needs `~/start`.
        """
        name = controller.rpartition('/')[2]
        then = _THEN if then_start else ''
        for one in self._from(name):
            if one.state != 'active':
                path = controller.rpartition('/')[0]
                commanded = '' if one.name == name else f", which '{controller}' commands,"
                return (
                    f"controller '{path}/{one.name}'{commanded} is {one.state} in {manager}: "
                    f'activate it (ros2 control switch_controllers --activate {one.name}){then}'
                )
        above = [one.name for one in self._found.values() if name in _below(one)]
        if above and self._found[name].is_chained:
            return (
                f"controller '{controller}' takes its commands from '{above[0]}' and none from "
                f"its topic: give the robot file's output the topic of '{above[0]}', or "
                f'deactivate it (ros2 control switch_controllers --deactivate {above[0]}){then}'
            )
        return ''

    def _from(self, name: str) -> list[Any]:
        """Return a controller's entry and those of all that it commands, the highest first."""
        chain: list[Any] = []
        names = [name]
        for next_name in names:
            if next_name in self._found:
                chain.append(self._found[next_name])
                names += [below for below in _below(chain[-1]) if below not in names]
        return chain


def _below(entry: Any) -> list[str]:
    return [connection.name for connection in entry.chain_connections]
