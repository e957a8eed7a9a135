"""Cameras slower than the replan rate: the robot keeps moving on the newest frames there are."""

from collections import deque

import numpy as np
import pytest
from execution_rig import ROS_START_NS, SWITCH, CameraPolicy, Rig, chunk_of, holding
from hypothesis import assume, example, given
from hypothesis import strategies as st
from thorough import examples

from vla_runtime.execution.command import ChunkRefusal, CommandKind
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.types import ChunkHeader, PlanRequest

HORIZON = 32
PERIOD_S = 0.01
RUN_S = 4.0
# Answers whose frames' ages the executor remembers.
AGES_KEPT = 32


class Policy(CameraPolicy):
    """Its rows swing by less than a tolerance: where they lead does not matter here."""

    def __init__(
        self, rig: Rig, frame_s: float, inference_s: float, step_s: float, horizon: int
    ) -> None:
        super().__init__(rig, frame_s, inference_s)
        self._horizon, self._step_s = horizon, step_s
        self._ages_ns: deque[int] = deque(maxlen=AGES_KEPT)
        self.refusals: list[ChunkRefusal] = []
        # Answers that were refused although almost no frame had been as old at its request.
        self.surprises = 0

    def answer(self, plan: PlanRequest) -> None:
        rows = 0.05 * np.sin(0.1 * (self.answers + np.arange(self._horizon)))
        named = {'tied': True, 'request': plan.request}
        header = ChunkHeader(self.observation_ns, self.rig.executor.episode, self.answers, **named)
        result = self.rig.offer(chunk_of(list(rows), step_time_s=self._step_s), header)
        if result.refusal is not None:
            self.refusals.append(result.refusal)
        age_ns = self.asked_ns - self.observation_ns
        as_old = sum(other >= age_ns for other in self._ages_ns)
        self.surprises += result.refusal is ChunkRefusal.USEFUL_PART_PAST and as_old <= 1
        if result.refusal is not ChunkRefusal.OBSERVATION_UNKNOWN:
            self._ages_ns.append(age_ns)


def longest_stall(
    parameters: ExecutorParameters,
    frame_s: float,
    inference_s: float,
    step_s: float,
    horizon: int = HORIZON,
    run_s: float = RUN_S,
):
    """Seconds of the longest pause, and the policy.

    The first three answers tell the executor how long an inference takes and how old frames are.
    Where a chunk is no longer than an inference, a pause counts an inference less for each answer
    refused in it for a frame of an age that the executor had not seen: it learns from these.
    """
    rig = Rig(parameters, period_ns=round(PERIOD_S * 1e9)).started()
    policy = Policy(rig, frame_s, inference_s, step_s, horizon)
    learns = horizon * step_s <= inference_s + step_s
    moved_s, longest_s, surprises = None, 0.0, 0
    for _ in range(round(run_s / PERIOD_S)):
        policy.work()
        if rig.tick().kind is CommandKind.TRACK or policy.answers <= 3:
            moved_s, surprises = rig.now_s, policy.surprises
        elif moved_s is not None:
            learned_s = learns * (policy.surprises - surprises) * inference_s
            longest_s = max(longest_s, rig.now_s - moved_s - learned_s)
    assert moved_s is not None, policy.refusals
    return longest_s, policy


@examples(60)
@given(
    camera_hz=st.floats(3.0, 60.0),
    step_hz=st.floats(10.0, 125.0),
    horizon=st.sampled_from([1, 2, 4, 8, 16, HORIZON]),
    part=st.floats(0.0, 1.0),
    inference_s=st.floats(0.005, 0.6),
    mode=st.sampled_from(['asynchronous', 'synchronous']),
    overrun=st.sampled_from(['hold', 'continue']),
    handover=st.sampled_from(['switch', 'blend', 'ensemble', 'rtc']),
)
@example(30.0, 50.0, 1, 1.0, 0.3, 'asynchronous', 'continue', 'switch')
@example(30.0, 30.0, 1, 1.0, 0.1, 'asynchronous', 'continue', 'switch')
@example(60.0, 125.0, 1, 1.0, 0.6, 'asynchronous', 'continue', 'switch')
@example(5.78, 66.6, 2, 1.0, 0.155, 'asynchronous', 'continue', 'ensemble')
def test_when_cameras_and_steps_have_any_rates_expect_no_stall_beyond_a_frame_and_an_inference(
    camera_hz, step_hz, horizon, part, inference_s, mode, overrun, handover
):
    frame_s, step_s = 1.0 / camera_hz, 1.0 / step_hz
    assume(horizon <= 2 or horizon * step_s >= 2 * frame_s)
    parameters = holding(
        replan_interval=max(1, round(part * horizon)),
        replan_mode=mode,
        overrun=overrun,
        max_overrun_steps=min(4, horizon),
        handover=HandoverParameters(handover, blend_steps=1),
        request_timeout_s=2.0,
    )
    stall_s, policy = longest_stall(parameters, frame_s, inference_s, step_s, horizon)
    # A tick each to ask, to answer and to move, and one of the camera's phase.
    bound_s = frame_s + inference_s + 4 * PERIOD_S
    assert stall_s <= bound_s, (stall_s, bound_s, policy.refusals)
    # Frames from before the start, or rows that are over: no other reason is a camera's.
    useless = {ChunkRefusal.OBSERVATION_UNKNOWN, ChunkRefusal.USEFUL_PART_PAST}
    assert set(policy.refusals) <= useless, policy.refusals


@pytest.mark.parametrize(('horizon', 'interval'), [(1, 1), (2, 2), (3, 3), (8, 8)])
def test_when_a_chunk_is_shorter_than_an_inference_expect_one_inference_between_chunks(
    horizon, interval
):
    parameters = holding(
        replan_interval=interval, handover=HandoverParameters('switch', blend_steps=1)
    )
    stall_s, policy = longest_stall(
        parameters, frame_s=1 / 60, inference_s=0.5, step_s=0.02, horizon=horizon
    )
    assert ChunkRefusal.USEFUL_PART_PAST not in policy.refusals[3:]
    assert stall_s <= 0.5 + 1 / 60 + 4 * PERIOD_S


@pytest.mark.parametrize(
    ('camera_hz', 'step_hz', 'inference_s'), [(30, 50, 0.3), (30, 30, 0.1), (60, 125, 0.6)]
)
def test_when_a_chunk_has_one_row_expect_next_to_no_answer_refused(camera_hz, step_hz, inference_s):
    parameters = holding(replan_interval=1, handover=HandoverParameters('switch', blend_steps=1))
    _, policy = longest_stall(
        parameters, 1 / camera_hz, inference_s, 1 / step_hz, horizon=1, run_s=20.0
    )
    assert policy.answers > 25
    # One in as many as are remembered, and those that it learned from.
    allowed = 2 + policy.answers // AGES_KEPT
    assert policy.refusals.count(ChunkRefusal.USEFUL_PART_PAST) <= allowed, policy.answers


def test_when_a_frame_is_late_for_a_short_chunk_expect_it_forgotten_after_two_more():
    parameters = holding(replan_interval=1, handover=HandoverParameters('switch', blend_steps=1))
    rig = Rig(parameters, period_ns=round(PERIOD_S * 1e9)).started()
    policy = Policy(rig, 1 / 30, 0.3, 0.02, 1)
    policy.gap_s = (4.0, 4.45)
    stalls_s, moved_s, late_at = [], rig.now_s, None
    while len(stalls_s) < 30:
        policy.work()
        if rig.tick().kind is CommandKind.TRACK:
            if rig.now_s - moved_s > 2 * PERIOD_S:
                stalls_s.append(rig.now_s - moved_s)
            if late_at is None and rig.ros_ns - ROS_START_NS > policy.gap_s[1] * 1e9:
                late_at = len(stalls_s)
            moved_s = rig.now_s
    assert late_at is not None
    assert max(stalls_s[late_at - 1 : late_at + 2]) > 0.6
    # Without the late frame one frame and one inference; it is allowed another frame.
    assert max(stalls_s[late_at + 3 :]) <= 0.3 + 2 / 30 + 4 * PERIOD_S, stalls_s


@pytest.mark.parametrize(
    ('horizon', 'step_s', 'interval'), [(8, 0.05, 4), (10, 1 / 30, 5), (25, 0.02, 10)]
)
def test_when_one_frame_is_late_expect_the_robot_to_stall_for_that_frame_and_once_more_at_most(
    horizon, step_s, interval
):
    parameters = holding(
        replan_interval=interval,
        overrun='continue',
        max_overrun_steps=4,
        handover=HandoverParameters('switch', blend_steps=1),
        max_observation_age_s=2.0,
    )
    rig = Rig(parameters, period_ns=round(PERIOD_S * 1e9)).started()
    policy = Policy(rig, 1 / 30, 0.08, step_s, horizon)
    policy.gap_s = (2.0, 2.45)
    stalls, moved = 0, True
    for _ in range(round(6.0 / PERIOD_S)):
        policy.work()
        moves = rig.tick().kind is CommandKind.TRACK
        late = rig.ros_ns - ROS_START_NS > 2e9
        stalls += late and moved and not moves
        moved = moves
    assert moved
    assert stalls <= 2


@pytest.mark.parametrize('interval', [1, 2, 4])
def test_when_cameras_are_slower_than_steps_expect_the_robot_to_keep_moving(interval):
    parameters = holding(
        replan_interval=interval,
        overrun='continue',
        max_overrun_steps=4,
        handover=SWITCH,
        request_timeout_s=2.0,
    )
    stall_s, policy = longest_stall(parameters, frame_s=1 / 12, inference_s=0.03, step_s=0.02)
    assert stall_s == 0.0
    # The only ones refused were seen before the start.
    assert set(policy.refusals) <= {ChunkRefusal.OBSERVATION_UNKNOWN}


def test_when_the_same_frames_are_inferred_again_expect_the_chunk_joined_further_on():
    rig = Rig(holding(replan_interval=2, handover=SWITCH)).started()
    rows = [0.001 * row for row in range(HORIZON)]
    observed_ns = rig.ros_ns
    assert rig.submit(rows, observed_ns).join_index == 0
    rig.tick(5)
    again = rig.submit(rows, observed_ns)
    assert again.accepted and again.join_index == 2
    assert rig.submit(rows, observed_ns, number=rig.number - 1).refusal is ChunkRefusal.OUT_OF_ORDER
    assert rig.submit(rows, observed_ns, number=rig.number + 1).refusal is ChunkRefusal.DUPLICATE


def ask(rig: Rig) -> int:
    request = rig.poll()
    assert request is not None
    return request.request


def answer(rig: Rig, request: int | None, observation_ns: int, number: int) -> ChunkRefusal | None:
    return rig.offer(
        chunk_of([0.0] * HORIZON),
        ChunkHeader(observation_ns, 0, number, tied=True, request=request),
    ).refusal


def test_when_an_answer_is_refused_expect_its_request_closed_and_the_next_asked_at_once():
    rig = Rig(holding(replan_interval=2, handover=SWITCH)).started()
    first = ask(rig)
    assert answer(rig, first, rig.ros_ns, 1) is None
    rig.tick(3)
    second = ask(rig)
    assert second == first + 1
    assert answer(rig, second, rig.ros_ns - 40_000_000, 2) is ChunkRefusal.OUT_OF_ORDER
    assert not rig.executor.status().open_requests
    assert ask(rig) == second + 1


def test_when_a_stray_chunk_is_refused_expect_the_request_to_stay_open():
    rig = Rig(holding(replan_interval=2, handover=SWITCH)).started()
    first = ask(rig)
    observed_ns = rig.ros_ns
    assert answer(rig, first, observed_ns, 1) is None
    rig.tick(3)
    ask(rig)
    assert answer(rig, first, rig.ros_ns - 40_000_000, 2) is ChunkRefusal.OUT_OF_ORDER
    assert answer(rig, None, observed_ns, 1) is ChunkRefusal.DUPLICATE
    assert rig.executor.status().open_requests
