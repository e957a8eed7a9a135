"""A policy that stamps its chunks when it sends them is named; an honest one never is."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import Rig, holding

from vla_runtime.execution.anchor_check import AnchorCheck
from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import Column, CommandColumns

S = 1_000_000_000
STEP_S = 0.04


class Policy:
    """Plans 30 rows from where the robot was some time ago, towards a goal; on a rig of two."""

    def __init__(self, anchored_s: float, stamped_s: float, speed: float = 0.5) -> None:
        self.rig = Rig(holding(replan_interval=5), restart_after_outage_s=60.0).started()
        self.anchored_s, self.stamped_s, self.speed = anchored_s, stamped_s, speed
        self.goal = np.array([1.5, 1.5])
        self.texts: list[str] = []
        # As far back as the policy looks.
        self.rig.tick(100)

    def run(self, seconds: float) -> None:
        """Tick, and answer every 0.2 s."""
        rig = self.rig
        for number in range(round(seconds / 0.01)):
            rig.tick()
            if number % 20:
                continue
            ago = max(0, len(rig.ticks) - 1 - round(self.anchored_s / 0.01))
            rows, place = [], rig.ticks[ago].command.setpoints.copy()
            for _ in range(30):
                way = self.speed * STEP_S
                place = place + np.clip(self.goal - place, -way, way)
                rows.append(place)
            result = rig.submit(np.array(rows), rig.ros_ns - round(self.stamped_s * S))
            assert result.accepted, result.text
            self.texts.append(result.text)

    @property
    def named(self) -> bool:
        return any('header.stamp' in text for text in self.texts)


def test_chunks_that_begin_where_the_robot_was_before_their_stamp_are_named() -> None:
    policy = Policy(anchored_s=0.6, stamped_s=0.0)
    policy.run(2.0)
    assert policy.named


@pytest.mark.parametrize('age_s', [0.0, 0.3, 0.6])
def test_chunks_stamped_with_the_time_of_their_observation_are_not(age_s: float) -> None:
    policy = Policy(anchored_s=age_s, stamped_s=age_s)
    for goal in (1.5, 0.0, 1.5):
        policy.goal = np.full(2, goal)
        policy.run(2.0)
    assert not policy.named


def test_a_robot_that_turns_round_again_and_again_is_not() -> None:
    policy = Policy(anchored_s=0.0, stamped_s=0.0, speed=1.0)
    for turn in range(12):
        policy.goal = np.full(2, 0.4 * (turn % 2))
        policy.run(0.5)
    assert not policy.named


@pytest.mark.parametrize('every', [2, 5, 20])
def test_a_policy_that_continues_its_plan_ahead_of_a_lagging_robot_is_not(every: int) -> None:
    """On its way back the command lies where the robot was on its way there."""
    columns = CommandColumns((Column('a'), Column('b')))
    check = AnchorCheck(ColumnModel(columns))
    angle = np.abs((np.arange(2000) * 0.01 + 2.0) % 4.0 - 2.0)  # to and fro at 1 rad/s
    for tick in range(25, len(angle)):
        check.note(S + tick * S // 100, np.full(2, angle[tick - 25]))
        if tick % every == 0:
            assert check.judge(S + tick * S // 100, np.full(2, angle[tick])) == ''
