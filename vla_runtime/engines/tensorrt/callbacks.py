"""Callbacks of TensorRT: the log, and the progress of a build."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

# (what TensorRT is doing, steps done, steps in all); False stops the build.
Progress = Callable[[str, int, int], bool]


@cache
def logger_of(trt: Any) -> Any:
    """Return a logger that hands messages to Python's and keeps the errors.

    One for all objects of a module: TensorRT warns where it is given several.
    """
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

        def log(self, severity: Any, msg: str) -> None:
            level = levels.get(severity)
            if level == logging.ERROR:
                self.errors = [*self.errors, msg][-3:]
            if level is not None:
                logger.log(logging.DEBUG if level == logging.ERROR else level, '%s', msg)

    return Logger()


def make_monitor(trt: Any, progress: Progress) -> Any:
    """Make TensorRT's progress monitor; Ctrl-C stops the build at its next step.

    TensorRT calls it from inside its own code, where no Python exception may pass.
    """

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
                if not self.interrupted and not progress(phase, step, self._steps.get(phase, step)):
                    self.interrupted = True
            except KeyboardInterrupt:
                self.interrupted = True
            except Exception:
                logger.exception('the progress of a build could not be shown')
            return not self.interrupted

    return Monitor()
