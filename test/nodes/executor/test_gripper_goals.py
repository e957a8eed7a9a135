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
