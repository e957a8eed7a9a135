"""Steps of a self-test: each is named as it begins, and as it passes or fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from vla_runtime.engines.cuda_driver import CudaError

State = Literal['passed', 'failed', 'skipped']


@dataclass(frozen=True)
class Step:
    """One step that was tried: `passed`, `failed` or `skipped`.

    `detail`: finding or reason; `mend`: remedy, empty where the reason names it.
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

    `begin` gets a step's name before it runs, which may end the process. `context_lost`: a step
    cost the CUDA context; later ones make no sense.
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
        """Run a step; `work` returns its finding for people, and raises where it fails.

        `mend`: remedy where the error names none, and no CUDA context was lost. Raises
        StepFailedError.
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


MEND = (
    'nothing more is compared: the CUDA context is lost, with this step or one before, and all '
    'that follows on it fails; try each family in a run of its own (--family)'
)
# CUDA's texts of the errors that `CudaError.context_lost` knows by code. PyTorch's errors have them
# behind `CUDA error: `, TensorRT's in brackets.
_TEXTS = (
    'an illegal instruction was encountered',
    'an illegal memory access was encountered',
    'context is destroyed',
    'device-side assert triggered',
    'hardware stack error',
    'invalid program counter',
    'misaligned address',
    'operation not supported on global/shared address space',
    'the launch timed out and was terminated',
    'uncorrectable ECC error encountered',
    'unknown error',
    'unspecified launch failure',
)


def lost_context(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, has cost the context."""
    while error is not None:
        if isinstance(error, CudaError) and error.context_lost:
            return True
        message = str(error)
        if isinstance(error, RuntimeError) and any(
            f'CUDA error: {text}' in message or f'({text})' in message for text in _TEXTS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
