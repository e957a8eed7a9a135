"""The executor's parameter table: complete, in range, and what the core makes of it."""

import pytest
import yaml
from paths import ROOT
from tabletop_policy import STEP_TIME_S

from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.watchdog import WatchdogParameters, tick_timeout
from vla_runtime.nodes.executor.parameters import (
    EXECUTOR_PARAMETERS,
    executor_parameters,
    watchdog_parameters,
)
from vla_runtime.nodes.executor.setup import check_fixed, read_files
from vla_runtime.nodes.parameter_table import ParameterError

CONFIG = ROOT / 'config' / 'executor.yaml'
DEFAULTS = {row.name: row.default for row in EXECUTOR_PARAMETERS}
GIVEN_ELSEWHERE = {'bundle', 'server', 'robot'}


def test_the_shipped_file_names_every_parameter_and_its_default():
    document = yaml.safe_load(CONFIG.read_text(encoding='utf-8'))
    shipped = document['/**']['ros__parameters']
    expected = {name: value for name, value in DEFAULTS.items() if name not in GIVEN_ELSEWHERE}
    assert shipped == expected


def test_every_parameter_is_described_and_its_default_allowed():
    for row in EXECUTOR_PARAMETERS:
        assert row.description
        assert not row.words or row.default in row.words
        assert row.minimum is None or row.minimum <= row.default <= row.maximum


def test_only_what_shapes_the_structure_is_read_only():
    live = {row.name for row in EXECUTOR_PARAMETERS if not row.read_only}
    assert {'replan_interval', 'handover_mode', 'overrun', 'dry_run'} <= live
    assert not live & {'bundle', 'robot', 'control_rate_hz', 'clamp_latch'}


def test_values_reach_the_core():
    given = {**DEFAULTS, 'replan_interval': 3, 'handover_mode': 'ensemble', 'delay_window': 7}
    parameters = executor_parameters(given)
    assert isinstance(parameters, ExecutorParameters)
    assert parameters.replan_interval == 3
    assert parameters.handover.mode == 'ensemble'
    assert parameters.delay.window == 7


def test_values_that_do_not_go_together_are_refused():
    given = {**DEFAULTS, 'delay_floor_steps': 5, 'delay_ceiling_steps': 2}
    with pytest.raises(ValueError, match='floor'):
        executor_parameters(given)


def test_defaults_of_the_node_are_those_of_the_core():
    assert watchdog_parameters(DEFAULTS, use_sim_time=False) == WatchdogParameters()
    assert executor_parameters(DEFAULTS) == ExecutorParameters()


def test_plan_time_follows_the_ros_clock_in_simulation_only():
    assert watchdog_parameters(DEFAULTS, use_sim_time=True).motion_clock == 'ros'
    assert watchdog_parameters(DEFAULTS, use_sim_time=False).motion_clock == 'steady'


def test_a_tick_timeout_shorter_than_two_periods_is_refused():
    with pytest.raises(ParameterError):
        check_fixed({**DEFAULTS, 'control_rate_hz': 10.0, 'tick_timeout_s': 0.1})


@pytest.mark.parametrize(
    ('rate_hz', 'expected_s'), [(10.0, 0.3), (100.0, 0.03), (200.0, 0.02), (500.0, 0.02)]
)
def test_the_tick_timeout_follows_the_control_rate_unless_it_is_given(rate_hz, expected_s):
    given = {**DEFAULTS, 'control_rate_hz': rate_hz}
    check_fixed(given)
    watchdog = watchdog_parameters(given, use_sim_time=False)
    assert tick_timeout(watchdog, 1.0 / rate_hz) == pytest.approx(expected_s)
    given['tick_timeout_s'] = 0.5
    watchdog = watchdog_parameters(given, use_sim_time=False)
    assert tick_timeout(watchdog, 1.0 / rate_hz) == 0.5


def test_a_control_rate_below_the_policys_steps_is_refused_with_both_numbers(bundle):
    given = {**DEFAULTS, 'robot': 'tabletop', 'bundle': str(bundle), 'control_rate_hz': 10.0}
    steps = round(1.0 / STEP_TIME_S)
    with pytest.raises(ParameterError, match=f'control_rate_hz is 10, .* makes {steps} steps'):
        read_files(given)
    read_files({**given, 'control_rate_hz': float(steps)})


@pytest.mark.parametrize('name', ['robot', 'bundle'])
def test_a_file_that_is_not_named_is_asked_for(name):
    given = {**DEFAULTS, 'robot': 'tabletop', 'bundle': 'somewhere', name: ''}
    with pytest.raises(ParameterError, match=f"'{name}' is not set"):
        read_files(given)


def test_a_bundle_that_is_none_is_named(tmp_path):
    with pytest.raises(ParameterError):
        read_files({**DEFAULTS, 'robot': 'tabletop', 'bundle': str(tmp_path / 'nowhere')})
