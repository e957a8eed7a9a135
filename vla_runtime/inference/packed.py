"""Many requests at a time on a `tokens` head: each tick is one pass over all that are open.

An answer of K tokens takes K ticks, and K requests are open at most: the newest one's prompt and a
token of each older one are read in one pass (`models.base.packed_pass`). Invariants:
- answers come in the order in which requests went in, also those that end early;
- a request's tokens are those that it would get alone, whatever else is open;
- `flush` drops every open request: nothing of it is answered or read afterwards;
- an exception of one request goes to its own future; one of the engine to all that are open;
- while a request is open, only the pipeline's own thread uses the engine.
One other thread submits, drains and flushes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Condition, Thread
from time import perf_counter
from typing import Generic, TypeVar

import numpy as np

from vla_runtime.engines.protocol import PackedEngine, TokenEngine
from vla_runtime.inference.prefix_cache import PrefixCache
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.types import CacheOutcome, CacheReport, Reuse

# Greedy decoding: the likeliest token each time, read back for the next, on any engine.

# Called with a token's index, the tokens so far (n,) int64 and its logits (vocabulary,).
TokenObserver = Callable[[int, np.ndarray, np.ndarray], None]


def write_answer(
    engine: TokenEngine, length: int, end: int | None, on_token: TokenObserver | None = None
) -> np.ndarray:
    """Write the answer to the prefix that the engine holds; of several prompt rows to the first.

    Args:
        engine: with its prefix selected.
        end: token that ends an answer; None: it has `length` tokens.

    Returns:
        (n,) int64 tokens, the end among them.

    Raises:
        ValueError: logits that are not finite, whose likeliest token means nothing.
    """
    engine.begin_answer()
    tokens: list[np.ndarray] = []
    while True:
        tokens.append(engine.next_token())
        logits = engine.read_logits()[0]
        if not np.isfinite(logits).all():
            raise not_finite()
        if on_token is not None:
            on_token(len(tokens) - 1, np.array([token[0] for token in tokens]), logits)
        if len(tokens) == length or tokens[-1][0] == end:
            return np.array([token[0] for token in tokens], dtype=np.int64)
        engine.read_token(tokens[-1], len(tokens) - 1)


def not_finite() -> ValueError:
    return ValueError(
        'the policy returned a logit that is not finite, so its tokens mean nothing; the chunk is '
        'refused. Check the weights (`vla_runtime info BUNDLE`) and the precision it runs in'
    )


Result = TypeVar('Result')
# Answers that a rate is counted over.
_COUNTED = 16


class DroppedError(ValueError):
    """A request that was dropped before its answer: a new episode, or another instruction."""


@dataclass(frozen=True)
class PackedAnswer:
    """Answer of a request, and the work that it took.

    Attributes:
        tokens: (n,) ids, the end among them.
        cache: outcomes for the images; the prefix is computed in the pass.
        runs: number of runs of `vision`, `prefix` and `expert`; a pass counts once for each
            request in it.
        ticks: passes from its own to its answer, the delay of an action in ticks.
        answers_per_s: rate of the last answers; None for the first.
    """

    request: ChunkRequest
    tokens: tuple[int, ...]
    cache: CacheReport
    runs: Mapping[str, int]
    ticks: int
    answers_per_s: float | None


@dataclass
class _Stage(Generic[Result]):
    """One open request."""

    request: ChunkRequest
    finish: Callable[[PackedAnswer], Result]
    future: Future[Result]
    slot: int = -1
    cache: CacheReport | None = None
    views: int = 0
    tokens: list[int] = field(default_factory=list)
    ticks: int = 0
    done: bool = False


class PackedPipeline(Generic[Result]):
    """Run the requests of one policy packed, on an engine with the feature `packed`.

    `length` is K, `end` the token that ends an answer; of the cache the images are used.
    """

    def __init__(
        self, engine: PackedEngine, cache: PrefixCache, length: int, end: int | None
    ) -> None:
        self._engine, self._cache = engine, cache
        self._length, self._end = length, end
        self._changed = Condition()
        self._waiting: deque[_Stage[Result]] = deque()
        self._open: deque[_Stage[Result]] = deque()
        self._instruction: str | None = None
        self._tick = 0
        self._busy = False
        self._closed = False
        self._answered: deque[float] = deque(maxlen=_COUNTED)
        self._thread: Thread | None = None

    @property
    def has_room(self) -> bool:
        """True when a request would not wait."""
        return self._count < self._length

    @property
    def _count(self) -> int:
        return len(self._waiting) + len(self._open)

    def submit(
        self, request: ChunkRequest, finish: Callable[[PackedAnswer], Result]
    ) -> Future[Result]:
        """Queue a request; its prompt goes into the next tick. Waits while K are open.

        `finish` is called with the answer in the pipeline's thread. The future has what it returns
        or raises, or `DroppedError`.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            self._changed.wait_for(lambda: self._count < self._length)
            self._waiting.append(_Stage(_kept(request), finish, future))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = Thread(target=self._work, name='packed', daemon=True)
            self._thread.start()
        return future

    def turn_to(self, instruction: str) -> None:
        """Drop every request that is open for another instruction; the next ones are for this."""
        if instruction != self._instruction:
            self.flush('the instruction changed')
            self._instruction = instruction

    @property
    def is_warm(self) -> bool:
        """True where a tick would begin without a capture."""
        return not self._engine.captures_tick

    def warm_up(self, request: ChunkRequest) -> None:
        """Run a tick with this request's prompt and one without, and drop it."""
        self.drain()
        self._cache.clear()
        (prefix,) = request.prefixes
        self._cache.encode_images(prefix, request.settings.cache)
        self._engine.tick(0, prefix.image_mask, prefix.rows)
        self._engine.tick(1 % self._length)
        self._engine.stage_tokens()
        self._cache.clear()

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._count and not self._busy)

    def flush(self, reason: str) -> None:
        """Drop every open request, and wait for the tick under way."""
        with self._changed:
            dropped = [*self._open, *self._waiting]
            self._open.clear()
            self._waiting.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy)
            self._answered.clear()
        for stage in dropped:
            stage.future.set_exception(DroppedError(f'a request was dropped: {reason}'))

    def close(self) -> None:
        self.flush('the policy was closed')
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._count or self._closed)
                if self._closed:
                    return
                newest = self._waiting.popleft() if self._waiting else None
                if newest is not None:
                    self._open.append(newest)
                stages = list(self._open)
                self._busy = True
            try:
                failure = self._run(newest, stages)
                self._answer(stages, failure)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _run(
        self, newest: _Stage[Result] | None, stages: list[_Stage[Result]]
    ) -> BaseException | None:
        """Run one tick; return what went wrong in the engine."""
        slot = self._tick % self._length
        self._tick += 1
        try:
            if newest is None:
                self._engine.tick(slot)
            else:
                newest.slot = slot
                self._encode(newest, slot)
            tokens = self._engine.stage_tokens()
        except BaseException as error:
            return error
        for stage in stages:
            stage.ticks += 1
            if not stage.done:
                stage.tokens.append(int(tokens[stage.slot]))
                broken = stage.tokens[-1] < 0
                full = len(stage.tokens) == self._length
                stage.done = full or broken or stage.tokens[-1] == self._end
                stage.request.clock.mark('denoise')
        return None

    def _encode(self, stage: _Stage[Result], slot: int) -> None:
        request = stage.request
        (prefix,) = request.prefixes
        request.clock.mark('wait')
        before = self._cache.runs['vision']
        images = self._cache.encode_images(prefix, request.settings.cache)
        stage.views = self._cache.runs['vision'] - before
        stage.cache = CacheReport(images, (CacheOutcome(Reuse.OFF),))
        self._engine.synchronize()
        request.clock.mark('vision')
        self._engine.tick(slot, prefix.image_mask, prefix.rows)

    def _answer(self, stages: list[_Stage[Result]], failure: BaseException | None) -> None:
        ready: list[_Stage[Result]] = []
        with self._changed:
            while self._open and (failure is not None or self._open[0].done):
                ready.append(self._open.popleft())
        for stage in ready:
            try:
                if failure is not None:
                    raise failure
                if stage.tokens[-1] < 0:
                    raise not_finite()
                result = stage.finish(self._answer_of(stage))
            except BaseException as error:
                stage.future.set_exception(error)
            else:
                stage.future.set_result(result)
        with self._changed:
            self._changed.notify_all()

    def _answer_of(self, stage: _Stage[Result]) -> PackedAnswer:
        assert stage.cache is not None
        self._answered.append(perf_counter())
        span = self._answered[-1] - self._answered[0]
        return PackedAnswer(
            stage.request,
            tuple(stage.tokens),
            stage.cache,
            {'vision': stage.views, 'prefix': 1, 'expert': len(stage.tokens) - 1},
            stage.ticks - 1,
            (len(self._answered) - 1) / span if span > 0 else None,
        )


def _kept(request: ChunkRequest) -> ChunkRequest:
    """Copy the images of a request that waits: the next observation is written over them."""
    (prefix,) = request.prefixes
    pixels = [np.array(image) for image in prefix.pixels]
    return replace(request, prefixes=(replace(prefix, pixels=pixels),))
