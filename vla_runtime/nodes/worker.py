"""One thread that works off the newest job, so that no callback ever waits for an inference.

Invariants:
- one job waits at most: a newer one replaces it;
- a job that cannot be done yet keeps waiting, and is tried again when `poke`d or after `poll_s`;
- `stop` returns when the job in progress is over, or says that it hangs; nothing is attempted
  after it;
- an exception ends its job, never the thread.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Thread
from typing import Generic, TypeVar

Job = TypeVar('Job')


class LatestJobWorker(Generic[Job]):
    """Runs `attempt` on the newest job in a thread of its own.

    Args:
        attempt: does a job; returns False when it must wait for something.
        on_error: called with an exception that `attempt` raised, in the worker's thread.
        poll_s: steady seconds after which a waiting job is tried again without a poke.
    """

    def __init__(
        self,
        attempt: Callable[[Job], bool],
        on_error: Callable[[Exception], None],
        *,
        poll_s: float,
        name: str,
    ) -> None:
        self._attempt = attempt
        self._on_error = on_error
        self._poll_s = poll_s
        self._changed = Condition()
        self._waiting: Job | None = None
        self._pokes = 0
        self._stopping = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run this job next; it replaces one that waits."""
        with self._changed:
            self._waiting = job
            self._changed.notify()

    def poke(self) -> None:
        if self._waiting is None:
            return
        with self._changed:
            self._pokes += 1
            self._changed.notify()

    def drop(self) -> None:
        with self._changed:
            self._waiting = None

    def stop(self, timeout_s: float | None = None) -> None:
        """Drop the waiting job, finish the one in progress, end the thread.

        Args:
            timeout_s: longest wait; None: for ever.

        Raises:
            TimeoutError: it is not over; if it ever ends, it is still the last.
        """
        with self._changed:
            self._waiting = None
            self._stopping = True
            self._changed.notify()
        join_thread(self._thread, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                job, pokes = self._waiting, self._pokes
                assert job is not None
            done = self._try(job)
            with self._changed:
                # `_waiting` is another job when a newer one came, and None when it was dropped.
                if done and self._waiting is job:
                    self._waiting = None
                elif self._waiting is job and self._pokes == pokes and not self._stopping:
                    self._changed.wait(self._poll_s)

    def _try(self, job: Job) -> bool:
        try:
            return self._attempt(job)
        except Exception as error:
            self._on_error(error)
            return True


def join_thread(thread: Thread, timeout_s: float | None) -> None:
    """Return when a thread has ended; TimeoutError where it has not within the time-out."""
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError(
            f"the thread '{thread.name}' hangs: it has not ended within {timeout_s:g} s"
        )
