"""What a controller of ros2_control and an output of the robot file say differently of one stream.

A velocity that is taken for a position is a step of its whole size, a position that is taken for a
velocity runs away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_runtime.robot.schema import RobotOutput

# --- What only controller_manager's list says: which controllers a controller commands in a chain


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


# --------------------------------------------------------------------------------------------------

# Interfaces whose meaning is known. Others have names of their hardware's own, and pass.
_MEANINGS = {
    'position': 'positions',
    'velocity': 'velocities',
    'acceleration': 'accelerations',
    'effort': 'efforts',
    'torque': 'torques',
    'force': 'forces',
    'current': 'currents',
}
# Packages whose controllers are forward_command_controllers of one interface.
_PACKAGES = {f'{one}_controllers': one for one in ('position', 'velocity', 'effort')}


def interface_conflict(
    name: str, output: RobotOutput, values: Mapping[str, Any], kind: str = ''
) -> str:
    """Compare the meaning of the numbers; empty where they agree, or nobody knows.

    A `joint_trajectory` has positions, and its controller takes positions whatever it commands to
    the hardware.

    Args:
        values: the controller's parameters, as far as they are known.
        kind: its type, as controller_manager lists it; '' where unknown.
    """
    if output.kind != 'float64_multi_array':
        return ''
    field, taken = _taken(values, kind)
    strange = [one for one in taken if one in _MEANINGS and one != output.interface]
    if not strange and len(taken) < 2:
        return ''
    sends = _MEANINGS[output.interface]
    takes = ' and '.join(_MEANINGS.get(one, f"'{one}'") for one in taken)
    return (
        f"controller '{name}' takes {takes} ({field}: {', '.join(taken)}), but the robot file's "
        f"output '{output.topic}' sends {sends} (interface: {output.interface}): name a controller "
        f'of {sends} there, or give the output the interface of the controller and use a policy '
        'that commands it'
    )


def _taken(values: Mapping[str, Any], kind: str) -> tuple[str, tuple[str, ...]]:
    """Return where it is written, and the interfaces that the controller's numbers are for."""
    if one := values.get('interface_name'):
        return 'interface_name', (one,)
    if several := values.get('interface_names'):
        return 'interface_names', tuple(several)
    package = kind.partition('/')[0]
    return kind, (_PACKAGES[package],) if package in _PACKAGES else ()


def joint_conflict(
    name: str, output: RobotOutput, joints: Sequence[str], values: Mapping[str, Any]
) -> str:
    """Compare the joints, as the output's messages name them; empty where the controller fits."""
    theirs = values.get('joints')
    if not theirs:
        return ''
    where = f"the robot file's output '{output.topic}'"
    if output.kind == 'float64_multi_array':
        # One that leads to another controller names its joints behind that one's name.
        if [joint.rpartition('/')[2] for joint in theirs] == list(joints):
            return ''
        return (
            f"controller '{name}' takes {', '.join(theirs)} in this order, but {where} "
            f"has {', '.join(joints)}: write the joints in the controller's order"
        )
    strange = [joint for joint in joints if joint not in theirs]
    missing = [joint for joint in theirs if joint not in joints]
    if strange:
        return (
            f"controller '{name}' refuses every command: it has no joint "
            f'{", ".join(strange)} (it has {", ".join(theirs)}); mend the joints of {where}'
        )
    if missing and not values.get('allow_partial_joints_goal', False):
        return (
            f"controller '{name}' refuses every command: {where} lacks its joints "
            f'{", ".join(missing)}; add them, or set its allow_partial_joints_goal: true'
        )
    return ''
