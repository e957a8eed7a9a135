"""Under `use_sim_time` plan time is the ROS clock's: slow or fast, the robot gets to the end."""

from __future__ import annotations

import pytest
from execution_rig import Rig, holding
from stopping_rig import SWITCH

from vla_runtime.execution.command import Reason
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.watchdog import WatchdogParameters

STEPS = 20
SLOPE = 0.03  # a step, so 0.75 a second
PERIOD_NS = 10_000_000


class SimulatedClock:
    """Lets a rig tick at 100 Hz of steady time while `/clock` comes at its own rate and speed."""

    def __init__(self, rig: Rig, rate_hz: float, factor: float) -> None:
        self._rig, self._rate_hz, self._factor = rig, rate_hz, factor
        self._ticks, self._messages = 0, 0

    def tick(self) -> None:
        rig = self._rig
        self._ticks += 1
        rig.now_s += PERIOD_NS * 1e-9
        messages = int(self._ticks * PERIOD_NS * 1e-9 * self._rate_hz + 1e-9)
        rig.ros_ns += round((messages - self._messages) * self._factor / self._rate_hz * 1e9)
        self._messages = messages
        rig.measure()
        rig.tick_now()


@pytest.mark.parametrize(
    ('rate_hz', 'factor'), [(20, 1.0), (30, 1.0), (60, 1.0), (60, 2.0), (100, 2.0), (60, 5.0)]
)
def test_when_the_clock_is_slow_or_fast_expect_the_plan_followed_to_its_end(
    rate_hz: int, factor: float
) -> None:
    limits = make_limits(('a', 'b'), dict.fromkeys(('a', 'b'), ColumnLimits(velocity=1.0)))
    rig = Rig(
        holding(replan_interval=STEPS, overrun='hold', interpolation='linear', handover=SWITCH),
        limits=limits,
        control_period_s=PERIOD_NS * 1e-9,
        watchdog=WatchdogParameters(motion_clock='ros'),
    ).started()
    clock = SimulatedClock(rig, rate_hz, factor)
    assert rig.submit([SLOPE * (row + 1) for row in range(STEPS)]).accepted
    begun_ns = rig.ros_ns
    while rig.reason != 'starved':
        clock.tick()
        passed = (rig.ros_ns - begun_ns) / 40_000_000
        assert rig.ticks[-1].position == pytest.approx(SLOPE * min(passed, STEPS), abs=1e-9)
        assert passed < STEPS + 10
    assert rig.command.reason is Reason.STARVED
    assert not any(tick.command.limited for tick in rig.ticks)
