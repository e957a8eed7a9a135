"""The controller's output follows the commands, whatever its cycles and the messages' lateness."""

from __future__ import annotations

import numpy as np
import pytest
from thorough import thorough_but
from trajectory_controller import TrajectoryController
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.nodes.executor.trajectory_message import DelayedWay, LineOnArrival, WayLimits

PERIOD_S, T0_S = 0.01, 1000.0
RATES_HZ = thorough_but([125, 500], [100, 125, 250, 500, 1000])
# Points with positions alone, and with velocities and a tail.
WAYS = ['way', 'splines']
AMPLITUDE, OMEGA = 0.5, 0.5 * np.pi
SPEED = AMPLITUDE * OMEGA
ACCELERATION = 8.0


def limits(position: float = 9.0, acceleration: float = ACCELERATION) -> WayLimits:
    return WayLimits(np.array([-position]), np.array([position]), np.array([acceleration]))


class Run:
    """Commands along a sine, their messages on their way, and the controller's cycles.

    Attributes:
        speeds: (cycles,) of the output, rad/s.
        cycles_s: (cycles,) their times.
        lags: (cycles,) distance of the output from the command of this moment, rad.
        outputs, times_s: (all cycles,) the output, and when.
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
        stall_s: tuple[float, float] = (np.inf, np.inf),
        seconds: float = 6.0,
        plan=lambda at_s: AMPLITUDE * np.sin(OMEGA * at_s),
    ) -> None:
        random = np.random.default_rng(0)
        line = LineOnArrival(1, PERIOD_S)
        way = DelayedWay(1, PERIOD_S, 1.0 / rate_hz, limits(), splines=form == 'splines')
        self.message = JointTrajectory(joint_names=['j'])
        self.message.points = (line if form == 'line' else way).points
        self.controller = TrajectoryController(['j'], 1.0 / rate_hz, np.zeros(1), scaling=scaling)
        on_its_way, tick_s, before, last_s, speed = [], 0.0, np.zeros(1), -PERIOD_S, SPEED
        output, cycles, lags, earlier_s = [], [], [], 0.0
        cycle_s = 0.0
        while cycle_s < seconds / scaling:
            cycle_s = len(cycles) / rate_hz + 1e-4 * random.random() + 1.3e-4
            while tick_s <= cycle_s:
                now = np.array([plan(tick_s * scaling)])
                # As the core: what a pause has cost is not made up for in one command, and the
                # speed, of the whole pause, changes by the acceleration.
                span_s = tick_s - last_s
                fastest = 1.1 * SPEED * min(1.0, 1.5 * PERIOD_S / span_s)
                change = ACCELERATION * min(span_s, PERIOD_S)
                wanted = np.clip((now - before) / span_s, speed - change, speed + change)
                speed = np.clip(wanted, -fastest, fastest)
                now = before + span_s * speed
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
                if stall_s[0] <= tick_s < stall_s[1]:
                    tick_s = stall_s[1]
            while on_its_way and on_its_way[0][0] <= cycle_s:
                self.controller.take(on_its_way.pop(0)[1], T0_S + offset_s + cycle_s)
            self.controller.measured = self.controller.output
            output.append(self.controller.update(T0_S + offset_s + cycle_s, cycle_s - earlier_s)[0])
            cycles.append(cycle_s)
            lags.append(abs(before[0] - output[-1]))
            earlier_s = cycle_s
        self.outputs, self.times_s = np.array(output), np.array(cycles)
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
@pytest.mark.parametrize('form', WAYS)
def test_the_delayed_way_does_not_ripple_at_any_rate(
    rate_hz: int, late_ms: float, form: str
) -> None:
    run = Run(rate_hz, form, late_ms=late_ms)
    assert run.ripple() < 0.03
    assert np.abs(run.speeds).max() < 1.02 * SPEED
    # Two periods of the executor: no more than the line on arrival lags at its worst.
    assert run.lags.max() < SPEED * 2.0 * PERIOD_S


def test_the_line_on_arrival_ripples_where_its_period_does_not_fit_the_cycles() -> None:
    assert Run(250, 'line').ripple() > 0.2


@pytest.mark.parametrize('rate_hz', RATES_HZ)
@pytest.mark.parametrize('form', WAYS)
def test_a_late_tick_is_neither_a_standstill_nor_a_jump(rate_hz: int, form: str) -> None:
    run = Run(rate_hz, form, paused_ms=8.0)
    assert run.ripple() < 0.03
    run = Run(rate_hz, form, paused_ms=40.0)
    # It rests where the last line ends, and the next command makes up for nothing.
    assert np.abs(run.speeds).max() < 1.3 * SPEED


@pytest.mark.parametrize('rate_hz', RATES_HZ)
@pytest.mark.parametrize('offset_s', [-3.0, 0.02])
@pytest.mark.parametrize('form', WAYS)
def test_another_clock_is_as_good_as_a_line_on_arrival(
    rate_hz: int, offset_s: float, form: str
) -> None:
    run = Run(rate_hz, form, offset_s=offset_s, same_clock=False)
    assert run.controller.refused == 0
    assert run.ripple() < max(1.1 * Run(rate_hz, 'line').ripple(), 0.2)


@pytest.mark.parametrize('rate_hz', RATES_HZ)
@pytest.mark.parametrize(('scaling', 'form'), [(0.5, 'way'), (0.1, 'way'), (0.5, 'splines')])
def test_a_scaled_controller_is_never_as_fast_as_an_unscaled_one(
    rate_hz: int, scaling: float, form: str
) -> None:
    run = Run(rate_hz, form, scaling=scaling)
    assert np.mean(np.abs(run.speeds)) == pytest.approx(
        scaling * np.mean(np.abs(SPEED * np.cos(np.linspace(0.5 * OMEGA, 6.0 * OMEGA, 5000)))),
        rel=0.25,
    )
    # A message that is late by two cycles of a millisecond makes up for them; a way that went to
    # its end whatever the scaling would be ten times as fast.
    assert np.abs(run.speeds).max() < 4.0 * scaling * SPEED


def test_a_velocity_interface_reads_the_speed_of_the_commands() -> None:
    velocities = {}
    for form in ('line', *WAYS):
        run = Run(100, form, plan=lambda at_s: 0.2 * at_s)
        velocities[form] = float(run.controller.velocity[0])
    assert velocities['way'] == pytest.approx(0.2, rel=0.02)
    assert velocities['splines'] == pytest.approx(0.2, rel=0.02)
    assert velocities['line'] == 0.0


def begun(
    position: float, at_ns: int, *, splines: bool = True, cycle_s: float = 0.002, limit: float = 9.0
) -> tuple[DelayedWay, JointTrajectory]:
    """A way that begins here, and its message."""
    way = DelayedWay(1, PERIOD_S, cycle_s, limits(limit), splines=splines)
    way.begin(np.array([position]), at_ns)
    return way, JointTrajectory(points=way.points)


def fill(
    way: DelayedWay, message: JointTrajectory, position: float, at_ns: int, scaling: float = 1.0
) -> None:
    way.fill(message, np.array([position]), at_ns, same_clock=True, scaling=scaling)


def made(way: DelayedWay, message: JointTrajectory) -> tuple[np.ndarray, np.ndarray]:
    stamp = message.header.stamp.sec + message.header.stamp.nanosec * 1e-9
    spans = [p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in message.points]
    return stamp + np.array(spans), np.array([p.positions[0] for p in message.points])


@pytest.mark.parametrize('splines', [False, True])
def test_nothing_goes_beyond_the_position_limits_or_the_last_line(splines) -> None:
    way, message = begun(0.97, 0, splines=splines, limit=1.0)
    for tick, position in enumerate((0.98, 0.99, 1.0)):
        at_ns = (tick + 1) * 10_000_000
        fill(way, message, position, at_ns)
        times, positions = made(way, message)
        assert (np.diff(times) > 0.0).all() and times[0] < at_ns * 1e-9
        assert positions.max() <= 1.0
        assert positions[len(positions) - 1 - splines] - position <= 0.01 + 1e-9


@pytest.mark.parametrize('splines', [False, True])
def test_commands_at_one_time_and_a_clock_that_stands_still_make_no_speed(splines) -> None:
    at_ns = 5_000_000_000
    way, message = begun(0.0, at_ns, splines=splines)
    for _ in range(300):
        fill(way, message, 0.0, at_ns)
    for tick in range(1, 6):
        position = 0.008 * tick
        fill(way, message, position, at_ns + tick * 10_000_000)
        times, positions = made(way, message)
        speeds = np.diff(positions) / np.diff(times)
        assert np.abs(speeds).max() <= 0.8 + 1e-6
    # A hold of another thread a moment after the tick.
    fill(way, message, 0.0405, at_ns + 50_000_000)
    times, positions = made(way, message)
    assert (np.diff(times) > 0.0).all()
    assert positions[-1] < 0.0405 + 0.002


@pytest.mark.parametrize('splines', [False, True])
def test_a_clock_that_is_set_back_begins_anew_where_the_command_is(splines) -> None:
    way, message = begun(0.0, 5_000_000_000, splines=splines)
    fill(way, message, 0.01, 5_010_000_000)
    fill(way, message, 0.02, 1_000_000_000)
    times, positions = made(way, message)
    assert times[0] < 1.0 < times[-1] < 1.1
    assert (positions == 0.02).all()


def straight(at_s: float) -> float:
    return SPEED * at_s


def accelerations(run: Run, begin_s: float, end_s: float) -> np.ndarray:
    """Accelerations of the output over 10 ms, whatever the cycle."""
    at_s = np.arange(begin_s, end_s, 0.01)
    speeds = np.diff(np.interp(at_s, run.times_s, run.outputs)) / 0.01
    return np.diff(speeds) / 0.01


@pytest.mark.parametrize('rate_hz', thorough_but([125], [100, 125, 500]))
@pytest.mark.parametrize(('same_clock', 'scaling'), [(True, 1.0), (False, 1.0), (True, 0.4)])
def test_an_executor_that_is_killed_ends_in_a_stop_within_the_acceleration(
    rate_hz: int, same_clock: bool, scaling: float
) -> None:
    run = Run(
        rate_hz,
        'splines',
        same_clock=same_clock,
        scaling=scaling,
        stall_s=(1.0, np.inf),
        seconds=1.9 * scaling,
        plan=straight,
    )
    assert np.abs(accelerations(run, 1.02, 1.8)).max() < 1.2 * ACCELERATION
    # On the way that the commands were on: a period, and half of speed squared over acceleration.
    speed = SPEED * scaling
    way = run.outputs[-1] - speed * (1.0 - PERIOD_S)
    assert way == pytest.approx(speed * PERIOD_S + speed**2 / (2.0 * ACCELERATION), abs=0.004)
    assert (np.diff(run.outputs[run.times_s > 1.02]) > -1e-6).all()


def test_without_a_tail_it_ends_in_a_jump_of_the_speed() -> None:
    run = Run(250, 'way', stall_s=(1.0, np.inf), seconds=1.9, plan=straight)
    assert np.abs(accelerations(run, 0.95, 1.8)).max() > 4.0 * ACCELERATION


@pytest.mark.parametrize('rate_hz', thorough_but([250], [100, 250, 1000]))
@pytest.mark.parametrize('stall_ms', [30, 100, 500])
def test_the_way_neither_jumps_nor_turns_round_after_a_stall_and_is_caught_up_with(
    rate_hz: int, stall_ms: int
) -> None:
    stall_s = 1.0, 1.0 + 1e-3 * stall_ms
    run = Run(rate_hz, 'splines', stall_s=stall_s, seconds=2.5, plan=straight)
    assert (np.diff(run.outputs) > -1e-6).all()
    assert np.abs(run.speeds).max() < 1.2 * SPEED
    # Behind the newest command as before.
    cycles = rate_hz // 10
    assert run.lags[-cycles:].max() == pytest.approx(run.lags[:cycles].max(), rel=0.15)


def sampled(message: JointTrajectory, at_s: float) -> np.ndarray:
    """(times,) positions that a controller goes through from a time on."""
    copy = _copy(message)
    copy.joint_names = ['j']
    controller = TrajectoryController(['j'], 0.004, np.zeros(1))
    controller.take(copy, at_s)
    return np.array([controller.update(at_s + 1e-3 * ms, 1e-3)[0] for ms in range(300)])


def test_splines_and_tail_stay_within_the_position_limits() -> None:
    way, message = begun(0.9, 0, limit=1.0)
    position = 0.9
    for tick in range(1, 60):
        # Fast towards its limit, and there it stops as no limiter would let it.
        position = min(position + 0.013, 1.0)
        at_ns = tick * 10_000_000
        fill(way, message, position, at_ns)
        assert sampled(message, 1e-9 * at_ns).max() <= 1.0 + 1e-9


def test_a_stop_after_a_stall_leaves_the_arm_where_its_tail_has_led_it() -> None:
    way, message = begun(0.0, 0, cycle_s=0.004)
    for tick in range(1, 50):
        command = 0.008 * tick
        fill(way, message, command, tick * 10_000_000)
    end = sampled(message, 0.49)[-1]
    assert end - command > 0.03
    for tick in range(150, 200):
        fill(way, message, command, tick * 10_000_000)
        assert sampled(message, 0.01 * tick) == pytest.approx(end, abs=1e-5)


def test_velocities_end_with_none_and_fit_a_slower_time() -> None:
    speeds = {}
    for scaling in (1.0, 0.5):
        way, message = begun(0.0, 0, cycle_s=0.004)
        for tick in range(1, 50):
            command = 0.008 * tick
            fill(way, message, command, tick * 10_000_000, scaling)
        assert list(message.points[-1].velocities) == [0.0]
        speeds[scaling] = message.points[-3].velocities[0]
    assert speeds[1.0] == pytest.approx(0.8) and speeds[0.5] == pytest.approx(1.6)
