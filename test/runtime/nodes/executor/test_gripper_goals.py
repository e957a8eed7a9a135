"""Setpoints of a gripper become goals on change, never twice for nothing or by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.nodes.executor.gripper_goals import GoalState, GripperGoals

TICK_S = 0.01


class Driver:
    """Ticks at 100 Hz; goals are asked for at 10 Hz, as the node's timer does.

    Attributes:
        sent: times and positions of goals.
        answers: state that follows a goal at once; None: no answer.
    """

    def __init__(self, deadband: float = 0.01) -> None:
        self.goals = GripperGoals(0.0, 1.0, deadband)
        self.sent: list[tuple[float, float]] = []
        self.answers: GoalState | None = GoalState.MOVING
        self.served = True
        self.now_s = 0.0
        self._ticks = 0

    @property
    def positions(self) -> list[float]:
        return [position for _, position in self.sent]

    def run(self, positions, follows: bool = True) -> None:
        """One tick for each position; None: the executor is silent."""
        for position in positions:
            if position is not None:
                self.goals.want(float(position), self.now_s, follows=follows)
                follows = True
            if self._ticks % 10 == 0:
                self._poll()
            self._ticks += 1
            self.now_s = self._ticks * TICK_S

    def _poll(self) -> None:
        goal = self.goals.due(self.now_s)
        if goal is None:
            return
        self.sent.append((self.now_s, goal.position))
        self.goals.sent(goal, self.now_s, served=self.served)
        if self.served and self.answers is not None:
            self.goals.note(self.answers)


def test_a_setpoint_that_stays_is_one_goal():
    driver = Driver()
    driver.run([0.4] * 500)
    assert driver.positions == [0.4]


def test_noise_within_the_deadband_is_no_goal_and_a_slow_drift_is():
    driver = Driver(deadband=0.05)
    random = np.random.default_rng(0)
    driver.run(0.4 + random.uniform(-0.02, 0.02, 500))
    assert len(driver.sent) == 1
    driver.run(np.linspace(0.4, 0.8, 2000))
    steps = np.diff(driver.positions)
    assert len(steps) >= 6 and np.all(steps > 0.05)


def test_goals_follow_a_fast_change_at_their_rate_and_end_where_it_ends():
    driver = Driver()
    driver.run(np.linspace(0.2, 0.9, 100))
    driver.run([0.9] * 50)
    times = [time_s for time_s, _ in driver.sent]
    assert np.all(np.diff(times) >= 0.1 - 1e-9) and len(times) <= 12
    assert driver.positions[-1] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize('end', [0.0, 1.0])
def test_an_end_of_the_range_is_reached_in_full(end):
    driver = Driver(deadband=0.1)
    near = abs(end - 0.05)
    driver.run([near] * 20)
    driver.run([end] * 20)
    assert driver.positions == [near, end]


def test_a_new_beginning_is_a_goal_wherever_it_is():
    driver = Driver()
    driver.run([0.4] * 50)
    driver.run([None] * 300)
    driver.run([0.4] * 50, follows=False)
    assert driver.positions == [0.4, 0.4]


def test_nothing_is_sent_while_an_answer_is_owed_and_after_a_second_it_is_missing():
    driver = Driver()
    driver.answers = None
    driver.run(np.linspace(0.2, 0.8, 90))
    assert len(driver.sent) == 1 and driver.goals.state is GoalState.SENT
    driver.run([0.8] * 50)
    assert driver.goals.counters.unanswered == 1
    assert driver.positions[-1] == 0.8


@pytest.mark.parametrize('served', [True, False])
def test_a_lost_goal_is_repeated_once_a_second_while_the_robot_is_commanded(served):
    driver = Driver()
    driver.served, driver.answers = served, GoalState.REFUSED
    driver.run([0.4] * 350)
    times = [time_s for time_s, _ in driver.sent]
    assert len(times) == 4 and np.all(np.diff(times) >= 1.0 - 1e-9)
    assert driver.goals.counters.goals == (4 if served else 0)
    assert driver.goals.state is (GoalState.REFUSED if served else GoalState.NO_SERVER)


def test_a_lost_goal_of_a_silent_executor_is_never_sent_by_itself():
    driver = Driver()
    driver.answers = GoalState.REFUSED
    driver.run([0.4] * 20)
    driver.answers = GoalState.MOVING
    driver.run([None] * 2000)
    assert len(driver.sent) == 1
    driver.run([0.4] * 20)
    assert len(driver.sent) == 2 and driver.goals.state is GoalState.MOVING


def test_the_hold_at_the_end_is_sent_although_an_answer_is_owed():
    driver = Driver()
    driver.answers = None
    driver.run([0.2])
    driver.run([0.6] * 3)
    last = driver.goals.last()
    assert last is not None and last.position == 0.6
    driver.goals.sent(last, driver.now_s, served=True)
    assert driver.goals.last() is None


def test_a_goal_that_ended_is_not_repeated():
    driver = Driver()
    for state in (GoalState.REACHED, GoalState.STALLED, GoalState.ABORTED, GoalState.TAKEN_OVER):
        driver.answers = state
        driver.run([0.4] * 300, follows=False)
    assert driver.positions == [0.4] * 4
    counters = driver.goals.counters
    assert (counters.reached, counters.stalled) == (1, 1)
    assert (counters.aborted, counters.taken_over) == (1, 1)


def moving(position: float = 0.4) -> Driver:
    driver = Driver()
    driver.run([position] * 20)
    assert driver.goals.state is GoalState.MOVING
    return driver


def measured(driver: Driver, positions) -> None:
    """The robot is commanded and measured; a goal is looked at ten times a second."""
    for position in positions:
        driver.run([driver.positions[-1]])
        if position is not None:
            driver.goals.measure(float(position), driver.now_s)
        driver.goals.look(driver.now_s)


def test_a_goal_that_never_ends_is_no_motion_for_ever():
    driver = moving()
    measured(driver, [0.2] * 290)
    assert driver.goals.state is GoalState.MOVING
    measured(driver, [0.2] * 30)
    assert driver.goals.state is GoalState.UNENDED and driver.goals.measured == 0.2
    # Whoever carries it out after all is on its way again, and is not told a second time.
    measured(driver, np.linspace(0.2, 0.3, 50))
    assert driver.goals.state is GoalState.MOVING and len(driver.sent) == 1


def test_a_slow_gripper_is_moving_and_one_that_is_there_has_reached_its_goal():
    driver = moving()
    measured(driver, np.linspace(0.2, 0.4, 2000))
    assert driver.goals.state is GoalState.MOVING
    measured(driver, [0.4] * 350)
    assert driver.goals.state is GoalState.REACHED and driver.goals.counters.reached == 1


def test_a_goal_of_a_gripper_that_nobody_sees_has_more_time():
    driver = moving()
    measured(driver, [None] * 900)
    assert driver.goals.state is GoalState.MOVING
    measured(driver, [None] * 150)
    assert driver.goals.state is GoalState.UNENDED and driver.goals.measured is None


def test_a_goal_that_was_dropped_is_sent_again_while_the_robot_is_commanded():
    driver = moving()
    driver.run([0.4] * 200)
    driver.goals.note(GoalState.FORGOTTEN)
    driver.run([0.4] * 20)
    assert driver.positions == [0.4, 0.4] and driver.goals.state is GoalState.MOVING


def test_a_goal_of_an_inactive_controller_is_lost_and_sent_again_when_it_is_active():
    driver = moving()
    for _ in range(50):
        driver.run([0.4])
        driver.goals.bar(driver.now_s)
    assert driver.goals.state is GoalState.REFUSED and driver.goals.counters.refused == 1
    driver.run([0.4] * 80)
    assert len(driver.sent) == 1
    driver.run([0.4] * 40)
    assert driver.positions == [0.4, 0.4] and driver.goals.state is GoalState.MOVING


def test_a_controller_that_comes_back_on_to_a_silent_executor_moves_nothing():
    driver = moving()
    driver.goals.bar(driver.now_s)
    driver.run([None] * 300)
    assert len(driver.sent) == 1


def test_a_goal_that_ended_stays_ended_beside_an_inactive_controller_while_nothing_is_commanded():
    driver = Driver()
    driver.answers = GoalState.REACHED
    driver.run([0.4] * 20)
    driver.run([None] * 100)
    driver.goals.bar(driver.now_s)
    assert driver.goals.state is GoalState.REACHED
    # A gripper that held something has let go of it: the goal is sent again.
    driver.run([0.4] * 2)
    driver.goals.bar(driver.now_s)
    driver.run([0.4] * 150)
    assert driver.positions == [0.4, 0.4]
