"""The controller's output follows the commands, whatever its cycles and the messages' lateness."""

from __future__ import annotations

import numpy as np
import pytest
from trajectory_controller import TrajectoryController
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.nodes.executor.trajectory_message import DelayedWay, LineOnArrival

PERIOD_S, T0_S = 0.01, 1000.0
RATES_HZ = [100, 125, 250, 500, 1000]
AMPLITUDE, OMEGA = 0.5, 0.5 * np.pi
SPEED = AMPLITUDE * OMEGA


class Run:
    """Commands along a sine, their messages on their way, and the controller's cycles.

    Attributes:
        speeds: (cycles,) of the output, rad/s.
        cycles_s: (cycles,) their times.
        lags: (cycles,) distance of the output from the command of this moment, rad.
    """

    def __init__(
        self,
        rate_hz: int,
        form: str,
        *,
        late_ms: float = 2.0,
        paused_ms: float = 0.0,
        scaling: float = 1.0,
        offset_s: float = 0.0,
        same_clock: bool = True,
        plan=lambda at_s: AMPLITUDE * np.sin(OMEGA * at_s),
    ) -> None:
        random = np.random.default_rng(0)
        bounds = np.array([-2.0]), np.array([2.0])
        line, way = LineOnArrival(1, PERIOD_S), DelayedWay(1, PERIOD_S, 1.0 / rate_hz, *bounds)
        self.message = JointTrajectory(joint_names=['j'])
        self.message.points = (line if form == 'line' else way).points
        self.controller = TrajectoryController(['j'], 1.0 / rate_hz, np.zeros(1), scaling=scaling)
        on_its_way, tick_s, before, last_s = [], 0.0, np.zeros(1), -PERIOD_S
        output, cycles, lags, earlier_s = [], [], [], 0.0
        cycle_s = 0.0
        while cycle_s < 6.0 / scaling:
            cycle_s = len(cycles) / rate_hz + 1e-4 * random.random() + 1.3e-4
            while tick_s <= cycle_s:
                now = np.array([plan(tick_s * scaling)])
                # As the core: what a pause has cost is not made up for in one command.
                reach = 1.1 * SPEED * min(tick_s - last_s, 1.5 * PERIOD_S)
                now = np.clip(now, before - reach, before + reach)
                at_ns = round((T0_S + tick_s) * 1e9)
                if form == 'line':
                    line.fill(self.message, before, now)
                else:
                    if tick_s == 0.0:
                        way.begin(now, at_ns)
                    way.fill(self.message, now, at_ns, same_clock=same_clock, scaling=scaling)
                arrival_s = tick_s + 3e-4 + 1e-3 * late_ms * random.random() ** 2
                on_its_way.append((arrival_s, _copy(self.message)))
                before, last_s = now, tick_s
                late_s = 2e-4 * random.random()
                if random.random() < 0.02:
                    late_s += 1e-3 * paused_ms * random.random()
                # Deadlines lie on one grid; those that have passed are left out.
                tick_s = (np.floor(tick_s / PERIOD_S + 1e-6) + 1) * PERIOD_S + late_s
            while on_its_way and on_its_way[0][0] <= cycle_s:
                self.controller.take(on_its_way.pop(0)[1], T0_S + offset_s + cycle_s)
            self.controller.measured = self.controller.output
            output.append(self.controller.update(T0_S + offset_s + cycle_s, cycle_s - earlier_s)[0])
            cycles.append(cycle_s)
            lags.append(abs(before[0] - output[-1]))
            earlier_s = cycle_s
        begun = int(0.5 * rate_hz)
        self.cycles_s = np.array(cycles)[begun:]
        self.speeds = np.diff(output)[begun - 1 :] / np.diff(cycles)[begun - 1 :]
        self.lags = np.array(lags)[begun:]

    def ripple(self, scaling: float = 1.0) -> float:
        """Rms of the output's speed against the plan's, as a share, where it is not slow."""
        true = self.true_speeds(scaling)
        fast = np.abs(true) > 0.3 * SPEED * scaling
        return float(np.sqrt(np.mean((self.speeds[fast] / true[fast] - 1.0) ** 2)))

    def true_speeds(self, scaling: float) -> np.ndarray:
        """(cycles,) of the plan, at the delay that fits the output best."""
        delays = np.arange(0.0, 0.05, 0.001)
        guesses = [scaling * SPEED * np.cos(OMEGA * scaling * (self.cycles_s - d)) for d in delays]
        return min(guesses, key=lambda guess: float(np.sum((guess - self.speeds) ** 2)))


def _copy(message: JointTrajectory) -> JointTrajectory:
    from rclpy.serialization import deserialize_message, serialize_message

    return deserialize_message(serialize_message(message), JointTrajectory)


@pytest.mark.parametrize('rate_hz', RATES_HZ)
@pytest.mark.parametrize('late_ms', [1.0, 4.0])
def test_the_delayed_way_does_not_ripple_at_any_rate(rate_hz: int, late_ms: float) -> None:
    run = Run(rate_hz, 'way', late_ms=late_ms)
    assert run.ripple() < 0.03
    assert np.abs(run.speeds).max() < 1.02 * SPEED
    # Two periods of the executor: no more than the line on arrival lags at its worst.
    assert run.lags.max() < SPEED * 2.0 * PERIOD_S


def test_the_line_on_arrival_ripples_where_its_period_does_not_fit_the_cycles() -> None:
    assert Run(250, 'line').ripple() > 0.2


@pytest.mark.parametrize('rate_hz', RATES_HZ)
def test_a_late_tick_is_neither_a_standstill_nor_a_jump(rate_hz: int) -> None:
    run = Run(rate_hz, 'way', paused_ms=8.0)
    assert run.ripple() < 0.03
    run = Run(rate_hz, 'way', paused_ms=40.0)
    # It rests where the last line ends, and the next command makes up for nothing.
    assert np.abs(run.speeds).max() < 1.3 * SPEED


@pytest.mark.parametrize('rate_hz', RATES_HZ)
@pytest.mark.parametrize('offset_s', [-3.0, 0.02])
def test_another_clock_is_as_good_as_a_line_on_arrival(rate_hz: int, offset_s: float) -> None:
    run = Run(rate_hz, 'way', offset_s=offset_s, same_clock=False)
    assert run.controller.refused == 0
    assert run.ripple() < max(1.1 * Run(rate_hz, 'line').ripple(), 0.2)


@pytest.mark.parametrize('rate_hz', RATES_HZ)
@pytest.mark.parametrize('scaling', [0.5, 0.1])
def test_a_scaled_controller_is_never_as_fast_as_an_unscaled_one(
    rate_hz: int, scaling: float
) -> None:
    run = Run(rate_hz, 'way', scaling=scaling)
    assert np.mean(np.abs(run.speeds)) == pytest.approx(
        scaling * np.mean(np.abs(SPEED * np.cos(np.linspace(0.5 * OMEGA, 6.0 * OMEGA, 5000)))),
        rel=0.25,
    )
    # A message that is late by two cycles of a millisecond makes up for them; a way that went to
    # its end whatever the scaling would be ten times as fast.
    assert np.abs(run.speeds).max() < 4.0 * scaling * SPEED


def test_a_velocity_interface_reads_the_speed_of_the_commands() -> None:
    velocities = {}
    for form in ('line', 'way'):
        run = Run(100, form, plan=lambda at_s: 0.2 * at_s)
        velocities[form] = float(run.controller.velocity[0])
    assert velocities['way'] == pytest.approx(0.2, rel=0.02)
    assert velocities['line'] == 0.0


def made(way: DelayedWay, message: JointTrajectory) -> tuple[np.ndarray, np.ndarray]:
    stamp = message.header.stamp.sec + message.header.stamp.nanosec * 1e-9
    spans = [p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in message.points]
    return stamp + np.array(spans), np.array([p.positions[0] for p in message.points])


def test_nothing_goes_beyond_the_position_limits_or_the_last_line() -> None:
    way = DelayedWay(1, PERIOD_S, 0.002, np.array([-1.0]), np.array([1.0]))
    message = JointTrajectory(points=way.points)
    way.begin(np.array([0.97]), 0)
    for tick, position in enumerate((0.98, 0.99, 1.0)):
        at_ns = (tick + 1) * 10_000_000
        way.fill(message, np.array([position]), at_ns, same_clock=True, scaling=1.0)
        times, positions = made(way, message)
        assert (np.diff(times) > 0.0).all() and times[0] < at_ns * 1e-9
        assert positions.max() <= 1.0
        assert positions[-1] - position <= 0.01 + 1e-9


def test_commands_at_one_time_and_a_clock_that_stands_still_make_no_speed() -> None:
    way = DelayedWay(1, PERIOD_S, 0.002, np.array([-9.0]), np.array([9.0]))
    message = JointTrajectory(points=way.points)
    at_ns = 5_000_000_000
    way.begin(np.zeros(1), at_ns)
    for _ in range(300):
        way.fill(message, np.zeros(1), at_ns, same_clock=True, scaling=1.0)
    for tick in range(1, 6):
        position = 0.008 * tick
        way.fill(
            message, np.array([position]), at_ns + tick * 10_000_000, same_clock=True, scaling=1.0
        )
        times, positions = made(way, message)
        speeds = np.diff(positions) / np.diff(times)
        assert np.abs(speeds).max() <= 0.8 + 1e-6
    # A hold of another thread a moment after the tick.
    way.fill(message, np.array([0.0405]), at_ns + 50_000_000, same_clock=True, scaling=1.0)
    times, positions = made(way, message)
    assert (np.diff(times) > 0.0).all()
    assert positions[-1] < 0.0405 + 0.002


def test_a_clock_that_is_set_back_begins_anew_where_the_command_is() -> None:
    way = DelayedWay(1, PERIOD_S, 0.002, np.array([-9.0]), np.array([9.0]))
    message = JointTrajectory(points=way.points)
    way.begin(np.zeros(1), 5_000_000_000)
    way.fill(message, np.array([0.01]), 5_010_000_000, same_clock=True, scaling=1.0)
    way.fill(message, np.array([0.02]), 1_000_000_000, same_clock=True, scaling=1.0)
    times, positions = made(way, message)
    assert times[0] < 1.0 < times[-1] < 1.1
    assert (positions == 0.02).all()
