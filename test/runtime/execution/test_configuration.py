"""What makes no sense is refused where it is made, by its name, with the numbers."""

import re
from functools import partial

import numpy as np
import pytest
from execution_rig import holding

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits
from vla_runtime.execution.parameters import DelayParameters, ExecutorParameters
from vla_runtime.execution.plan import make_plan
from vla_runtime.execution.stopping import StopActions
from vla_runtime.execution.watchdog import WatchdogParameters

NAN = float('nan')
INSIDE = partial(make_limits, ['arm'], {'arm': ColumnLimits(-1, 1)})
OF_A = partial(ExecutorConfig, (Column('a'),))


def limit(**given):
    return make_limits(('arm',), {'arm': ColumnLimits(**given)})


@pytest.mark.parametrize(
    ('make', 'given', 'said'),
    [
        (limit, {'lower': 1.0, 'upper': 1.0}, "'arm' lower must be smaller than upper"),
        (limit, {'lower': NAN}, "'arm' lower"),
        (limit, {'velocity': 0.0}, "'arm' velocity must be larger than 0"),
        (limit, {'acceleration': -1.0}, "'arm' acceleration must be larger"),
        (limit, {'step_from_measured': NAN}, "'arm' step_from_measured"),
        (limit, {'tracking_error': 0.0}, "'arm' tracking_error"),
        (limit, {'tracking_error': -0.1}, "'arm' tracking_error"),
        (make_limits, {'names': ['arm'], 'columns': {'elbow': ColumnLimits()}}, 'elbow'),
        (INSIDE, {'workspace': {'arm': (2.0, 3.0)}}, 'no room'),
        (LimitActions, {'velocity': 'shrug'}, 'on_violation.velocity'),
        (StopActions, {'state_stale': 'crawl'}, 'on_stop: state_stale'),
        (CommandColumns, {'columns': []}, 'none given'),
        (CommandColumns, {'columns': [Column('a'), Column('a')]}, 'more than once'),
        (CommandColumns, {'columns': [Column('a', kind='torque')]}, 'torque'),
        (CommandColumns, {'columns': [Column('a', scale=0.0)]}, 'scale 0.0'),
        (CommandColumns, {'columns': [Column('a', scale=np.inf)]}, 'scale inf'),
        (CommandColumns, {'columns': [Column('i', quaternion='tool')]}, "'tool'"),
        (OF_A, {'limits': make_limits(['b'])}, 'limits'),
        (OF_A, {'control_period_s': 0.0}, 'control_period_s'),
        (OF_A, {'clamp_latch': -1}, 'clamp_latch'),
        (StartParameters, {'tolerance': 0.0}, 'start.tolerance: 0 where more than 0 is expected'),
        (StartParameters, {'approach_speed': -1.0}, 'start.approach_speed: -1 where more than 0'),
        (
            StartParameters,
            {'on_too_far': 'jump'},
            "start.on_too_far: 'jump' where one of refuse, a",
        ),
        (StartParameters, {'approach_timeout_s': 0.0}, 'approach_timeout_s'),
        (WatchdogParameters, {'tick_timeout_s': 0.0}, 'tick_timeout_s'),
        (WatchdogParameters, {'max_state_age_s': 0.0}, 'max_state_age_s'),
        (WatchdogParameters, {'max_tracking_error': 0.0}, 'max_tracking_error'),
        (WatchdogParameters, {'motion_clock': 'sundial'}, 'motion_clock'),
        (HandoverParameters, {'mode': 'jump'}, 'is'),
        (HandoverParameters, {'ensemble_order': 'random'}, 'ensemble_order is'),
        (HandoverParameters, {'blend_steps': 0}, 'blend_steps is'),
        (HandoverParameters, {'ensemble_decay': -0.1}, 'ensemble_decay is'),
        (HandoverParameters, {'ensemble_decay': NAN}, 'ensemble_decay is'),
        (ExecutorParameters, {'replan_interval': 0}, 'replan_interval is'),
        (ExecutorParameters, {'replan_mode': 'sometimes'}, 'replan_mode is'),
        (ExecutorParameters, {'overrun': 'panic'}, 'overrun is'),
        (ExecutorParameters, {'max_overrun_steps': -1}, 'max_overrun_steps is'),
        (ExecutorParameters, {'interpolation': 'quintic'}, 'interpolation is'),
        (ExecutorParameters, {'request_timeout_s': 0.0}, 'request_timeout_s is'),
        (ExecutorParameters, {'max_observation_age_s': NAN}, 'max_observation_age_s is'),
        (DelayParameters, {'quantile': 0.0}, 'delay'),
        (DelayParameters, {'quantile': 1.1}, 'delay'),
        (DelayParameters, {'window': 0}, 'delay'),
        (DelayParameters, {'floor_steps': 30}, 'delay'),
        (make_plan, {'knots': np.zeros((2, 1)), 'interpolation': 'quintic'}, "'quintic'"),
        (make_plan, {'knots': np.zeros((0, 3))}, 'shape'),
    ],
)
def test_what_makes_no_sense_is_an_error_that_names_it(make, given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make(**given)


@pytest.mark.parametrize(
    ('parameters', 'said'),
    [
        (holding(replan_interval=13), ''),
        (
            holding(handover=HandoverParameters(blend_steps=13)),
            'blend_steps is 13 but a chunk has only 12 steps; set blend_steps between 1 and 12',
        ),
        (
            holding(max_overrun_steps=13),
            'max_overrun_steps is 13 but a chunk has only 12 steps; set max_overrun_steps '
            'between 0 and 12',
        ),
    ],
)
def test_when_more_steps_are_wanted_than_a_chunk_has_expect_both_numbers(parameters, said):
    with pytest.raises(ValueError) as refusal:
        parameters.require_horizon(12)
    assert said in (str(refusal.value), '')
    parameters.require_horizon(13)
