"""Parameters of all nodes of the package, and the right name for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from rclpy.node import Node
from rclpy.parameter import Parameter

from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS
from vla_runtime.nodes.parameter_table import (
    EVERY_NODE,
    ParameterError,
    ParameterTable,
    is_of_rclpy,
)
from vla_runtime.nodes.policy.parameters import POLICY_PARAMETERS
from vla_runtime.nodes.recorder.parameters import RECORDER_PARAMETERS

# Under the names that the launch files give them.
_TABLES: Mapping[str, ParameterTable] = {
    'vla_policy': POLICY_PARAMETERS,
    'vla_executor': EXECUTOR_PARAMETERS,
    'vla_recorder': RECORDER_PARAMETERS,
}
# The simulated robot's names are written out, because nothing that runs on a robot imports its
# node. A test compares them with the node's own table.
NODE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **{node: tuple(row.name for row in table) for node, table in _TABLES.items()},
    'tabletop': ('robot', 'camera_rate_hz', 'instruction_topic', 'seed', 'variant'),
}


def names_of(*nodes: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for node in nodes for name in NODE_PARAMETERS[node]))


def problem_of(name: str, value: object, *nodes: str) -> str | None:
    """Return why one of these nodes would refuse a parameter file's value, or None.

    Nodes without such a parameter ignore it; the simulated robot judges its own values.
    """
    if name == 'use_sim_time':
        text = 'use_sim_time is {!r}: it must be of type bool'
        return None if isinstance(value, bool) else text.format(value)
    for node in nodes:
        for row in _TABLES.get(node, ()):
            if row.name == name and (problem := row.refusal(Parameter(name, value=value))):
                return problem
    return None


def owners(parameter: str) -> tuple[str, ...]:
    return tuple(node for node in NODE_PARAMETERS if parameter in names_of(node))


def is_live(node: str, parameter: str) -> bool:
    """Return whether a node's parameter may be set while it runs; none of the simulated robot's."""
    return any(row.name == parameter and not row.read_only for row in _TABLES.get(node, ()))


def nearest(name: str, known: Collection[str], in_file: bool = False) -> str:
    """Ask whether a parameter of this node or, `in_file` by its section, of another was meant."""
    known = (*known, *EVERY_NODE)
    near = difflib.get_close_matches(name, known, n=1)
    near_all = difflib.get_close_matches(name, names_of(*NODE_PARAMETERS), n=1)
    if near or not near_all:
        return did_you_mean(name, known)
    node = owners(near_all[0])[0]
    section = f" That belongs in a section '/**/{node}'" if in_file else ''
    return f"; did you mean '{near_all[0]}' of {node}?{section}"


def refuse_unknown(node: Node, table: ParameterTable) -> None:
    """Refuse parameters given at start that no node has.

    A parameter of another node of the package is let be, and said: a section `/**` of a parameter
    file is given to every node.

    Raises:
        ParameterError: such a parameter, with the nearest name.
    """
    foreign = []
    for name in node._parameter_overrides:
        if node.has_parameter(name) or is_of_rclpy(name):
            continue
        others = owners(name)
        if not others:
            raise ParameterError(
                f'parameter {name}, given on the command line or in a parameter file, is unknown'
                f'{nearest(name, [row.name for row in table])}'
            )
        foreign.append(f'{name} ({", ".join(others)})')
    if foreign:
        node.get_logger().info(f'parameters of other nodes are ignored: {", ".join(foreign)}')
