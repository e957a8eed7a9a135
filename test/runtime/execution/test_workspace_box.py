"""A tool that is commanded by velocity stays in its box, by its measured position."""

import numpy as np
import pytest
from execution_rig import ROS_START_NS, alike, chunk_of, holding
from hypothesis import given
from hypothesis import strategies as st
from watched_executor import WatchedExecutor

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import CommandKind, LimitKind, Reason
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.limits import ColumnLimits
from vla_runtime.execution.state import MeasuredState
from vla_runtime.execution.watchdog import StateWatch, WatchdogParameters
from vla_runtime.types import ChunkHeader

AXES = ('x', 'y', 'z')
LOWER, UPPER = np.array([0.2, -0.4, 0.05]), np.array([0.7, 0.4, 0.6])
SPEED, ACCELERATION = 0.25, 2.0
STEP_S = 0.05
RATES_HZ = st.sampled_from([20, 50, 100, 200, 500])


class Tool:
    """An executor that commands a tool's velocity, and a tool that follows it.

    The tool moves on a grid of milliseconds; its velocity follows the command late, as a first
    order lag. Commands and measurements have rates of their own.
    """

    def __init__(
        self,
        place: np.ndarray,
        control_hz: int = 100,
        state_hz: int = 100,
        lag_s: float = 0.0,
        acceleration: float = ACCELERATION,
        bounded: str = 'xyz',
    ) -> None:
        columns = [
            *(Column(name, 'velocity', feedback=name in bounded) for name in AXES),
            Column('w', 'velocity', feedback=False),
        ]
        limit = ColumnLimits(velocity=SPEED, acceleration=acceleration)
        names = [column.name for column in columns]
        box = {
            name: (low, high)
            for name, low, high in zip(AXES, LOWER, UPPER, strict=True)
            if name in bounded
        }
        limits = alike(names, limit, workspace=box)
        config = ExecutorConfig(
            tuple(columns), limits=limits, clamp_latch=0, control_period_s=1.0 / control_hz
        )
        self.executor = WatchedExecutor(config, holding(replan_interval=6))
        self.names, self.kinds = tuple(names), ('velocity',) * 4
        self.place, self.rate = place.astype(float), np.zeros(3)
        self.command, self.lag_s = np.zeros(4), lag_s
        self.every = {'tick': max(1, 1000 // control_hz), 'state': max(1, 1000 // state_hz)}
        self.ms, self.number = 0, 0
        self.measured = True
        self.places: list[np.ndarray] = []
        self.commands: list[np.ndarray] = []
        self.kinds_seen: list[CommandKind] = []

    @property
    def now(self) -> tuple[float, int]:
        return 50.0 + self.ms * 1e-3, ROS_START_NS + self.ms * 1_000_000

    def run(self, seconds: float, wanted: np.ndarray | None = None, noise: float = 0.0) -> None:
        """Let time pass; every chunk that is asked for wants these velocities."""
        generator = np.random.default_rng(self.ms)
        for _ in range(round(seconds * 1e3)):
            self.ms += 1
            share = 1.0 if self.lag_s == 0.0 else 1e-3 / self.lag_s
            self.rate += share * (self.command[:3] - self.rate)
            self.place += self.rate * 1e-3
            if self.measured and self.ms % self.every['state'] == 0:
                self.executor.observe_state(list(AXES), list(self.place), self.now[1])
            if self.ms % self.every['tick']:
                continue
            command = self.executor.tick(*self.now)
            self.kinds_seen.append(command.kind)
            self.command = command.setpoints.copy()
            self.places.append(self.place.copy())
            self.commands.append(self.command)
            request = self.executor.poll_request(*self.now) if wanted is not None else None
            if request is None:
                continue
            self.number += 1
            rows = wanted + noise * generator.normal(size=(12, 4))
            self.executor.submit_chunk(
                chunk_of(rows, self.names, self.kinds, STEP_S),
                ChunkHeader(self.now[1], 0, self.number, request=request.request),
                *self.now,
            )

    def start(self) -> None:
        self.run(0.6)
        result = self.executor.start(*self.now)
        assert result.started, result.text

    @property
    def furthest_out(self) -> float:
        places = np.array(self.places)
        return float(np.maximum(LOWER - places, places - UPPER).max())


def of_velocity(*axes: float) -> np.ndarray:
    return np.array([*axes, 0.0])


@pytest.mark.parametrize('state_hz', [10, 100, 500])
def test_a_tool_that_is_driven_at_its_box_brakes_before_it_and_reaches_it(state_hz):
    tool = Tool(np.array([0.45, 0.0, 0.3]), state_hz=state_hz)
    tool.start()
    tool.run(4.0, of_velocity(0.0, 0.0, -SPEED))
    assert tool.furthest_out < 1e-3
    assert tool.place[2] == pytest.approx(LOWER[2], abs=2e-3)
    assert tool.executor.counters.limited[('z', LimitKind.POSITION)] > 0
    rates = np.array(tool.commands)[:, 2]
    assert np.abs(np.diff(rates)).max() <= ACCELERATION * 0.01 * (1 + 1e-6)
    # It was let go at full speed where the box is far.
    assert rates.min() == pytest.approx(-SPEED)


@given(
    start=st.tuples(*[st.floats(0.0, 1.0)] * 3),
    directions=st.lists(st.tuples(*[st.floats(-1.0, 1.0)] * 3), min_size=1, max_size=4),
    control_hz=RATES_HZ,
    state_hz=st.sampled_from([10, 20, 50, 100, 500]),
    lag_s=st.sampled_from([0.0, 0.01, 0.03]),
    acceleration=st.sampled_from([0.5, ACCELERATION, 20.0, np.inf]),
    noise=st.sampled_from([0.0, 0.1]),
)
def test_a_tool_that_starts_inside_never_leaves_the_box(
    start, directions, control_hz, state_hz, lag_s, acceleration, noise
):
    tool = Tool(
        LOWER + np.array(start) * (UPPER - LOWER), control_hz, state_hz, lag_s, acceleration
    )
    tool.start()
    for direction in directions:
        tool.run(1.2, of_velocity(*(2.0 * SPEED * np.array(direction))), noise)
    assert tool.furthest_out < 1e-3
    rates = np.array(tool.commands)
    assert np.abs(rates).max() <= SPEED * (1 + 1e-9)
    assert np.abs(np.diff(rates, axis=0)).max() <= acceleration / control_hz * (1 + 1e-6)
    assert CommandKind.TRACK in tool.kinds_seen


def test_a_tool_that_is_found_outside_moves_back_inside_only():
    tool = Tool(np.array([0.45, 0.0, 0.02]))
    tool.start()
    tool.run(1.0, of_velocity(0.1, 0.0, -0.2))
    rates = np.array(tool.commands)
    assert rates[:, 2].min() >= 0.0
    assert rates[:, 0].max() == pytest.approx(0.1)
    tool.run(2.0, of_velocity(0.0, 0.0, 0.1))
    assert tool.place[2] > LOWER[2]


def test_along_a_wall_a_tool_slides_and_an_axis_without_bounds_is_free():
    tool = Tool(np.array([0.45, 0.0, 0.3]), bounded='z')
    tool.start()
    tool.run(4.0, of_velocity(0.2, 0.0, -0.2))
    assert LOWER[2] - 1e-3 < tool.place[2] < LOWER[2] + 5e-3
    assert tool.place[0] > UPPER[0] + 0.1


def test_a_tool_whose_measurement_ends_is_held():
    tool = Tool(np.array([0.45, 0.0, 0.3]))
    tool.start()
    tool.run(0.5, of_velocity(0.0, 0.0, -0.1))
    tool.measured = False
    tool.run(0.6, of_velocity(0.0, 0.0, -0.1))
    assert np.abs(tool.command).max() == 0.0
    assert tool.executor.status().reason.value == 'state_stale'
    assert tool.furthest_out < 0.0


def test_a_tool_that_nobody_measures_yet_is_not_started():
    tool = Tool(np.array([0.45, 0.0, 0.3]))
    tool.measured = False
    tool.run(0.2)
    result = tool.executor.start(*tool.now)
    assert not result.started and result.reason is not None
    assert result.reason.value == 'state_missing'


def test_what_measures_a_tool_is_named_and_not_the_velocity():
    columns = CommandColumns(
        [Column(f'v{axis}', 'velocity', measured_as='/tool_pose') for axis in AXES]
    )
    model = ColumnModel(columns)
    watch, state = StateWatch(WatchdogParameters(), model), MeasuredState(model)

    def told(reason: Reason, now_ns: int) -> str:
        text = watch.describe(reason, state, now_ns)
        assert not any(f"'{name}'" in text for name in columns.names)
        return text

    assert "'/tool_pose'" in told(Reason.STATE_MISSING, ROS_START_NS)
    state.observe(columns.names, [0.1, 0.2, np.nan], ROS_START_NS)
    assert "'/tool_pose' is not a number" in told(Reason.STATE_NOT_FINITE, ROS_START_NS)
    assert "'/tool_pose' is 1.000 s old" in told(Reason.STATE_STALE, ROS_START_NS + 10**9)
    assert "'/tool_pose'" in told(Reason.STATE_FROM_FUTURE, ROS_START_NS - 10**9)
    assert "'/tool_pose'" in state.too_new()
