"""Two inferences at a time: the next request is encoded while the last one is denoised.

The encoding runs in the thread that submits, the denoising in the pipeline's own; on a GPU each has
its own stream. The stages share nothing but slots (`inference.runner`). Invariants:
- chunks come out in the order in which requests went in, equal to those of `latency`;
- while a request is encoded, at most one other is unfinished, and its slots are not written;
- an exception goes to the future of its own request and to no other;
- after `drain` nothing runs; after `close` nothing runs ever again.
One thread submits and drains, and it is never the pipeline's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from time import perf_counter
from typing import Generic, TypeVar

from vla_runtime.inference.denoise import StepObserver
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.inference.runner import ChunkRunner, DenoisedChunk, EncodedPrefix

Result = TypeVar('Result')
# Turns the networks' results and the overlap (ms) into the future's; runs in the pipeline's thread.
Finish = Callable[[EncodedPrefix, DenoisedChunk, float], Result]

# (start, end) on the clock of `perf_counter`, seconds.
_Span = tuple[float, float]


class ChunkPipeline(Generic[Result]):
    """Run requests on an engine with the feature `overlap`: one is encoded, one denoised."""

    def __init__(self, runner: ChunkRunner) -> None:
        self._runner = runner
        self._jobs: SimpleQueue[tuple[Callable[[], Result], Future[Result]] | None] = SimpleQueue()
        self._changed = Condition()
        self._unfinished: list[EncodedPrefix] = []
        self._unresolved = 0
        # Denoising span of the last chunk, to compare with the next one's encoding.
        self._denoising: _Span = (0.0, 0.0)
        self._thread: Thread | None = None

    @property
    def has_room(self) -> bool:
        """True when a request would be encoded at once."""
        return len(self._unfinished) <= 1

    def submit(
        self,
        request: ChunkRequest,
        finish: Finish[Result],
        on_step: StepObserver | None = None,
    ) -> Future[Result]:
        """Encode a request and queue it for denoising.

        Waits while two requests are unfinished. Serial guidance uses the slots of both, so such a
        request overlaps with no other.

        Args:
            request: its clock marks the runner's phases and `wait`: for room before encoding, and
                for the chunk before it after encoding.
            finish: called with the encoded prefix, the denoised chunk, and the milliseconds for
                which this encoding overlapped the denoising of the request before.
            on_step: see `inference.denoise.denoise`; called in the pipeline's thread.

        Returns:
            Future of what `finish` returns or raises, or of what the denoising raises; it is
            already running, so `cancel` returns False.
        """
        self._wait_for(0 if request.guidance == 'serial' else 1)
        with self._changed:
            held = self._unfinished[0].places if self._unfinished else ()
        if len(held) > 1:
            self._wait_for(0)
            held = ()
        start = perf_counter()
        request.clock.mark('wait')
        encoded = self._runner.encode(request, held)
        span = start, perf_counter()
        future: Future[Result] = Future()
        # Running from here on: an encoded request cannot be cancelled.
        future.set_running_or_notify_cancel()
        with self._changed:
            self._unfinished.append(encoded)
            self._unresolved += 1
        if self._thread is None:
            self._thread = Thread(target=self._work, name='denoising', daemon=True)
            self._thread.start()
        self._jobs.put((partial(self._denoise, encoded, span, finish, on_step), future))
        return future

    def drain(self) -> None:
        """Wait until every future is resolved and its callbacks have returned."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unresolved)

    def close(self) -> None:
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _wait_for(self, unfinished: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._unfinished) <= unfinished)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, future = job
            result: Result | None = None
            failure: BaseException | None = None
            try:
                result = run()
            except BaseException as error:
                failure = error
            # Make room first: whoever waits for the chunk may submit the next request at once.
            with self._changed:
                self._unfinished.pop(0)
                self._changed.notify_all()
            try:
                if failure is not None:
                    future.set_exception(failure)
                else:
                    future.set_result(result)  # type: ignore[arg-type]
            finally:
                with self._changed:
                    self._unresolved -= 1
                    self._changed.notify_all()

    def _denoise(
        self,
        encoded: EncodedPrefix,
        encoding: _Span,
        finish: Finish[Result],
        on_step: StepObserver | None,
    ) -> Result:
        encoded.request.clock.mark('wait')
        start = perf_counter()
        denoised = self._runner.denoise(encoded, on_step)
        before, self._denoising = self._denoising, (start, perf_counter())
        return finish(encoded, denoised, _overlap_ms(encoding, before))


def _overlap_ms(a: _Span, b: _Span) -> float:
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0])) * 1e3
