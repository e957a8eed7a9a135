"""The simulated controllers: a new command replaces the old one, for its joints only."""

import numpy as np
import pytest

from vla_tabletop.sim.controller import CommandError, JointFollower

NAMES = ('a', 'b', 'c')
MEASURED = np.array([-1.0, 0.0, 1.0])


@pytest.fixture
def follower():
    return JointFollower(NAMES, np.array([0.0, 1.0, 2.0]))


def test_without_a_command_the_setpoints_stay(follower):
    assert list(follower.update(5.0, MEASURED)) == [0.0, 1.0, 2.0]


def test_a_setpoint_holds_from_the_next_update_on(follower):
    follower.follow(['b'], [0.0], np.array([[3.0]]))
    assert list(follower.update(1.0, MEASURED)) == [0.0, 3.0, 2.0]
    assert list(follower.update(9.0, MEASURED)) == [0.0, 3.0, 2.0]


def test_a_trajectory_from_time_zero_goes_along_straight_lines_wherever_the_robot_is(follower):
    follower.follow(['a'], [0.0, 1.0, 2.0], np.array([[0.5], [1.0], [0.0]]))
    values = [follower.update(t, MEASURED)[0] for t in (10.0, 10.5, 11.0, 11.75, 12.0, 13.0)]
    assert values == pytest.approx([0.5, 0.75, 1.0, 0.25, 0.0, 0.0])


def test_to_a_first_point_that_lies_ahead_it_goes_from_the_measured_position(follower):
    follower.follow(['a'], [1.0, 2.0], np.array([[1.0], [0.0]]), start_s=10.0)
    values = [follower.update(t, MEASURED)[0] for t in (10.0, 10.5, 11.0, 11.75, 12.0, 13.0)]
    assert values == pytest.approx([-1.0, 0.0, 1.0, 0.25, 0.0, 0.0])


def test_points_that_lie_ahead_with_every_update_keep_a_joint_where_it_is(follower):
    # Why the executor's trajectories begin at the last command.
    for tick in range(5):
        follower.follow(['a'], [0.01], np.array([[1.0]]))
        assert follower.update(0.01 * tick, MEASURED)[0] == -1.0


def test_a_new_command_drops_the_old_one_of_the_same_joint(follower):
    follower.follow(['a', 'b'], [0.0, 1.0], np.array([[0.0, 1.0], [1.0, 5.0]]))
    follower.update(0.0, MEASURED)
    follower.update(0.5, MEASURED)
    follower.follow(['a'], [0.0, 1.0], np.array([[0.5], [0.0]]))
    follower.update(0.5, MEASURED)
    assert follower.update(1.0, MEASURED)[0] == pytest.approx(0.25)
    # What the old one had for the other joint is dropped with it, as the real controller does.
    assert follower.update(1.0, MEASURED)[1] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ('names', 'times', 'positions'),
    [
        (['d'], [0.0], [[1.0]]),
        (['a', 'a'], [0.0], [[1.0, 1.0]]),
        (['a'], [0.0], [[np.nan]]),
        (['a'], [0.0], [[1.0, 2.0]]),
        (['a'], [0.2, 0.1], [[1.0], [2.0]]),
        (['a'], [], np.zeros((0, 1))),
    ],
)
def test_a_command_that_makes_no_sense_changes_nothing(follower, names, times, positions):
    with pytest.raises(CommandError):
        follower.follow(names, times, np.array(positions))
    assert list(follower.update(1.0, MEASURED)) == [0.0, 1.0, 2.0]


def test_restart_forgets_everything(follower):
    follower.follow(['a'], [1.0], np.array([[1.0]]))
    follower.restart(np.array([7.0, 8.0, 9.0]))
    assert list(follower.update(2.0, MEASURED)) == [7.0, 8.0, 9.0]
