"""The executor node's parameters, and what the executor's core makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from vla_runtime.execution.handover import EnsembleOrder, HandoverMode, HandoverParameters
from vla_runtime.execution.parameters import (
    DelayParameters,
    ExecutorParameters,
    Overrun,
    ReplanMode,
)
from vla_runtime.execution.plan import Interpolation
from vla_runtime.execution.watchdog import WatchdogParameters, tick_timeout_for
from vla_runtime.ros.autostart import AUTOSTART
from vla_runtime.ros.parameters import ParameterSpec

# A chunk is never longer; the bundle's own horizon narrows it when the node is configured.
_MOST_STEPS = 1000

EXECUTOR_PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec('robot', '', 'robot file (config/robots/*.yaml)', read_only=True),
    ParameterSpec(
        'bundle', '', 'folder of the policy bundle whose chunks are executed', read_only=True
    ),
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
        'realtime_priority',
        0,
        'SCHED_FIFO priority of the control thread; 0: none',
        minimum=0,
        maximum=99,
        read_only=True,
    ),
    ParameterSpec(
        'cpu_affinity', '', 'CPUs of the control thread, like 2,3; empty: any', read_only=True
    ),
    ParameterSpec(
        'max_state_age_s',
        0.2,
        'measured positions older than this, on the ROS clock, stop the robot',
        minimum=0.01,
        maximum=10.0,
        read_only=True,
    ),
    ParameterSpec(
        'max_tracking_error',
        0.5,
        'distance of measured and commanded position, rad or m, that stops it until ~/start, of '
        'joints for which the robot file gives none; at most three quarters of their range',
        minimum=0.001,
        maximum=100.0,
        read_only=True,
    ),
    ParameterSpec(
        'tick_timeout_s',
        0.0,
        'a pause of the control loop that holds the robot and drops the plan, seen one control '
        'period later at most; 0: three control periods, at least 0.02 s',
        minimum=0.0,
        maximum=1.0,
        read_only=True,
    ),
    ParameterSpec(
        'clock_jump_s',
        0.2,
        'a step of the ROS clock that drops the plan',
        minimum=0.01,
        maximum=10.0,
        read_only=True,
    ),
    ParameterSpec(
        'clamp_latch',
        20,
        'so many chunks outside the limits in a row stop the robot until ~/reset; 0: never',
        minimum=0,
        maximum=10000,
        read_only=True,
    ),
    ParameterSpec(
        'replan_interval',
        8,
        'steps executed from a chunk before the next takes over; 1 to the horizon',
        minimum=1,
        maximum=_MOST_STEPS,
    ),
    ParameterSpec(
        'replan_mode',
        'asynchronous',
        'ask while moving, or execute, hold, ask, and go on',
        words=get_args(ReplanMode),
    ),
    ParameterSpec(
        'overrun',
        'continue',
        'when the next chunk is late: hold, or go on',
        words=get_args(Overrun),
    ),
    ParameterSpec(
        'max_overrun_steps',
        4,
        'steps to go on for, with overrun: continue',
        minimum=0,
        maximum=_MOST_STEPS,
    ),
    ParameterSpec(
        'interpolation', 'cubic', 'between two steps of the plan', words=get_args(Interpolation)
    ),
    ParameterSpec(
        'handover_mode', 'blend', 'how one chunk follows another', words=get_args(HandoverMode)
    ),
    ParameterSpec('blend_steps', 4, 'length of a blend, steps', minimum=1, maximum=_MOST_STEPS),
    ParameterSpec(
        'ensemble_decay',
        0.01,
        'm of the weights exp(-m*i) of an ensemble',
        minimum=0.0,
        maximum=100.0,
    ),
    ParameterSpec(
        'ensemble_order', 'oldest_first', 'which chunk is i = 0', words=get_args(EnsembleOrder)
    ),
    ParameterSpec(
        'delay_quantile',
        0.9,
        'share of the observed delays that the estimate covers',
        minimum=0.01,
        maximum=1.0,
    ),
    ParameterSpec('delay_window', 20, 'observed delays kept', minimum=1, maximum=1000),
    ParameterSpec(
        'delay_floor_steps',
        1,
        'the estimate of the delay is never smaller',
        minimum=0,
        maximum=_MOST_STEPS,
    ),
    ParameterSpec(
        'delay_ceiling_steps',
        20,
        'the estimate of the delay is never larger',
        minimum=0,
        maximum=_MOST_STEPS,
    ),
    ParameterSpec(
        'request_timeout_s',
        2.0,
        'give the request up when no chunk came for so long, and make a new one',
        minimum=0.05,
        maximum=60.0,
    ),
    ParameterSpec(
        'max_observation_age_s',
        2.0,
        'a chunk whose observation is older than this on arrival is dropped',
        minimum=0.01,
        maximum=60.0,
    ),
    ParameterSpec(
        'dry_run', False, 'compute and report all, command nothing; a change stops the robot'
    ),
)


def executor_parameters(values: Mapping[str, Any]) -> ExecutorParameters:
    """What may change while the robot moves, from the parameters' values.

    Raises:
        ValueError: values that do not go together.
    """
    return ExecutorParameters(
        replan_interval=values['replan_interval'],
        replan_mode=values['replan_mode'],
        overrun=values['overrun'],
        max_overrun_steps=values['max_overrun_steps'],
        interpolation=values['interpolation'],
        handover=HandoverParameters(
            mode=values['handover_mode'],
            blend_steps=values['blend_steps'],
            ensemble_decay=values['ensemble_decay'],
            ensemble_order=values['ensemble_order'],
        ),
        delay=DelayParameters(
            quantile=values['delay_quantile'],
            window=values['delay_window'],
            floor_steps=values['delay_floor_steps'],
            ceiling_steps=values['delay_ceiling_steps'],
        ),
        request_timeout_s=values['request_timeout_s'],
        max_observation_age_s=values['max_observation_age_s'],
    )


def values_in_force(parameters: ExecutorParameters, *, dry_run: bool) -> dict[str, Any]:
    """The other way round: the value of every live parameter, under the name that ROS knows."""
    handover, delay = parameters.handover, parameters.delay
    return {
        'replan_interval': parameters.replan_interval,
        'replan_mode': parameters.replan_mode,
        'overrun': parameters.overrun,
        'max_overrun_steps': parameters.max_overrun_steps,
        'interpolation': parameters.interpolation,
        'handover_mode': handover.mode,
        'blend_steps': handover.blend_steps,
        'ensemble_decay': handover.ensemble_decay,
        'ensemble_order': handover.ensemble_order,
        'delay_quantile': delay.quantile,
        'delay_window': delay.window,
        'delay_floor_steps': delay.floor_steps,
        'delay_ceiling_steps': delay.ceiling_steps,
        'request_timeout_s': parameters.request_timeout_s,
        'max_observation_age_s': parameters.max_observation_age_s,
        'dry_run': dry_run,
    }


def tick_timeout(values: Mapping[str, Any]) -> float:
    """Longest time between two ticks, seconds: `tick_timeout_s`, or what it is by itself."""
    given = float(values['tick_timeout_s'])
    return given if given > 0.0 else tick_timeout_for(1.0 / values['control_rate_hz'])


def watchdog_parameters(values: Mapping[str, Any], *, use_sim_time: bool) -> WatchdogParameters:
    """When to stop; under `use_sim_time` plan time follows the ROS clock, so a pause pauses it."""
    return WatchdogParameters(
        tick_timeout_s=tick_timeout(values),
        max_state_age_s=values['max_state_age_s'],
        max_tracking_error=values['max_tracking_error'],
        clock_jump_s=values['clock_jump_s'],
        motion_clock='ros' if use_sim_time else 'steady',
    )
