"""Restart a node's process in its place, with the parameters that were set meanwhile.

A participant that the middleware has cut off cannot be mended, and a second one finds its ports
taken. So the process makes room for a fresh one: same process id, same command line. Launch's
`respawn` follows every exit, a fault too, and is not always there. What is handed over, a closed
clamp latch among it, goes by the environment: a full disk would lose a file.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rclpy.lifecycle import LifecycleNode
from rclpy.node import Node
from rclpy.parameter import Parameter

from vla_runtime.nodes.shared_memory import remove_locks_of_lost_ports
from vla_runtime.processes.interrupt import Interrupt, keep_signals

_VARIABLE = 'VLA_RUNTIME_NODE_STATE'
# Where a transition that is interrupted was to lead, or leads back to.
_AFTER = {
    'configuring': 'inactive',
    'activating': 'active',
    'deactivating': 'inactive',
    'cleaningup': 'unconfigured',
    'errorprocessing': 'unconfigured',
}

Note = bool | str | None

_notes: dict[str, Callable[[], Note]] = {}


def note(name: str, value: Callable[[], Note]) -> None:
    """Keep a named value for the process that may replace this one, asked for when it does."""
    _notes[name] = value


@dataclass(frozen=True)
class NodeState:
    """Parameters of a node, and how far it was brought up.

    Attributes:
        lifecycle: label of its primary state; '' for a node without a lifecycle, and for one that
            is to come up as at a first start.
    """

    parameters: dict[str, Any]
    lifecycle: str
    notes: dict[str, Note]

    def set_parameters_of(self, node: Node) -> None:
        """Set the parameters that were changed on the node before; read-only ones are equal."""
        changed = [
            Parameter(name, value=value)
            for name, value in self.parameters.items()
            if node.has_parameter(name) and _plain(node.get_parameter(name).value) != value
        ]
        if not changed:
            return
        # At once, because some are valid only together; else one by one, so one may fail alone.
        if node.set_parameters_atomically(changed).successful:
            return
        for parameter, result in zip(changed, node.set_parameters(changed), strict=True):
            if not result.successful:
                node.get_logger().error(
                    f'parameter {parameter.name} is {node.get_parameter(parameter.name).value!r} '
                    f'after the restart; before it was {parameter.value!r}: {result.reason}'
                )


def state_of(node: Node) -> NodeState:
    label = node._state_machine.current_state[1] if isinstance(node, LifecycleNode) else ''
    # rclpy's annotation says values; it returns Parameters (Humble and Jazzy).
    parameters: Any = node.get_parameters_by_prefix('')
    plain = {name: _plain(one.value) for name, one in parameters.items()}
    return NodeState(
        plain, _AFTER.get(label, label), {name: value() for name, value in _notes.items()}
    )


def start_again(state: NodeState, interrupt: Interrupt) -> None:
    """Replace this process by a fresh one; every thread and every connection of it ends here.

    Returns only where the interrupt is wanted. Later signals are the fresh process's.
    """
    os.environ[_VARIABLE] = json.dumps(asdict(state))
    sys.stdout.flush()
    sys.stderr.flush()
    # Fast DDS's locks would outlive the process that they stand for. Not by number: a container's
    # limit may be 'unlimited'.
    for descriptor in map(int, os.listdir('/proc/self/fd')):
        # The listing's own is closed by now.
        with suppress(OSError):
            if descriptor > 2:
                os.set_inheritable(descriptor, False)
    keep_signals()
    remove_locks_of_lost_ports()
    if interrupt.wanted:
        return
    try:
        os.execv(sys.executable, sys.orig_argv)
    except OSError as error:
        os.write(2, f'{sys.executable} could not be started again: {error}\n'.encode())
        os._exit(1)


def state_before() -> NodeState | None:
    """Return what the process before this one handed over; None for a first start."""
    text = os.environ.get(_VARIABLE)
    return None if text is None else NodeState(**json.loads(text))


def forget_state_before() -> None:
    os.environ.pop(_VARIABLE, None)


def _plain(value: Any) -> Any:
    """Return a parameter's value as JSON has it; rclpy gives arrays of numbers as `array`."""
    return list(value) if isinstance(value, array) else value
