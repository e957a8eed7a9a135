"""Parameter table of the executor node, and the core's settings made from its values.

Parameters of the core are the fields of its dataclasses; only the node's own are written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.watchdog import WatchdogParameters
from vla_runtime.files.setting_fields import from_values, settings_of, values_of
from vla_runtime.nodes.parameter_table import AUTOSTART, ParameterSpec, parameter_rows
from vla_runtime.nodes.server_parameters import SERVER_PARAMETERS

_FIXED = {row.name: row for row in parameter_rows(settings_of(ExecutorConfig), read_only=True)}

EXECUTOR_PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec('robot', '', 'robot file (config/robots/*.yaml)', read_only=True),
    ParameterSpec(
        'bundle', '', 'folder of the policy bundle whose chunks are executed', read_only=True
    ),
    *SERVER_PARAMETERS,
    AUTOSTART,
    ParameterSpec(
        'control_rate_hz',
        100.0,
        'commands a second',
        minimum=10.0,
        maximum=500.0,
        read_only=True,
    ),
    ParameterSpec(
        'episode_time_limit_s',
        0.0,
        'an episode ends, as a failure, when the robot has been driven for so long; 0.0: never',
        minimum=0.0,
        maximum=86_400.0,
    ),
    ParameterSpec(
        'realtime_priority',
        0,
        'SCHED_FIFO priority of the control thread, one less for the rest of its process; 0: none',
        minimum=0,
        maximum=99,
        read_only=True,
    ),
    ParameterSpec(
        'cpu_affinity', '', 'CPUs of the control thread, like 2,3; empty: any', read_only=True
    ),
    _FIXED['max_state_age_s'],
    _FIXED['max_tracking_error'],
    _FIXED['blocked_after_s'],
    _FIXED['tick_timeout_s'],
    _FIXED['clock_jump_s'],
    _FIXED['clamp_latch'],
    *parameter_rows(settings_of(ExecutorParameters)),
    ParameterSpec(
        'dry_run', False, 'compute and report all, command nothing; a change stops the robot'
    ),
)


def executor_parameters(values: Mapping[str, Any]) -> ExecutorParameters:
    """Make the core's live parameters; ValueError where values do not go together."""
    made: ExecutorParameters = from_values(ExecutorParameters, values)
    return made


def values_in_force(parameters: ExecutorParameters, *, dry_run: bool) -> dict[str, Any]:
    return {**values_of(parameters), 'dry_run': dry_run}


def watchdog_parameters(values: Mapping[str, Any], *, use_sim_time: bool) -> WatchdogParameters:
    """Under `use_sim_time` plan time follows the ROS clock."""
    made: WatchdogParameters = from_values(WatchdogParameters, values)
    return replace(made, motion_clock='ros' if use_sim_time else 'steady')
