"""Random inputs of the property test of the executor."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from vla_runtime.execution.approach import StartParameters
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.watchdog import WatchdogParameters

PERIOD_NS = 10_000_000
PERIOD_S = 0.01
HORIZON = 16
NAMES = ('arm', 'spin', 'wheel')
KINDS = ('position', 'position', 'velocity')
POSITIONS = np.array([True, True, False])
LIMITS = make_limits(
    NAMES,
    {
        'arm': ColumnLimits(-1.0, 1.0, 3.0, 40.0),
        'spin': ColumnLimits(velocity=4.0, acceleration=60.0),
        'wheel': ColumnLimits(-2.0, 2.0, 1.5, 20.0),
    },
    actions=LimitActions(acceleration='clamp'),
)
TOLERANCE = StartParameters().tolerance
HOLD_FOLLOWS = 0.05
WATCHDOG = WatchdogParameters(tick_timeout_s=0.05, max_state_age_s=0.1, max_tracking_error=0.4)

handovers = st.builds(
    HandoverParameters,
    mode=st.sampled_from(['switch', 'blend', 'ensemble', 'rtc']),
    blend_steps=st.integers(1, 6),
    ensemble_order=st.sampled_from(['oldest_first', 'newest_first']),
    ensemble_decay=st.floats(0, 1),
)
parameter_sets = st.builds(
    ExecutorParameters,
    replan_interval=st.integers(1, HORIZON),
    replan_mode=st.sampled_from(['asynchronous', 'synchronous']),
    overrun=st.sampled_from(['hold', 'continue']),
    max_overrun_steps=st.integers(0, 5),
    interpolation=st.sampled_from(['linear', 'cubic']),
    handover=handovers,
)
