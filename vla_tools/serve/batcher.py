"""Requests of several robots to one policy, run together by the one thread that owns its engine.

Invariants:
- the policy is called by this thread alone, from its first request to `close`;
- requests run in the order in which they came: with at most `most` robots nobody waits longer than
  for the batch that is running and its own;
- a batch begins once it is full, every robot is in it, or its oldest request has waited `wait_s`;
- one request's fault is in its own future.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from vla_runtime.inference.chunk_policy import Inference
from vla_runtime.inference.sessions import Request
from vla_runtime.policy import Policy

logger = logging.getLogger(__name__)
T = TypeVar('T')


@dataclass(frozen=True)
class Batched:
    """An inference, and what it waited for.

    Attributes:
        wait_ms: from `submit` to the start of its batch.
        run_ms: of its batch, from start to end.
    """

    inference: Inference
    wait_ms: float
    run_ms: float


@dataclass(frozen=True)
class _Waiting:
    make: Callable[[], Request]
    future: Future[Batched]
    came_s: float


class Batcher:
    """Queue and thread of one policy.

    Args:
        most: requests of a batch; 1: one after the other.
        wait_s: time for which a request waits for others.
        robots: number of robots that may ask.
    """

    def __init__(
        self, policy: Policy, most: int, wait_s: float, robots: Callable[[], int] = lambda: 1
    ) -> None:
        self._policy, self._most, self._wait_s = policy, most, wait_s
        self._robots = robots
        self._waiting: deque[_Waiting] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name='policy')
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def queued(self) -> int:
        """Requests that wait for a batch."""
        return len(self._waiting)

    def submit(self, make: Callable[[], Request]) -> Future[Batched]:
        """Queue a request; after `close` its future has a RuntimeError.

        Args:
            make: returns the request; called by the engine's thread, so it may open a session.
        """
        future: Future[Batched] = _started()
        self._put(lambda: self._waiting.append(_Waiting(make, future, time.monotonic())), future)
        return future

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something on the engine's thread between two batches."""
        future: Future[T] = _started()
        self._put(lambda: self._calls.append((work, future)), future)
        return future

    def _put(self, append: Callable[[], None], future: Future[Any]) -> None:
        with self._changed:
            if not self.is_running:
                future.set_exception(RuntimeError('the policy was closed'))
                return
            append()
            self._changed.notify()

    def close(self) -> None:
        """Run what is queued, close the policy, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            self._policy.close()

    def _step(self) -> bool:
        """Run what is due; False at the end."""
        with self._changed:
            while not (self._calls or self._waiting or self._closing):
                self._changed.wait()
            calls = list(self._calls)
            self._calls.clear()
            batch = [] if calls else self._take_batch()
        for work, future in calls:
            _settle(future, work)
        if batch:
            self._run_batch(batch)
        return bool(calls or batch or not self._closing)

    def _take_batch(self) -> list[_Waiting]:
        if not self._waiting:
            return []
        until_s = self._waiting[0].came_s + self._wait_s
        while not self._closing and not self._calls:
            enough = min(self._most, max(1, self._robots()))
            left_s = until_s - time.monotonic()
            if len(self._waiting) >= enough or left_s <= 0:
                break
            self._changed.wait(left_s)
        count = min(self._most, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def _run_batch(self, batch: list[_Waiting]) -> None:
        start_s = time.monotonic()
        requests: list[Request] = []
        asked: list[_Waiting] = []
        later: list[_Waiting] = []
        for one in batch:
            try:
                request = one.make()
            except Exception as error:
                one.future.set_exception(error)
                continue
            if any(request.session is other.session for other in requests):
                # A robot that came back while its last request was waiting.
                later.append(one)
                continue
            requests.append(request)
            asked.append(one)
        with self._changed:
            self._waiting.extendleft(reversed(later))
        if not requests:
            return
        try:
            futures = self._policy.submit_batch(requests)
        except Exception as error:
            for one in asked:
                one.future.set_exception(error)
            return
        run_ms = (time.monotonic() - start_s) * 1e3
        for one, future in zip(asked, futures, strict=True):
            wait_ms = (start_s - one.came_s) * 1e3
            fault = future.exception()
            if fault is not None:
                one.future.set_exception(fault)
            else:
                one.future.set_result(Batched(future.result(), wait_ms, run_ms))


def _started() -> Future[Any]:
    """Return a future that nobody can cancel: its answer has a place even if who asked has gone."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
