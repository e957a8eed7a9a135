"""When a task ends, and how, from made-up states and plans."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vla_runtime.execution.command import MOVING, Reason
from vla_runtime.messages.trajectories import typed_messages
from vla_runtime.nodes.task.progress import (
    EXECUTOR_SILENT_S,
    POLICY_SILENT_S,
    Outcome,
    TaskLimits,
    TaskProgress,
)
from vla_runtime.types import PlanRequest

BEGIN_S = 100.0


class Told:
    """A task that hears what it should, until a test says otherwise."""

    def __init__(self, **limits: float) -> None:
        self.progress, self.now_s = TaskProgress(TaskLimits(**limits), BEGIN_S), BEGIN_S
        self.mode, self.reason, self.chunks, self.lifecycle = 'stopped', 'stopped', 7, 'active'
        self.episode, self.outcome = 1, ''

    def hear(self, seconds: float, *, executor: bool = True, policy: bool = True) -> None:
        """Let time pass, and each node say what it does five times a second."""
        for _ in range(round(seconds * 5)):
            self.now_s += 0.2
            if executor:
                state = SimpleNamespace(
                    mode=self.mode,
                    reason=self.reason,
                    text='its text',
                    driver='policy' if self.mode == 'running' else 'nobody',
                    start_refused='',
                    episode=self.episode,
                    episode_outcome=self.outcome,
                    chunk=3,
                    chunks=self.chunks,
                )
                self.progress.see_executor(self.now_s, state)
            if policy:
                self.progress.see_policy(self.now_s, lifecycle=self.lifecycle, text='why')

    def start(self) -> None:
        self.hear(0.4)
        self.progress.start(self.now_s)
        self.mode, self.reason = 'running', 'tracking'
        self.chunks += 1
        self.hear(0.4)

    @property
    def ending(self) -> Outcome | None:
        ending = self.progress.ending(self.now_s)
        return None if ending is None else ending.outcome


@pytest.fixture
def told() -> Told:
    told = Told()
    told.start()
    return told


def test_a_task_without_limits_goes_on(told: Told) -> None:
    told.hear(600.0)
    assert told.ending is None
    assert told.progress.chunks == 1


@pytest.mark.parametrize(
    ('succeeds', 'expected'), [(False, Outcome.TIMED_OUT), (True, Outcome.TIME_OVER)]
)
def test_time_over_is_what_the_goal_says_it_is(succeeds: bool, expected: Outcome) -> None:
    told = Told(time_s=5.0, time_succeeds=succeeds)
    told.start()
    assert told.ending is None
    told.hear(5.0)
    assert told.ending is expected
    assert expected.succeeded is succeeds


def test_time_counts_before_the_first_chunk_too() -> None:
    told = Told(time_s=5.0)
    told.hear(5.2)
    assert told.ending is Outcome.TIMED_OUT


def test_a_state_from_before_the_start_is_no_stop() -> None:
    told = Told()
    told.hear(0.4)
    told.progress.start(told.now_s)
    told.hear(1.0)
    assert told.ending is None
    told.hear(3.0)
    assert told.ending is Outcome.STOPPED


def test_a_robot_that_somebody_stopped_ends_the_task(told: Told) -> None:
    told.mode, told.reason = 'stopped', 'stopped'
    told.hear(0.2)
    assert told.ending is Outcome.STOPPED


def test_a_silent_executor_and_a_silent_policy_are_lost() -> None:
    for executor, expected, after_s in (
        (False, Outcome.EXECUTOR_LOST, EXECUTOR_SILENT_S),
        (True, Outcome.POLICY_LOST, POLICY_SILENT_S),
    ):
        told = Told()
        told.start()
        told.hear(after_s - 0.2, executor=executor, policy=not executor)
        assert told.ending is None
        told.hear(0.6, executor=executor, policy=not executor)
        assert told.ending is expected


def test_a_node_that_stood_still_itself_has_lost_nobody(told: Told) -> None:
    told.now_s += 60.0
    assert told.ending is Outcome.EXECUTOR_LOST
    told.progress.excuse(told.now_s)
    assert told.ending is None
    told.hear(POLICY_SILENT_S + 0.4, policy=False)
    assert told.ending is Outcome.POLICY_LOST


@pytest.mark.parametrize(
    ('outcome', 'expected'),
    [
        ('success', Outcome.JUDGED_SUCCESS),
        ('failure', Outcome.JUDGED_FAILURE),
        ('time_limit', Outcome.TIMED_OUT),
    ],
)
def test_a_verdict_ends_the_task_and_the_next_one_begins(outcome: str, expected: Outcome) -> None:
    told = Told()
    # That of the episode before, which the start ends, is none of this task.
    told.outcome = 'failure'
    told.start()
    assert told.ending is None
    told.episode, told.outcome = 2, ''
    told.hear(0.2)
    assert told.ending is None
    told.outcome = outcome
    told.hear(0.2)
    assert told.ending is expected and expected.lets_next_go_on
    assert expected.succeeded is (outcome == 'success')


def test_nodes_that_are_not_active_are_lost(told: Told) -> None:
    told.lifecycle = 'inactive'
    told.hear(0.2)
    assert told.ending is Outcome.POLICY_LOST
    told.lifecycle, told.mode, told.reason = 'active', 'inactive', ''
    told.hear(0.2)
    assert told.ending is Outcome.EXECUTOR_LOST


def test_time_in_which_the_robot_held_is_told(told: Told) -> None:
    told.reason = 'starved'
    told.hear(2.0)
    told.reason = 'tracking'
    told.hear(2.0)
    assert told.progress.held_s == pytest.approx(2.0)
    assert not told.progress.holds


def plan(
    told: Told, rows: np.ndarray, kind: str = 'position', *, certain: int | None = None
) -> None:
    """A plan that begins now, a row every 0.05 s."""
    columns = rows.shape[1] if rows.size else 2
    told.progress.see_plan(
        PlanRequest(
            rows=rows,
            names=('a', 'b')[:columns],
            kinds=(kind,) * columns,
            step_time_s=0.05 if len(rows) > 1 else None,
            stamp_ns=round(told.now_s * 1e9),
            episode=1,
            certain=len(rows) if certain is None else certain,
        )
    )


@pytest.mark.parametrize('kind', ['position', 'velocity'])
def test_a_plan_that_moves_nothing_is_rest(kind: str) -> None:
    told = Told(rest_s=2.0)
    told.start()
    for turn in range(20):
        plan(told, np.full((4, 2), 0.2 * (turn + 1)), kind)
        told.hear(0.2)
        assert told.ending is None
    still = np.full((4, 2), 4.0 if kind == 'position' else 0.0)
    for _ in range(11):
        plan(told, still, kind)
        told.hear(0.2)
    assert told.ending is Outcome.AT_REST


def test_time_that_no_plan_covers_is_no_rest() -> None:
    told = Told(rest_s=1.0)
    told.start()
    # Joints of 0.2 rad/s, and plans of 0.2 s every 3 s; of some only half is certain.
    for turn in range(4):
        rows = 0.2 * (told.now_s + 0.05 * np.arange(4))[:, None]
        plan(told, rows, certain=4 if turn % 2 else 2)
        told.hear(3.0)
        assert told.ending is None
    # A synchronous executor's plans have no rows.
    for _ in range(10):
        plan(told, np.zeros((0, 2)))
        told.hear(0.2)
        assert told.ending is None


def test_rest_between_which_nothing_is_known_adds_up_and_no_row_counts_twice() -> None:
    told = Told(rest_s=1.0)
    told.start()
    for _ in range(5):
        # Sent again until it is answered.
        for _ in range(3):
            plan(told, np.zeros((4, 1)))
        told.hear(3.0)
        assert told.ending is None
    plan(told, np.zeros((4, 1)))
    told.hear(0.2)
    assert told.ending is Outcome.AT_REST


@pytest.mark.parametrize('reason', MOVING)
def test_a_robot_that_moves_does_not_hold(told: Told, reason: Reason) -> None:
    told.reason = reason.value
    told.hear(1.0)
    assert not told.progress.holds and told.progress.held_s == 0.0


def test_a_robot_that_holds_for_want_of_chunks_has_not_come_to_rest() -> None:
    told = Told(rest_s=1.0)
    told.start()
    told.reason = 'starved'
    for _ in range(20):
        plan(told, np.zeros((4, 2)))
        told.hear(0.2)
        assert told.ending is None


@pytest.mark.parametrize('limits', [{'time_s': -1.0}, {'rest_s': float('nan')}])
def test_a_time_that_is_none_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        TaskLimits(**limits)


@pytest.mark.skipif(typed_messages() is None, reason='vla_interfaces is not built')
def test_outcomes_are_those_of_the_action() -> None:
    from vla_interfaces.action import RunPolicy

    assert {one.name: one.value for one in Outcome} == {
        name: getattr(RunPolicy.Result, name) for name in Outcome.__members__
    }
