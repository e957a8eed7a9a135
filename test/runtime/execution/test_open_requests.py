"""Several requests open at once: random answers, losses, resets and stops, and what must hold.

The policy beside the executor is a model: it answers each request some time after it, from what the
camera showed when it began, and its answers are lost, doubled, put out of order or late.
"""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from execution_rig import STEP_NS, Rig, chunk_of, holding
from hypothesis import given
from hypothesis import strategies as st
from thorough import thorough_after

from vla_runtime.execution.command import ChunkRefusal, CommandKind, SubmitResult
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.parameters import DelayParameters
from vla_runtime.types import ChunkHeader, PlanRequest

HORIZON = 20
CONTINUES = {'overrun': 'continue', 'max_overrun_steps': 6}


@dataclass(frozen=True)
class Answer:
    due_ns: int
    header: ChunkHeader


class PipelinedPolicy:
    """Answers in the order of the requests, up to so many at a time, each after `delay_ns`."""

    def __init__(self, rig: Rig, most: int, delay_ns: int, horizon: int = HORIZON) -> None:
        self.rig, self.most, self.delay_ns, self.horizon = rig, most, delay_ns, horizon
        self.number = 0
        self.under_way: list[Answer] = []
        self.asked: list[PlanRequest] = []

    def ask(self) -> PlanRequest | None:
        rig = self.rig
        plan = rig.poll()
        if plan is not None:
            self.asked.append(plan)
            self.begin(plan)
        return plan

    def begin(self, plan: PlanRequest) -> None:
        header = ChunkHeader(
            self.rig.ros_ns,
            plan.episode,
            self.number,
            tied=True,
            request=plan.request,
            open_requests=self.most,
        )
        self.number += 1
        self.under_way.append(Answer(self.rig.ros_ns + self.delay_ns, header))

    def due(self) -> list[Answer]:
        due = [one for one in self.under_way if one.due_ns <= self.rig.ros_ns]
        self.under_way = [one for one in self.under_way if one.due_ns > self.rig.ros_ns]
        return due

    def give(self, header: ChunkHeader):
        rig = self.rig
        chunk = chunk_of(0.001 * np.arange(self.horizon)[:, None] * np.ones(2))
        return rig.offer(chunk, header)

    def step(self) -> list[SubmitResult]:
        """Ask, tick, and give what is due."""
        self.ask()
        self.rig.tick()
        return [self.give(answer.header) for answer in self.due()]


def taken_over(most: int, ticks: int = 1000, **changes: object) -> tuple[int, Rig]:
    """Chunks that took over within so many ticks of a policy that takes eight steps."""
    values: dict[str, object] = {'replan_interval': 4, **CONTINUES, **changes}
    rig = Rig(holding(**values)).started()
    policy = PipelinedPolicy(rig, most, 8 * STEP_NS)
    for _ in range(ticks):
        assert all(result.accepted for result in policy.step())
        assert rig.executor.status().open_requests <= most
    return rig.executor.counters.taken_over, rig


def test_two_open_requests_bring_twice_the_chunks_of_one():
    one, two = taken_over(1)[0], taken_over(2)[0]
    assert two >= 1.8 * one


def test_more_are_open_only_where_the_replan_interval_asks_for_them():
    """Of eight steps of delay, two intervals of four are all that there is to keep busy."""
    two, seven = taken_over(2)[0], taken_over(7)[0]
    assert two <= seven <= two + 2
    fast, rig = taken_over(7, replan_interval=12)
    assert rig.executor.counters.superseded == 0
    assert rig.executor.status().most_open_requests == 7
    assert fast <= taken_over(1, replan_interval=12)[0] + 1


def test_without_a_word_of_the_policy_one_request_is_open():
    rig = Rig(holding(replan_interval=4, delay=DelayParameters(floor_steps=10))).started()
    rig.submit([0.0] * HORIZON)
    rig.tick(8)
    assert rig.poll() is not None
    rig.tick(30)
    assert rig.poll() is None


def test_a_chunk_of_one_row_is_never_asked_for_beside_another():
    rig = Rig(holding(replan_interval=1)).started()
    policy = PipelinedPolicy(rig, 7, 3 * STEP_NS, horizon=1)
    for _ in range(300):
        assert all(result.accepted for result in policy.step())
        assert rig.executor.status().open_requests <= 1
    assert rig.executor.counters.taken_over > 10


def test_of_a_second_request_only_what_precedes_the_first_answer_is_certain():
    rig = Rig(holding(replan_interval=4, **CONTINUES)).started()
    policy = PipelinedPolicy(rig, 2, 8 * STEP_NS)
    seconds = 0
    for _ in range(400):
        plan = policy.ask()
        status = rig.executor.status()
        if plan is not None and plan.step is not None and rig.executor.handovers:
            boundary, end = rig.executor.handovers[-1].step + 4, plan.step + plan.certain
            if status.open_requests == 2:
                # Then the answer to the first one takes over, and nobody knows with what.
                assert max(boundary, plan.step) <= end <= max(boundary, plan.step + 1)
                seconds += 1
            elif status.delay_estimate == 8:
                assert end >= min(plan.step + 8, plan.step + len(plan.rows))
        rig.tick()
        for answer in policy.due():
            policy.give(answer.header)
    assert seconds > 5


def test_a_chunk_that_was_made_for_a_plan_since_replaced_is_blended():
    modes = {}
    for most in (1, 2):
        _, rig = taken_over(most, handover=HandoverParameters(mode='rtc'))
        handovers = [seam for seam in rig.executor.handovers if not seam.from_hold]
        modes[most] = {seam.mode for seam in handovers[2:]}
    assert modes == {1: {'rtc'}, 2: {'blend'}}


def test_the_age_of_the_observation_behind_each_action_is_counted():
    age = {most: taken_over(most)[1].executor.counters.mean_observation_age_ms for most in (1, 2)}
    # Each is made eight steps before it begins, and executed for four; one alone overruns by five.
    assert 8 * 40 < age[2] < age[1] < 20 * 40


def test_a_late_answer_of_a_request_that_timed_out_is_refused_and_counted():
    rig = Rig(holding(replan_interval=4, request_timeout_s=0.5)).started()
    policy = PipelinedPolicy(rig, 2, 0)
    plan = policy.ask()
    assert plan is not None
    header = policy.due()[0].header
    rig.tick(60)
    assert policy.ask() is not None
    result = policy.give(header)
    assert result.refusal is ChunkRefusal.REQUEST_CLOSED
    counters = rig.executor.counters
    assert (counters.requests_timed_out, counters.refused[ChunkRefusal.REQUEST_CLOSED]) == (1, 1)
    assert policy.give(policy.due()[0].header).accepted


def test_each_request_has_its_own_time_out():
    rig = Rig(holding(replan_interval=4, request_timeout_s=0.5, **CONTINUES)).started()
    policy = PipelinedPolicy(rig, 2, 8 * STEP_NS)
    asked_s: list[float] = []
    while rig.executor.counters.taken_over < 6 or rig.executor.status().open_requests < 2:
        if policy.ask() is not None:
            asked_s.append(rig.now_s)
        rig.tick()
        for answer in policy.due():
            policy.give(answer.header)
    # The policy has died.
    expired_s: list[float] = []
    while len(expired_s) < 2:
        rig.tick()
        if rig.poll() is not None:
            asked_s.append(rig.now_s)
        expired_s += [rig.now_s] * (rig.executor.counters.requests_timed_out - len(expired_s))
    waited = [expired - asked for expired, asked in zip(expired_s, asked_s[-4:], strict=False)]
    assert asked_s[-3] > asked_s[-4] and all(0.5 < one < 0.52 for one in waited)


@pytest.mark.parametrize('flush', ['stop', 'reset'])
def test_nothing_asked_before_a_stop_or_a_reset_is_executed_after_it(flush):
    rig = Rig(holding(replan_interval=4, **CONTINUES)).started()
    policy = PipelinedPolicy(rig, 2, 8 * STEP_NS)
    for _ in range(200):
        policy.step()
    assert policy.under_way
    if flush == 'stop':
        rig.executor.stop()
        rig.run_until(lambda _: rig.executor.at_rest)
        assert rig.start().started
    else:
        rig.executor.reset(1)
    assert not rig.executor.status().open_requests
    rig.tick()
    refused = {policy.give(answer.header).refusal for answer in policy.under_way}
    assert refused == {
        ChunkRefusal.REQUEST_CLOSED if flush == 'stop' else ChunkRefusal.OTHER_EPISODE
    }


class Stream:
    """One random stream of what may happen; see `test_whatever_becomes_of_answers`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        most = self.random.choice((1, 2, 3, 7))
        interval = self.random.choice((1, 3, 6))
        self.rig = Rig(
            holding(replan_interval=interval, request_timeout_s=0.6, **CONTINUES)
        ).started()
        self.policy = PipelinedPolicy(self.rig, most, 0)
        self.most = most
        # Answers still on their way, and all that ever were, to be doubled.
        self.on_the_way: list[Answer] = []
        self.given: list[ChunkHeader] = []
        # What was asked for and neither answered, timed out nor flushed, with its time; (episode,
        # number) each.
        self.open: dict[tuple[int, int], float] = {}
        self.newest: tuple[int, int] = (0, 0)
        self.newest_ns = 0
        self.stopped = False
        self.most_seen = 0

    def run(self, steps: int = 300) -> None:
        for _ in range(steps):
            self.act()
            self.tick()

    def act(self) -> None:
        executor, rig, chance = self.rig.executor, self.rig, self.random.random()
        if chance < 0.005:
            executor.reset(executor.episode + 1)
            self.open.clear()
        elif chance < 0.01 and not self.stopped:
            executor.stop()
            self.open.clear()
            self.stopped = True
        elif chance < 0.06 and self.stopped and executor.at_rest:
            assert executor.start(rig.now_s, rig.ros_ns).started
            self.stopped = False
        elif chance < 0.07:
            # A change of the instruction: the policy begins all that are open once more.
            held = list(self.policy.asked)
            self.on_the_way.clear()
            for plan in held:
                if (plan.episode, plan.request) in self.open:
                    self.policy.begin(plan)
        self.expire()
        plan = self.policy.ask()
        if plan is not None:
            assert not self.stopped and plan.request is not None
            self.open[plan.episode, plan.request] = rig.now_s
            assert len(self.open) <= self.most
            self.most_seen = max(self.most_seen, len(self.open))
        for answer in self.policy.due():
            if self.random.random() < 0.85:
                delay_ns = self.random.choice((1, 3, 9, 20, 40, 80)) * 10_000_000
                self.on_the_way.append(replace(answer, due_ns=rig.ros_ns + delay_ns))
        self.deliver()

    def expire(self) -> None:
        self.open = {key: at for key, at in self.open.items() if self.rig.now_s - at <= 0.6}

    def deliver(self) -> None:
        arrived = [one for one in self.on_the_way if one.due_ns <= self.rig.ros_ns]
        self.on_the_way = [one for one in self.on_the_way if one.due_ns > self.rig.ros_ns]
        self.random.shuffle(arrived)
        headers = [one.header for one in arrived]
        if self.given and self.random.random() < 0.1:
            headers.append(self.random.choice(self.given))
        for header in headers:
            self.given.append(header)
            self.check(header)

    def check(self, header: ChunkHeader) -> None:
        executor = self.rig.executor
        result = self.policy.give(header)
        assert header.request is not None
        key = header.episode, header.request
        if result.accepted:
            # Asked for, in this episode, in order, by a robot that may move.
            assert key in self.open and header.episode == executor.episode and not self.stopped
            assert header.request > self.newest[1] or header.episode > self.newest[0]
            assert header.observation_ns >= self.newest_ns or header.episode > self.newest[0]
            self.newest, self.newest_ns = key, header.observation_ns
            for other in [one for one in self.open if one <= key]:
                del self.open[other]
        elif result.refusal is not ChunkRefusal.OTHER_EPISODE:
            self.open.pop(key, None)

    def tick(self) -> None:
        rig = self.rig
        before = None if not rig.ticks else rig.command.setpoints
        at_rest = rig.executor.at_rest
        command = rig.tick()
        if self.stopped and at_rest:
            assert command.kind is not CommandKind.TRACK
            np.testing.assert_array_equal(command.setpoints, before)


@pytest.mark.parametrize('block', thorough_after(3, range(20)))
def test_whatever_becomes_of_answers_none_is_stale_and_a_stopped_robot_stays(block):
    """1,000 random streams: only what is open is taken, newer after older, and never at rest."""
    accepted, several = 0, 0
    for seed in range(50):
        stream = Stream(1000 * block + seed)
        stream.run()
        accepted += stream.rig.executor.counters.accepted
        several += stream.most_seen > 1
        counters = stream.rig.executor.counters
        assert counters.received == counters.accepted + sum(counters.refused.values())
    # It is no proof by idleness.
    assert accepted > 50 * 8 and several > 15


@given(most=st.integers(1, 200), interval=st.integers(1, HORIZON))
def test_however_many_a_policy_takes_no_more_are_open_than_the_delay_needs(most, interval):
    rig = Rig(holding(replan_interval=interval, **CONTINUES)).started()
    policy = PipelinedPolicy(rig, most, 8 * STEP_NS)
    for _ in range(150):
        policy.step()
        assert rig.executor.status().open_requests <= min(most, 64, 16 // interval + 2)


def test_an_answer_that_names_no_request_does_not_move_the_robot_after_a_stop_and_a_start():
    """As a policy of an earlier release gives it."""
    rig = Rig(holding(replan_interval=4, **CONTINUES)).started()
    policy = PipelinedPolicy(rig, 1, 4 * STEP_NS, 20)
    policy.ask()
    rig.tick(2)
    header = policy.under_way.pop().header
    rig.executor.stop()
    rig.tick(3)
    assert rig.start().started
    rig.tick(1)
    late = policy.give(replace(header, request=None))
    before = np.array(rig.measured)
    rig.tick(40)
    assert late.refusal is not None
    assert np.array_equal(rig.measured, before)
