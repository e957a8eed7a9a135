"""Steps of a self-test: each is named as it begins, and as it passes or fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from vla_runtime.selftest.lost_context import MEND, lost_context

State = Literal['passed', 'failed', 'skipped']


@dataclass(frozen=True)
class Step:
    """One step that was tried.

    Attributes:
        name: name of what was tried.
        state: `passed`, `failed` or `skipped`.
        detail: finding, or the reason.
        mend: remedy of a failed step; empty where the reason names it.
        seconds: duration of the step.
    """

    name: str
    state: State
    detail: str
    mend: str
    seconds: float


class StepFailedError(Exception):
    """A step failed and is recorded; later steps of its kind make no sense."""


class Steps:
    """Runs steps and keeps their results.

    Args:
        begin: called with a step's name before it runs. A step may end the process (a library that
            crashes); the name is then the last that was shown.
        end: called with each finished step.

    Attributes:
        done: finished steps.
        context_lost: a step has cost the CUDA context; what follows on it makes no sense.
    """

    def __init__(self, begin: Callable[[str], None], end: Callable[[Step], None]) -> None:
        self._begin, self._end = begin, end
        self.done: list[Step] = []
        self.context_lost = False

    @property
    def failed(self) -> list[Step]:
        return [step for step in self.done if step.state == 'failed']

    def run(
        self, name: str, work: Callable[[], str], mend: str | Callable[[Exception], str] = ''
    ) -> None:
        """Run a step; `work` returns what it found, for people.

        Args:
            name: name of the step.
            work: raises where the step fails.
            mend: remedy where the error does not say so itself; may depend on the error. A lost
                CUDA context has its own.

        Raises:
            StepFailedError: it failed.
        """
        self._begin(name)
        start = perf_counter()
        try:
            detail = work()
        except Exception as error:
            kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
            advice = mend if isinstance(mend, str) else mend(error)
            if lost_context(error):
                advice, self.context_lost = MEND, True
            self._finish(name, 'failed', f'{kind}{error}', advice, start)
            raise StepFailedError(name) from error
        self._finish(name, 'passed', detail, '', start)

    def fail(self, name: str, error: Exception) -> None:
        """Record a failed step that is not shown where it passes."""

        def fail() -> str:
            raise error

        with suppress(StepFailedError):
            self.run(name, fail)

    def skip(self, name: str, reason: str) -> None:
        """Record a step that is not for this machine."""
        self._begin(name)
        self._finish(name, 'skipped', reason, '', perf_counter())

    def _finish(self, name: str, state: State, detail: str, mend: str, start: float) -> None:
        self.done.append(Step(name, state, detail, mend, round(perf_counter() - start, 3)))
        self._end(self.done[-1])
