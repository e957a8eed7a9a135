"""Callbacks of TensorRT: the log, and the progress of a build.

TensorRT swallows Python exceptions. So what callbacks see is remembered, and raised by whoever
called TensorRT.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

# (what TensorRT is doing, steps done, steps in all); False stops the build.
Progress = Callable[[str, int, int], bool]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# 8.6 has no 64-bit integers and says so of every constant; our indices fit into 32.
_EXPECTED = ('does not natively support INT64', 'INT64 weights')
# Message in which a build of TensorRT for RTX lists what it compiled.
LAYERS = 'Layers:'


@cache
def logger_of(trt: Any) -> Any:
    """Return the one logger of a module's objects, which hands messages on and keeps errors."""
    severities = trt.ILogger.Severity
    levels = {
        severities.INTERNAL_ERROR: logging.ERROR,
        severities.ERROR: logging.ERROR,
        severities.WARNING: logging.WARNING,
        severities.INFO: logging.DEBUG,
    }

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            # What the last builds compiled, one message each.
            self.layers: list[str] = []
            self._warned: set[str] = set()

        def log(self, severity: Any, msg: str) -> None:
            level = levels.get(severity)
            if level is None:
                if msg.startswith(LAYERS):
                    self.layers.append(msg)
                return
            if level == logging.ERROR:
                self.errors = [*self.errors, msg][-3:]
                level = logging.DEBUG
            if level == logging.WARNING:
                if msg in self._warned:
                    level = logging.DEBUG
                elif any(part in msg for part in _EXPECTED):
                    level = logging.INFO
                self._warned.add(msg)
            logger.log(level, '%s', msg)

    return Logger()


class Interruption:
    """Signals that came while TensorRT ran."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def interrupts_remembered(*, insist: bool = False) -> Iterator[Interruption]:
    """Keep signal handlers from raising inside TensorRT's callbacks; run them after the block.

    With `insist` the second signal ends the process at once, where the block takes minutes: files
    appear complete or not at all. Changes nothing outside of the main thread.
    """
    seen = Interruption()

    def remember(number: int, frame: FrameType | None) -> None:
        if seen.signal is not None:
            return
        seen.signal = number
        if insist:
            # Not this handler: Python would run it only when TensorRT calls back.
            for one in before:
                signal.signal(one, signal.SIG_DFL)
            logger.warning(
                '%s: the build stops at its next step; once more ends it at once',
                signal.Signals(number).name,
            )

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))
        }
    for number in before:
        signal.signal(number, remember)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if seen.signal is not None:
            signal.raise_signal(seen.signal)


def make_monitor(trt: Any, progress: Progress | None, interruption: Interruption) -> Any:
    """Make TensorRT's progress monitor; a signal stops the build at its next step."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interrupted = False
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            self._steps[phase_name] = num_steps
            self._tell(phase_name, 0)

        def phase_finish(self, phase_name: str) -> None:
            self._tell(phase_name, self._steps.pop(phase_name, 0))

        def step_complete(self, phase_name: str, step: int) -> bool:
            return self._tell(phase_name, step + 1)

        def _tell(self, phase: str, step: int) -> bool:
            try:
                if interruption.signal is not None:
                    self.interrupted = True
                steps = self._steps.get(phase, step)
                if progress is not None and not self.interrupted:
                    self.interrupted = not progress(phase, step, steps)
            except KeyboardInterrupt:
                self.interrupted = True
            except Exception:
                logger.exception('the progress of a build could not be shown')
            return not self.interrupted

    return Monitor()
