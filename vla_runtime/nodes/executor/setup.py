"""Make the executor's core from the node's parameters: read the files, match them, build it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vla_runtime.bundle.folder import Bundle, BundleError, read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.execution.columns import Column
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.guard import ClampLatch
from vla_runtime.files.package_files import share_folder
from vla_runtime.nodes.executor.parameters import (
    executor_parameters,
    watchdog_parameters,
)
from vla_runtime.nodes.executor.realtime import parse_cpus
from vla_runtime.nodes.parameter_table import ParameterError
from vla_runtime.nodes.server_parameters import server_address
from vla_runtime.remote.connection import ServerLostError
from vla_runtime.remote.contract import Contract
from vla_runtime.remote.link import fetch_contract
from vla_runtime.robot.file import find_robot, load_robot
from vla_runtime.robot.leader import leader_parameters
from vla_runtime.robot.match import RobotMatch, match_robot
from vla_runtime.robot.schema import Robot
from vla_runtime.robot.unit_slips import UnitCheck, trained_ranges


def check_fixed(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the CPUs of `cpu_affinity`; ParameterError where parameters disagree."""
    period_s = 1.0 / given['control_rate_hz']
    if 0.0 < given['tick_timeout_s'] < 2.0 * period_s:
        raise ParameterError(
            f'parameter tick_timeout_s is {given["tick_timeout_s"]:g} s, which is shorter than '
            f'two control periods ({2.0 * period_s:g} s); 0 lets it be three of them'
        )
    try:
        return parse_cpus(given['cpu_affinity'])
    except ValueError as error:
        raise ParameterError(f'parameter {error}') from error


def check_rate(control_rate_hz: float, spec: BundleSpec) -> None:
    """Raise ParameterError for a control rate below the plan's steps a second."""
    step_rate_hz = 1.0 / spec.step_time_s
    if control_rate_hz < step_rate_hz * (1.0 - 1e-6):
        raise ParameterError(
            f'parameter control_rate_hz is {control_rate_hz:g}, but the policy of the bundle '
            f"('{spec.name}') makes {step_rate_hz:g} steps a second; set it to that or more"
        )


def read_files(given: Mapping[str, Any]) -> tuple[Robot, BundleSpec, RobotMatch]:
    """Read the robot file and the bundle's policy.yaml, here or from a server, and match them.

    Raises:
        ParameterError: `robot` or `bundle` is not set, the bundle or the server cannot be used, or
            the control rate is below its steps a second.
        RobotError, MatchError, ValueError: the robot file cannot be used, or not with this bundle.
    """
    for name in ('robot', 'bundle'):
        if not given[name] and not (name == 'bundle' and given['server']):
            raise ParameterError(f"parameter '{name}' is not set: -p {name}:=PATH")
    robot = load_robot(find_robot(given['robot'], share_folder() / 'config' / 'robots'))
    spec = _read_bundle(given).spec
    check_rate(given['control_rate_hz'], spec)
    return (
        robot,
        spec,
        match_robot(robot, spec, given['server'] or os.path.expanduser(given['bundle'])),
    )


def check_units(given: Mapping[str, Any], robot: Robot, match: RobotMatch) -> UnitCheck:
    """Return what compares measured positions with the bundle's statistics, or ParameterError."""
    read = _read_bundle(given)
    return UnitCheck(robot, match, trained_ranges(read.spec, read.statistics, match))


def _read_bundle(given: Mapping[str, Any]) -> Bundle | Contract:
    if given['server']:
        try:
            return fetch_contract(server_address(given))
        except (ValueError, ServerLostError) as error:
            raise ParameterError(f'parameter server: {error}') from error
    try:
        # The policy node checks the weights.
        return read_bundle(os.path.expanduser(given['bundle']), verify=False)
    except BundleError as error:
        raise ParameterError(f'parameter bundle: {error}') from error


def measured_columns(match: RobotMatch) -> tuple[Column, ...]:
    """Return the columns; those of a twist's tool name the source of its position."""
    sources = {
        name: tool.joints[at] if tool.joints else str(tool.topic)
        for tool in match.tools
        for at, name in enumerate(tool.columns)
    }
    return tuple(
        replace(column, measured_as=sources.get(column.name, '')) for column in match.columns
    )


def _home_of(robot: Robot, match: RobotMatch) -> dict[str, float]:
    """Return the home pose of the joints that this policy commands the positions of."""
    kinds = {column.name: column.kind for column in match.columns}
    return {name: at for name, at in robot.home.items() if kinds.get(name) == 'position'}


def make_core(
    given: Mapping[str, Any],
    robot: Robot,
    match: RobotMatch,
    latch: ClampLatch,
    *,
    use_sim_time: bool,
    step_time_s: float | None = None,
) -> ChunkExecutor:
    """Make an executor that has commanded nothing yet; it keeps the latch of the one before.

    Under `use_sim_time` plans follow the ROS clock. `step_time_s` is the policy's time of a step.
    """
    config = ExecutorConfig(
        columns=measured_columns(match),
        limits=match.limits,
        form=match.written,
        start=robot.start,
        watchdog=watchdog_parameters(given, use_sim_time=use_sim_time),
        on_stop=robot.on_stop,
        clamp_latch=given['clamp_latch'],
        control_period_s=1.0 / given['control_rate_hz'],
        restart_after_outage_s=robot.restart_after_outage_s,
        step_time_s=step_time_s,
        home=_home_of(robot, match),
        leader=leader_parameters(robot, match),
    )
    return ChunkExecutor(config, executor_parameters(given), given['dry_run'], latch)
