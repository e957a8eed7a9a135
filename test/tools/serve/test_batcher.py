"""Requests that wait together, one after the other, and beside faults; on a policy that notes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from policy_servers import PATIENCE_S, wait_for

from vla_tools.serve.batcher import Batcher


class NotingPolicy:
    """Answers with the request's own name; `gate` holds a batch back."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def submit_batch(self, requests: list[Any]) -> list[Future]:
        self.threads.add(threading.get_ident())
        self.batches.append([request.name for request in requests])
        assert self.gate.wait(PATIENCE_S)
        futures = []
        for request in requests:
            future: Future = Future()
            if request.name == 'bad':
                future.set_exception(ValueError('bad'))
            else:
                future.set_result(request.name)
            futures.append(future)
        return futures

    def close(self) -> None:
        self.closed = True


def asked(name: str, session: object = None) -> Any:
    one = SimpleNamespace(name=name, session=session or object())
    return lambda: one


@pytest.fixture
def policy() -> NotingPolicy:
    return NotingPolicy()


def batcher_of(policy: NotingPolicy, most: int, wait_s: float, robots: int) -> Batcher:
    return Batcher(policy, most, wait_s, lambda: robots)  # type: ignore[arg-type]


def held(policy: NotingPolicy, batcher: Batcher) -> Future:
    """A batch of one that runs until the gate opens."""
    policy.gate.clear()
    first = batcher.submit(asked('first'))
    wait_for(lambda: policy.batches)
    return first


def test_requests_that_wait_together_run_together_in_their_order(policy: NotingPolicy) -> None:
    batcher = batcher_of(policy, most=3, wait_s=0.0, robots=8)
    held(policy, batcher)
    futures = [batcher.submit(asked(name)) for name in 'abcde']
    policy.gate.set()
    assert [future.result(PATIENCE_S).inference for future in futures] == [*'abcde']
    assert policy.batches == [['first'], ['a', 'b', 'c'], ['d', 'e']]
    batcher.close()
    assert policy.closed and len(policy.threads) == 1


def test_a_full_batch_does_not_wait(policy: NotingPolicy) -> None:
    batcher = batcher_of(policy, most=2, wait_s=1e6, robots=8)
    futures = [batcher.submit(asked(name)) for name in 'ab']
    for future in futures:
        future.result(PATIENCE_S)
    batcher.close()


def test_one_robot_does_not_wait_for_others(policy: NotingPolicy) -> None:
    batcher = batcher_of(policy, most=8, wait_s=1e6, robots=1)
    batcher.submit(asked('a')).result(PATIENCE_S)
    batcher.close()


def test_a_robot_waits_for_one_that_is_not_ready_as_long_as_was_said(policy: NotingPolicy) -> None:
    batcher = batcher_of(policy, most=8, wait_s=0.05, robots=2)
    start_s = time.monotonic()
    found = batcher.submit(asked('a')).result(PATIENCE_S)
    assert time.monotonic() - start_s >= 0.05 and found.wait_ms >= 50.0
    assert policy.batches == [['a']]
    batcher.close()


def test_bad_requests_fail_alone(policy: NotingPolicy) -> None:
    batcher = batcher_of(policy, most=8, wait_s=0.0, robots=8)
    held(policy, batcher)

    def refuse() -> Any:
        raise KeyError('no session')

    futures = [batcher.submit(one) for one in (asked('a'), refuse, asked('bad'), asked('b'))]
    policy.gate.set()
    assert [futures[i].result(PATIENCE_S).inference for i in (0, 3)] == ['a', 'b']
    with pytest.raises(KeyError):
        futures[1].result(PATIENCE_S)
    with pytest.raises(ValueError, match='bad'):
        futures[2].result(PATIENCE_S)
    assert policy.batches[1] == ['a', 'bad', 'b']
    batcher.close()


def test_requests_of_one_session_are_in_batches_of_their_own_in_their_order(
    policy: NotingPolicy,
) -> None:
    batcher, session = batcher_of(policy, most=8, wait_s=0.0, robots=8), object()
    held(policy, batcher)
    futures = [batcher.submit(asked(name, session)) for name in ('a', 'again', 'once more')]
    futures.append(batcher.submit(asked('b')))
    policy.gate.set()
    for future in futures:
        future.result(PATIENCE_S)
    assert policy.batches[1:] == [['a', 'b'], ['again'], ['once more']]
    batcher.close()


def test_calls_run_between_batches_on_the_same_thread(policy: NotingPolicy) -> None:
    batcher = batcher_of(policy, most=8, wait_s=0.0, robots=8)
    first = held(policy, batcher)
    waiting = batcher.submit(asked('a'))
    ran = batcher.call(lambda: (threading.get_ident(), len(policy.batches)))
    failed = batcher.call(lambda: 1 / 0)
    policy.gate.set()
    assert ran.result(PATIENCE_S) == (*policy.threads, 1)
    with pytest.raises(ZeroDivisionError):
        failed.result(PATIENCE_S)
    assert waiting.result(PATIENCE_S) and first.result()
    batcher.close()


def test_an_answer_has_a_place_when_who_asked_has_gone(policy: NotingPolicy) -> None:
    batcher = batcher_of(policy, most=8, wait_s=0.0, robots=8)
    first = held(policy, batcher)
    assert not first.cancel()
    policy.gate.set()
    assert first.result(PATIENCE_S) and batcher.submit(asked('a')).result(PATIENCE_S)
    batcher.close()


def test_what_waits_at_the_end_is_answered_and_nothing_comes_after_it(
    policy: NotingPolicy,
) -> None:
    batcher = batcher_of(policy, most=1, wait_s=1e6, robots=8)
    held(policy, batcher)
    futures = [batcher.submit(asked(name)) for name in 'ab']
    threading.Timer(0.05, policy.gate.set).start()
    batcher.close()
    assert all(future.done() for future in futures) and not batcher.is_running
    with pytest.raises(RuntimeError):
        batcher.submit(asked('c')).result(PATIENCE_S)
