"""The executables' first steps: what must be there before anything slow is imported.

Importing a node's module takes seconds. A Ctrl-C meanwhile ends the process quietly: there is
nothing yet that would have to be taken down.
"""

from __future__ import annotations

import importlib
import os

from vla_runtime.ros.interrupt import take_signals


def run_module(name: str) -> int:
    """Import a node's module and run its `main`.

    Args:
        name: of the module in this folder.

    Returns:
        exit code
    """
    take_signals(lambda *_: os._exit(0))
    return int(importlib.import_module(f'vla_runtime.ros.{name}').main())


def policy_node() -> int:
    """`ros2 run vla_runtime policy_node --ros-args -p bundle:=... -p robot:=...`."""
    return run_module('policy_node')


def executor_node() -> int:
    """`ros2 run vla_runtime executor_node --ros-args -p bundle:=... -p robot:=...`."""
    return run_module('executor_node')


def tabletop_node() -> int:
    """`ros2 run vla_runtime tabletop_node`."""
    return run_module('tabletop_node')
