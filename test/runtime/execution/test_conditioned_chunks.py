"""What chunks say of the plan that they continue, and of their observation."""

import numpy as np
import pytest
from execution_rig import STEP_NS, CameraPolicy, Rig, chunk_of, holding
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

from vla_runtime.execution.anchor_check import AnchorCheck
from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.types import ChunkHeader, PlanRequest

HORIZON = 32
PERIOD_S = 0.01
RUN_S = 6.0
PACE = 0.01


class TiedPolicy(CameraPolicy):
    """Continues the plan for its certain rows, then moves on by `PACE` a row of `step_ns`."""

    past_steps = 8

    def __init__(self, rig: Rig, frame_s: float, inference_s: float, step_ns: int) -> None:
        super().__init__(rig, frame_s, inference_s)
        self.step_ns = step_ns

    def answer(self, plan: PlanRequest) -> None:
        rows = plan.rows[:, 0]
        over = (self.observation_ns - plan.stamp_ns) // self.step_ns
        missing = max(0, -over)
        left = rows[max(0, over) :]
        tied = bool(len(left)) and missing < HORIZON
        kept = np.zeros(0)
        if tied:
            certain = min(max(0, plan.certain - over), missing + len(left))
            kept = np.concatenate([np.repeat(left[:1], missing), left])[: min(certain, HORIZON)]
        last = kept[-1] if len(kept) else self.seen
        free = last + PACE * np.arange(1, HORIZON - len(kept) + 1)
        chunk = chunk_of(list(np.concatenate([kept, free])), step_time_s=self.step_ns * 1e-9)
        step = plan.step + over if tied else None
        named = {'tied': tied, 'step': step, 'request': plan.request}
        header = ChunkHeader(self.observation_ns, plan.episode, self.answers, **named)
        self.rig.offer(chunk, header)


def tying(interval: int, overrun: str, max_overrun_steps: int = 4) -> ExecutorParameters:
    return holding(
        replan_interval=interval,
        overrun=overrun,
        max_overrun_steps=max_overrun_steps,
        handover=HandoverParameters('rtc'),
        request_timeout_s=2.0,
    )


def travelled(
    parameters: ExecutorParameters, frame_s: float, inference_s: float, step_ns: int
) -> np.ndarray:
    """Commanded positions of the first column, a tick each, from the first motion on."""
    rig = Rig(parameters, period_ns=round(PERIOD_S * 1e9)).started()
    policy = TiedPolicy(rig, frame_s, inference_s, step_ns)
    for _ in range(round(RUN_S / PERIOD_S)):
        policy.work()
        rig.tick()
    positions = np.array([tick.position for tick in rig.ticks])
    return positions[np.flatnonzero(np.diff(positions))[0] :]


@pytest.mark.parametrize('overrun', ['hold', 'continue'])
def test_when_each_chunk_comes_after_its_interval_expect_no_standstill(overrun):
    """S of 1 at 50 Hz, frames of 12 Hz, 0.1 s an inference: the robot holds before each chunk."""
    positions = travelled(tying(1, overrun), 1 / 12, 0.1, 20_000_000)
    # The first delays are not known yet; from then on every row is the one that was meant.
    steps = np.diff(positions)[100:]
    assert (steps >= -1e-9).all()
    half = len(steps) // 2
    assert steps[half:].sum() == pytest.approx(steps[:half].sum(), rel=0.2)


@examples(25)
@given(
    camera_hz=st.floats(3.0, 60.0),
    step_hz=st.sampled_from([10, 20, 25, 50]),
    interval=st.integers(1, HORIZON // 4),
    inference_s=st.floats(0.005, 0.3),
    overrun=st.sampled_from(['hold', 'continue']),
)
def test_when_chunks_continue_the_plan_at_any_rates_expect_motion_to_go_on(
    camera_hz, step_hz, interval, inference_s, overrun
):
    step_ns = 1_000_000_000 // step_hz
    positions = travelled(tying(interval, overrun), 1 / camera_hz, inference_s, step_ns)
    moves = np.flatnonzero(np.abs(np.diff(positions)) > 1e-9)
    longest_s = np.diff(moves).max(initial=1) * PERIOD_S
    # A chunk may be refused because its useful part is past: then a second inference.
    assert longest_s <= 1 / camera_hz + 2 * inference_s + step_ns * 1e-9 + 4 * PERIOD_S


def test_when_the_robot_held_since_the_observation_expect_the_rows_behind_the_hold():
    rig = Rig(holding(replan_interval=2, handover=HandoverParameters('rtc'))).started()
    observed_ns = rig.ros_ns
    rig.submit([0.01 * row for row in range(HORIZON)], observed_ns)
    # Two steps, then a hold of ten steps' time.
    rig.tick(2 * 4 + 10 * 4)
    assert rig.reason == 'starved'
    plan = rig.poll()
    assert plan is not None
    # Made on a frame from three steps before: rows 0 to 2 stand for the hold.
    result = rig.offer(
        chunk_of([0.02] * 3 + [0.03 + 0.01 * row for row in range(HORIZON - 3)]),
        ChunkHeader(
            rig.ros_ns - 3 * STEP_NS,
            plan.episode,
            2,
            tied=True,
            step=plan.step - 3,
            request=plan.request,
        ),
    )
    assert result.join_index == 3


@pytest.mark.parametrize('step', [10**9, -(10**9)])
def test_when_a_chunk_names_an_impossible_step_expect_no_row_out_of_it(step):
    rig = Rig(holding(replan_interval=2, handover=HandoverParameters('rtc'))).started()
    result = rig.offer(
        chunk_of([0.0] * HORIZON), ChunkHeader(rig.ros_ns, 0, 1, tied=True, step=step)
    )
    assert result.accepted == (step > 0)
    assert result.accepted or 'has 32 rows, but it could only be joined at row' in result.text


# --- A policy that stamps its chunks when it sends them is named; an honest one never is

S = 1_000_000_000
ANCHOR_STEP_S = 0.04


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
                way = self.speed * ANCHOR_STEP_S
                place = place + np.clip(self.goal - place, -way, way)
                rows.append(place)
            result = rig.submit(np.array(rows), rig.ros_ns - round(self.stamped_s * S))
            assert result.accepted, result.text
            self.texts.append(result.text)

    @property
    def named(self) -> bool:
        return any('header.stamp' in text for text in self.texts)


def test_chunks_that_begin_where_the_robot_was_before_their_stamp_are_named():
    policy = Policy(anchored_s=0.6, stamped_s=0.0)
    policy.run(2.0)
    assert policy.named


@pytest.mark.parametrize('age_s', [0.0, 0.3, 0.6])
def test_chunks_stamped_with_the_time_of_their_observation_are_not(age_s):
    policy = Policy(anchored_s=age_s, stamped_s=age_s)
    for goal in (1.5, 0.0, 1.5):
        policy.goal = np.full(2, goal)
        policy.run(2.0)
    assert not policy.named


def test_a_robot_that_turns_round_again_and_again_is_not():
    policy = Policy(anchored_s=0.0, stamped_s=0.0, speed=1.0)
    for turn in range(12):
        policy.goal = np.full(2, 0.4 * (turn % 2))
        policy.run(0.5)
    assert not policy.named


@pytest.mark.parametrize('every', [2, 5, 20])
def test_a_policy_that_continues_its_plan_ahead_of_a_lagging_robot_is_not(every):
    """On its way back the command lies where the robot was on its way there."""
    columns = CommandColumns((Column('a'), Column('b')))
    check = AnchorCheck(ColumnModel(columns))
    angle = np.abs((np.arange(2000) * 0.01 + 2.0) % 4.0 - 2.0)  # to and fro at 1 rad/s
    for tick in range(25, len(angle)):
        check.note(S + tick * S // 100, np.full(2, angle[tick - 25]))
        if tick % every == 0:
            assert check.judge(S + tick * S // 100, np.full(2, angle[tick])) == ''
