"""Processes that end with this one, on Linux however it ends, and that no Ctrl-C reaches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from vla_runtime.processes.parent_death import die_with

Submit = Callable[..., 'Future[Any]']
# Opens workers.
Pool = Callable[[], AbstractContextManager[Submit]]

# Time in which an executor ends by itself when its workers have ended.
_CLOSING_S = 2.0


@contextmanager
def workers(count: int) -> Iterator[Submit]:
    """Yield a function that runs another in one of several processes, like `Executor.submit`.

    The end of the block waits for what was submitted. An exception in it, Ctrl-C too, ends the
    processes wherever they are. They are spawned, not forked: neither a rendering context nor
    PyTorch's threads survive a fork.

    Raises:
        ChildProcessError: one of them was killed from outside.
    """
    context = multiprocessing.get_context('spawn')
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        count, mp_context=context, initializer=die_with, initargs=(os.getpid(),)
    )

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        with _ctrl_c_waits():
            try:
                return executor.submit(function, *arguments)
            except (OSError, ValueError):
                # A worker that dies has its queue closed, perhaps while another one is started
                # that inherits it.
                if getattr(executor, '_broken', False):
                    raise BrokenProcessPool from None
                raise

    try:
        yield submit
    except BaseException as error:
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        _free_the_feeder(executor)
        executor.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise ChildProcessError(
                'a worker process was killed from outside, where memory is short for example; '
                'the same command goes on where it was'
            ) from None
        raise
    executor.shutdown()


def _free_the_feeder(executor: ProcessPoolExecutor) -> None:
    """Let an executor end whose workers were ended and whose queue is still being sent."""
    manager = getattr(executor, '_executor_manager_thread', None)
    if manager is None:
        return
    manager.join(_CLOSING_S)
    if manager.is_alive():
        with suppress(OSError):
            executor._call_queue._reader.close()  # type: ignore[attr-defined]


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Delay a Ctrl-C until the block is done, and keep it from processes started in it.

    A process whose start is interrupted reads the end of a file and says so with a traceback.
    """
    # Inherited by the processes: a terminal sends Ctrl-C to every one.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Another thread of this process takes the signal in place of a blocked one, and Python then
    # interrupts the main thread all the same.
    handled_here = threading.current_thread() is threading.main_thread()
    held_back: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    if handled_here:
        signal.signal(signal.SIGINT, lambda number, _: held_back.append(number))
    try:
        yield
    finally:
        if handled_here:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if held_back:
            signal.raise_signal(signal.SIGINT)
