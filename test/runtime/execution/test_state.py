"""Measured positions: by name, from any number of sources, and refused where no motion explains."""

import math

import numpy as np
import pytest
from execution_rig import alike

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.limits import ColumnLimits
from vla_runtime.execution.state import MeasuredState


def state_of(*columns: Column) -> MeasuredState:
    return MeasuredState(
        ColumnModel(CommandColumns(columns or (Column('a'), Column('b'), Column('grip'))))
    )


def test_when_names_come_in_another_order_expect_them_mapped():
    state = state_of()
    state.observe(['grip', 'x', 'a', 'b'], [3.0, 9.0, 1.0, 2.0], 5)
    assert state.positions.tolist() == [1.0, 2.0, 3.0]
    assert state.complete and state.oldest_stamp_ns == 5


def test_when_gripper_has_its_own_topic_expect_the_oldest_stamp_to_count():
    state = state_of()
    state.observe(['a', 'b'], [1.0, 2.0], 50)
    assert not state.complete and state.missing == ['grip']
    state.observe(['grip'], [3.0], 20)
    state.observe(['b', 'a'], [2.5, 1.5], 60)
    assert state.positions.tolist() == [1.5, 2.5, 3.0]
    assert state.oldest_stamp_ns == 20
    assert state.oldest_columns() == ['grip']


def test_when_a_message_is_older_than_the_last_expect_it_ignored_and_counted():
    state = state_of(Column('a'))
    state.observe(['a'], [1.0], 20)
    state.observe(['a'], [7.0], 10)
    assert state.positions.tolist() == [1.0]
    assert state.out_of_order == 1


def test_when_a_stamp_is_distrusted_expect_one_older_message_of_its_columns_taken():
    state = state_of(Column('a'), Column('b'))
    state.observe(['a'], [1.0], 120)
    state.observe(['b'], [1.0], 60)
    assert (state.newest_stamp_ns, state.newest_columns()) == (120, ['a'])
    state.distrust_beyond(100)
    # Neither a message of the other column nor one that is older there is what was waited for.
    state.observe(['b'], [5.0], 50)
    state.observe(['b'], [2.0], 61)
    state.observe(['a'], [2.0], 60)
    state.observe(['a'], [3.0], 50)
    assert state.positions.tolist() == [2.0, 2.0]
    assert (state.oldest_stamp_ns, state.newest_stamp_ns) == (60, 61)
    assert state.out_of_order == 2


def test_when_position_is_not_a_number_expect_it_kept_for_the_watchdog():
    state = state_of(Column('a'))
    state.observe(['a'], [math.nan], 20)
    assert np.isnan(state.positions[0]) and state.complete


def test_when_cleared_expect_everything_missing_and_older_stamps_taken():
    state = state_of(Column('a'))
    state.observe(['a'], [1.0], 20)
    state.clear()
    assert state.missing == ['a']
    state.observe(['a'], [2.0], 10)
    assert state.positions.tolist() == [2.0]


def test_when_nobody_measures_anything_expect_complete_and_unguarded():
    state = state_of(Column('x', feedback=False))
    assert state.complete and not state.guarded


def test_when_a_continuous_joint_is_a_turn_away_expect_it_brought_near():
    state = state_of(Column('a', continuous=True), Column('b'))
    state.observe(['a', 'b'], [3.1, 3.1], 0)
    state.observe(['a', 'b'], [-3.0, -3.0], 1)
    state.bring_near(np.array([3.2, 3.2]))
    assert state.positions == pytest.approx([2 * math.pi - 3.0, -3.0])


@pytest.mark.parametrize(
    'numbers',
    [
        [7.0],
        [0.7, 7.0],
        [-6.4, 0.1],
        [4.0, -2.4],
        [-3.2, 3.2],
        [0.1, math.nan, 6.5],
        [-3.0, 0.0, 3.0],
    ],
    ids=str,
)
def test_when_the_numbers_are_of_more_than_one_turn_expect_them_left_alone(numbers):
    state = state_of(Column('a', continuous=True))
    for stamp, number in enumerate(numbers):
        state.observe(['a'], [number], stamp)
    state.bring_near(np.array([20.0]))
    assert state.positions.tolist() == numbers[-1:]
    # For good, and after the clock jumped.
    state.clear()
    state.observe(['a'], [0.5], 100)
    state.bring_near(np.array([20.0]))
    assert state.positions.tolist() == [0.5]


@pytest.mark.parametrize(
    'numbers', [[math.pi, -math.pi], [0.0, 2 * math.pi], [6.28, 0.001], [-3.0, math.nan, 3.0]]
)
def test_when_a_driver_wraps_expect_its_numbers_brought_near(numbers):
    state = state_of(Column('a', continuous=True))
    for stamp, number in enumerate(numbers):
        state.observe(['a'], [number], stamp)
    state.bring_near(np.array([20.0]))
    assert abs(state.positions[0] - 20.0) <= math.pi
    assert state.near(None).tolist() == numbers[-1:]


def test_when_a_clock_jumped_in_between_expect_no_angle_taken_for_wrapped():
    """A simulated world that was reset has its joints back at zero."""
    state = MeasuredState(
        ColumnModel(CommandColumns((Column('a', continuous=True),))), simulated=True
    )
    state.observe(['a'], [5.0], 10)
    state.clear()
    state.observe(['a'], [0.0], 1)
    state.bring_near(np.array([5.0]))
    assert state.positions.tolist() == [0.0]


def test_when_sources_keep_changing_their_names_expect_bounded_memory():
    state = state_of(Column('a'))
    for number in range(500):
        state.observe(['a', f'x{number}'], [float(number), 0.0], number)
    assert state.positions.tolist() == [499.0]
    assert len(state._maps) <= 32


def test_when_a_joint_is_named_twice_expect_the_message_refused_with_its_name():
    state = state_of(Column('a'), Column('b'))
    state.observe(['a', 'b'], [1.0, 2.0], 1)
    state.observe(['b', 'a', 'b'], [7.0, 8.0, 9.0], 2)
    assert state.positions.tolist() == [1.0, 2.0] and state.oldest_stamp_ns == 1
    assert state.malformed == 1
    assert state.refused == ["the message names 'b' twice; mend the node that publishes it"]
    state.observe(['b', 'a', 'b'], [7.0, 8.0], 3)
    assert 'twice' in state.refused[0]


def test_when_names_that_nobody_commands_repeat_expect_the_message_taken():
    state = state_of(Column('a'))
    state.observe(['', 'a', ''], [7.0, 1.0, 8.0], 1)
    assert state.positions.tolist() == [1.0] and not state.refused


def test_when_a_good_message_follows_a_refused_one_expect_nothing_held_against_it():
    state = state_of(Column('a'))
    state.observe(['a'], [1.0, 2.0], 1)
    assert state.refused == ['the message has 2 positions for 1 names']
    assert state.malformed == 1 and not state.complete
    state.observe(['x'], [1.0], 2)
    assert len(state.refused) == 1
    state.observe(['x', 'a'], [0.0, 1.0], 2)
    assert state.refused == []


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('value', [1e300, -1e300, math.inf, 1e10])
def test_when_no_joint_can_be_there_expect_not_a_number_and_no_warning(value):
    state = state_of(Column('a', continuous=True), Column('b'))
    state.observe(['a', 'b'], [value, value], 1)
    state.bring_near(np.array([1.0, 1.0]))
    assert np.isnan(state.positions).all()


# --- Measured values that no motion explains: refused, and what it takes to believe them

START_NS = 1_700_000_000_000_000_000
NAMES = ('elbow', 'wrist')


class Driver:
    """Publishes two joints at a rate, with limits of 3 rad/s."""

    def __init__(self, rate_hz: float = 100.0, at: tuple[float, float] = (1.6, 0.0)) -> None:
        columns = CommandColumns([Column(name) for name in NAMES])
        limit = ColumnLimits(-2.0, 2.7, 3.0, 40.0, 0.5)
        self.state = MeasuredState(ColumnModel(columns, alike(NAMES, limit)))
        self.now_ns, self.period_ns = START_NS, round(1e9 / rate_hz)
        self.send(*at)

    def send(self, elbow: float, wrist: float = 0.0, source: str = '/joint_states#1') -> bool:
        """Publish once; return whether it was taken."""
        self.now_ns += self.period_ns
        refused = self.state.plausibility.refused
        self.state.observe(NAMES, (elbow, wrist), self.now_ns, source)
        return self.state.plausibility.refused == refused

    @property
    def doubted(self) -> bool:
        return self.now_ns < self.state.plausibility.doubted_until_ns


@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
def test_a_joint_at_full_speed_is_believed(rate_hz):
    driver = Driver(rate_hz, at=(0.0, 0.0))
    for at in np.arange(0.0, 2.5, 3.0 / rate_hz):
        assert driver.send(float(at))
    assert not driver.doubted


@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
@pytest.mark.parametrize('value', [0.0, 1.6 + 2.0 * np.pi, -1.2])
def test_one_wrong_value_is_refused_and_the_next_good_one_is_taken(rate_hz, value):
    driver = Driver(rate_hz)
    assert not driver.send(value)
    assert driver.doubted and "'elbow'" in driver.state.plausibility.describe()
    assert driver.state.positions[0] == 1.6
    assert driver.send(1.6)


@pytest.mark.parametrize(('rate_hz', 'samples'), [(100.0, 49), (500.0, 249), (10.0, 4)])
def test_wrong_values_that_stay_are_not_believed_because_time_goes_by(rate_hz, samples):
    driver = Driver(rate_hz)
    assert not any(driver.send(0.0) for _ in range(samples))
    assert driver.send(1.6)
    assert not driver.state.plausibility.taken_over.any()


def test_wrong_values_that_differ_are_not_believed_because_time_goes_by():
    driver, numbers = Driver(), np.random.default_rng(0)
    for value in numbers.uniform(-1.9, 0.9, 200):
        assert not driver.send(float(value))


def test_values_that_stay_are_believed_in_the_end_but_no_hold_may_follow_them():
    driver = Driver()
    taken = [driver.send(0.0) for _ in range(80)]
    assert not any(taken[:50]) and all(taken[51:])
    assert driver.state.plausibility.taken_over.tolist() == [True, False]
    assert not driver.state.plausibility.returned[0]


def test_a_joint_may_be_anywhere_after_a_gap_but_outside_its_limits_or_at_nothing():
    for value, taken in ((-1.2, True), (0.0, False), (1.6 + 2.0 * np.pi, False)):
        driver = Driver()
        driver.now_ns += 15_000_000_000
        assert driver.send(value) == taken
        assert driver.state.plausibility.returned[0] == taken
