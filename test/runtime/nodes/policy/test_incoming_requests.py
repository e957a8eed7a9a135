"""A request is answered once, however often the executor sends it."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from thorough import examples

from vla_runtime.execution.requests import Requests
from vla_runtime.messages.trajectories import message_to_plan, plan_to_message
from vla_runtime.nodes.policy.incoming_requests import IncomingRequests
from vla_runtime.types import PlanRequest

MS = 1_000_000
STAGES = 2


def plan(request: int | None, episode: int = 0, stamp_ns: int = 0) -> PlanRequest:
    message = plan_to_message(
        PlanRequest(
            np.zeros((0, 1)),
            ['a'],
            ['position'],
            0.02,
            stamp_ns=stamp_ns,
            episode=episode,
            certain=0,
            request=request,
        )
    )
    return message_to_plan(message)


def received(incoming: IncomingRequests, number: int | None, at_ns: int) -> PlanRequest:
    request = incoming.receive(plan(number), at_ns)
    assert request is not None
    return request


def next_number(incoming: IncomingRequests) -> int | None:
    request = incoming.next()
    return None if request is None else request.request


def values_of(one: Any) -> tuple[Any, ...]:
    return tuple(getattr(one, field.name) for field in fields(one))


def test_repeat_of_a_waiting_request_brings_its_plan_and_keeps_its_arrival() -> None:
    incoming = IncomingRequests()
    first = received(incoming, 1, 5)
    incoming.begin(first)
    incoming.wait(first)
    newer = plan(1)
    repeat = incoming.receive(newer, 100 * MS)
    # Arrays make two of them incomparable from Python 3.13 on.
    assert values_of(repeat) == values_of(replace(newer, arrived_ns=5))
    assert incoming.superseded == 0


def test_repeat_is_left_out_while_the_inference_runs_and_while_the_chunk_is_on_its_way() -> None:
    incoming = IncomingRequests()
    first = received(incoming, 1, 0)
    incoming.begin(first)
    assert incoming.receive(plan(1), 100 * MS) is None
    incoming.answer(first, 120 * MS)
    assert incoming.receive(plan(1), 121 * MS) is None


def test_repeat_long_after_the_answer_is_answered_anew_because_the_chunk_was_lost() -> None:
    incoming = IncomingRequests()
    first = received(incoming, 1, 0)
    incoming.begin(first)
    incoming.answer(first, 100 * MS)
    again = incoming.receive(plan(1, stamp_ns=200 * MS), 200 * MS)
    assert again is not None and again.arrived_ns == 200 * MS


def test_copy_of_the_plan_that_was_answered_is_none_however_late_it_comes() -> None:
    incoming = IncomingRequests()
    first = received(incoming, 1, 0)
    incoming.begin(first)
    incoming.answer(first, 100 * MS)
    assert incoming.receive(plan(1), 5000 * MS) is None
    # The next one's plan may have the same time.
    assert received(incoming, 2, 5001 * MS).arrived_ns == 5001 * MS


def test_newer_number_other_episode_and_no_number_are_requests_of_their_own() -> None:
    incoming = IncomingRequests()
    incoming.begin(received(incoming, 1, 0))
    assert incoming.receive(plan(2), 1) is not None
    assert incoming.superseded == 0
    assert incoming.receive(plan(2, episode=1), 2) is not None
    assert incoming.superseded == 1
    assert incoming.receive(plan(None, episode=1), 3) is not None
    assert incoming.receive(plan(None, episode=1), 4) is not None
    assert incoming.superseded == 3


def test_forgotten_request_is_taken_again_when_it_is_repeated() -> None:
    incoming = IncomingRequests()
    old = received(incoming, 1, 0)
    incoming.begin(old)
    incoming.forget()
    assert incoming.receive(plan(1), 100 * MS) is not None


def test_as_many_wait_as_the_policy_takes_and_the_oldest_comes_first() -> None:
    incoming = IncomingRequests()
    incoming.most = 2
    for number in (1, 2):
        assert incoming.receive(plan(number), number) is not None
    first = incoming.next()
    assert first is not None and first.request == 1
    incoming.begin(first)
    assert next_number(incoming) == 2
    assert incoming.superseded == 0
    for number in (3, 4):
        incoming.receive(plan(number), number)
    assert next_number(incoming) == 3
    assert incoming.superseded == 1


def test_a_request_to_be_answered_anew_comes_before_newer_ones() -> None:
    incoming = IncomingRequests()
    incoming.most = 2
    first = received(incoming, 1, 0)
    incoming.begin(first)
    received(incoming, 2, 1)
    incoming.wait(first)
    assert incoming.next() == first


def test_a_request_that_comes_after_a_newer_one_that_waits_is_asked_first() -> None:
    incoming = IncomingRequests()
    incoming.most = 3
    for number in (3, 1, 2):
        received(incoming, number, number)
    asked = []
    while (request := incoming.next()) is not None:
        asked.append(request.request)
        incoming.begin(request)
    assert asked == [1, 2, 3]


def test_of_too_many_that_wait_the_oldest_by_number_are_replaced() -> None:
    incoming = IncomingRequests()
    incoming.most = 2
    for number in (3, 4, 2):
        received(incoming, number, number)
    assert next_number(incoming) == 3 and incoming.superseded == 1
    # One without a number is newer than all before it.
    received(incoming, None, 5)
    assert next_number(incoming) == 4 and incoming.superseded == 2


def test_requests_that_wait_are_replaced_when_fewer_may() -> None:
    incoming = IncomingRequests()
    incoming.most = 3
    for number in (1, 2, 3):
        received(incoming, number, number)
    incoming.most = 1
    assert next_number(incoming) == 3 and incoming.superseded == 2


def test_a_request_to_be_answered_anew_is_replaced_where_a_newer_one_waits_in_its_place() -> None:
    incoming = IncomingRequests()
    first = received(incoming, 1, 0)
    incoming.begin(first)
    received(incoming, 2, 1)
    incoming.wait(first)
    assert next_number(incoming) == 2 and incoming.superseded == 1


def test_a_late_request_of_an_ended_episode_replaces_none() -> None:
    incoming = IncomingRequests()
    received(incoming, 1, 0)
    newer = incoming.receive(plan(2, episode=1), 10 * MS)
    assert incoming.receive(plan(1), 20 * MS) is None
    assert incoming.next() == newer and incoming.episode == 1
    # Nor one of the episode before that.
    newest = incoming.receive(plan(3, episode=2), 30 * MS)
    for episode in (0, 1):
        assert incoming.receive(plan(4, episode=episode), 40 * MS) is None
    assert incoming.next() == newest


def test_an_episode_whose_number_comes_again_much_later_is_a_new_one() -> None:
    incoming = IncomingRequests()
    received(incoming, 1, 0)
    assert incoming.receive(plan(2, episode=1), 10 * MS) is not None
    assert incoming.receive(plan(1), 20_000 * MS) is not None
    assert incoming.episode == 0


def test_another_episode_replaces_all_that_wait() -> None:
    incoming = IncomingRequests()
    incoming.most = 3
    for number in (1, 2, 3):
        received(incoming, number, number)
    assert incoming.receive(plan(4, episode=1), 4) is not None
    assert incoming.superseded == 3 and incoming.episode == 1
    found = incoming.next()
    assert found is not None and found.episode == 1


def test_a_failed_request_is_taken_again_when_it_is_repeated_and_keeps_none_waiting() -> None:
    incoming = IncomingRequests()
    incoming.most = 2
    first = received(incoming, 1, 0)
    received(incoming, 2, 1)
    incoming.begin(first)
    incoming.fail(first)
    assert next_number(incoming) == 2
    assert received(incoming, 1, 100 * MS).arrived_ns == 100 * MS


def test_a_request_that_comes_after_a_newer_one_has_begun_is_left_out() -> None:
    """The transport lost it, and its repeat comes when its answer would be out of order."""
    incoming = IncomingRequests()
    incoming.most = 2
    incoming.begin(received(incoming, 2, 0))
    assert incoming.receive(plan(1), 100 * MS) is None
    assert incoming.next() is None
    # Of another episode numbers go on as well, but what was begun says nothing.
    assert incoming.receive(plan(1, episode=1), 200 * MS) is not None


def test_a_request_of_another_instruction_waits_again_before_newer_ones() -> None:
    incoming = IncomingRequests()
    incoming.most = 2
    first, second = (received(incoming, number, number) for number in (1, 2))
    incoming.begin(first, 'red')
    incoming.begin(second, 'red')
    incoming.turn_to('blue', first)
    assert next_number(incoming) == 1
    assert incoming.superseded == 0


def test_a_request_of_another_instruction_is_dropped_where_a_newer_one_is_answered_before() -> None:
    """A pipeline denoised the first when the second began: its answer would come too late."""
    incoming = IncomingRequests()
    incoming.most = 2
    first, second = (received(incoming, number, number) for number in (1, 2))
    incoming.begin(first, 'red')
    incoming.begin(second, 'blue')
    incoming.turn_to('blue', first)
    assert next_number(incoming) is None
    assert incoming.superseded == 1
    assert incoming.receive(plan(1), 100 * MS) is None
    incoming.answer(second, 200 * MS)
    assert received(incoming, 3, 300 * MS).request == 3


def test_a_request_without_a_number_is_answered_whatever_began_after_it() -> None:
    incoming = IncomingRequests()
    incoming.most = 2
    alone = incoming.receive(plan(None), 0)
    assert alone is not None
    incoming.begin(alone, 'red')
    incoming.begin(received(incoming, 2, 1), 'blue')
    incoming.turn_to('blue', alone)
    assert incoming.next() is alone


class Exchange(RuleBasedStateMachine):
    """An executor's requests, a lossy transport, and a policy with an inference in each of stages.

    Whatever is lost, repeated, late or changed meanwhile, answers come in the order of their
    numbers, each for the instruction of its moment, and in the end nothing is left waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests, self.incoming = Requests(), IncomingRequests()
        self.requests.most = self.incoming.most = STAGES
        self.now_ns = 0
        self.instruction = 0
        self.on_the_way: list[PlanRequest] = []
        # What the policy works on, oldest first, and for which instruction.
        self.stages: deque[tuple[PlanRequest, int]] = deque()
        # Answers that the executor heard.
        self.heard: list[int] = []

    @rule(ms=st.integers(1, 300))
    def time_passes(self, ms: int) -> None:
        self.now_ns += ms * MS
        again = self.requests.send_again(self.now_ns * 1e-9)
        if again is not None:
            self.on_the_way.append(plan(again.number, stamp_ns=self.now_ns))

    @rule()
    def executor_asks(self) -> None:
        if len(self.requests.open) < self.requests.most:
            number = self.requests.ask(self.now_ns * 1e-9, self.now_ns).number
            self.on_the_way.append(plan(number, stamp_ns=self.now_ns))

    @rule(place=st.integers(0, 9), lost=st.booleans(), twice=st.booleans())
    def a_message_arrives(self, place: int, lost: bool, twice: bool) -> None:
        if not self.on_the_way:
            return
        message = self.on_the_way.pop(min(place, len(self.on_the_way) - 1))
        for _ in range((not lost) + (twice and not lost)):
            self.incoming.receive(message, self.now_ns)

    @rule(waits=st.booleans())
    def an_inference_begins(self, waits: bool) -> None:
        request = self.incoming.next()
        if request is None or len(self.stages) == STAGES:
            return
        self.incoming.begin(request, str(self.instruction))
        if waits:
            # No frame is there yet.
            self.incoming.wait(request)
        else:
            self.stages.append((request, self.instruction))

    @rule(fails=st.booleans(), arrives=st.booleans())
    def an_inference_ends(self, fails: bool, arrives: bool) -> None:
        if not self.stages:
            return
        request, instruction = self.stages.popleft()
        if fails:
            self.incoming.fail(request)
        elif instruction != self.instruction:
            self.incoming.turn_to(str(self.instruction), request)
        else:
            self.answer(request, arrives)

    def answer(self, request: PlanRequest, arrives: bool) -> None:
        assert request.request is not None
        self.incoming.answer(request, self.now_ns)
        if arrives:
            # A message that was long on the way looks like an answer that was lost.
            assert request.request >= max(self.heard, default=0)
            self.heard.append(request.request)
            self.requests.answer(request.request)

    @rule()
    def the_instruction_changes(self) -> None:
        self.instruction += 1

    def teardown(self) -> None:
        """A transport that works, and a policy that answers: nothing waits in the end."""
        for _ in range(40):
            self.time_passes(120)
            while self.on_the_way:
                self.a_message_arrives(0, lost=False, twice=False)
            self.an_inference_begins(waits=False)
            self.an_inference_ends(fails=False, arrives=True)
        assert not self.requests.open
        assert self.incoming.next() is None


Exchange.TestCase.settings = examples(300)
TestExchange = Exchange.TestCase
