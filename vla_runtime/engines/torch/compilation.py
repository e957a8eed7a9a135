"""Choice between eager networks and compiled ones, at load.

`torch.compile` makes networks of plain modules; Triton has its own layers for some heads.

Invariants:
- a network is compiled for the shapes that it is run with by name; whatever has other shapes runs
  eagerly, and nothing is compiled after load;
- a compiled network runs only if it gave what the eager one gives, within the bounds of `verify`,
  in all its shapes;
- what cannot be compiled runs eagerly, and one warning says what is missing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol

import numpy as np
from torch import Tensor

from vla_runtime.engines.bounds import error_of
from vla_runtime.engines.preflight import AUTO
from vla_runtime.engines.torch.compiler import Run, remedy
from vla_runtime.engines.torch.cuda_graph import Capture, Work

logger = logging.getLogger(__name__)

Key = tuple[str, Hashable]
Outputs = Mapping[str, Tensor]
# `auto` takes a compiled network that needs less than this share of the eager one's time, so that
# noise in a measurement does not choose.
_MARGIN = 0.95
# Runs of each network that are timed, and how long it is gone on beyond the least number.
_LEAST_TRIALS, _MOST_TRIALS, _TRIALS_MS = 3, 50, 1000.0


class Runs(Protocol):
    """Registry of compiled replacements, by part."""

    def __setitem__(self, key: Key, run: Run, /) -> None: ...

    def __delitem__(self, key: Key, /) -> None: ...


@dataclass(frozen=True)
class Part:
    """A network in one shape.

    Attributes:
        key: name of the network, one of `torch_compile.NETWORKS`, and what tells its shapes apart.
        call: call of the plain modules, which is compiled.
        work: runs what stands under the key, else the eager network; reads and writes buffers of
            the engine.
        outputs: returns copies of what `work` wrote, by name.
    """

    key: Key
    call: Run
    work: Work
    outputs: Callable[[], Outputs]


@dataclass
class Verdict:
    """Findings about a network, all its shapes together.

    Attributes:
        network: name of the network.
        form: form of the network that may take the place of the eager one, in words.
        eager_ms, compiled_ms: milliseconds of one run in each shape.
        fault: reason why it must not run compiled; empty where it may.
        failure: the compiler's error.
    """

    network: str
    form: str = 'compiled'
    eager_ms: float = 0.0
    compiled_ms: float = 0.0
    fault: str = ''
    failure: str = ''

    def takes(self, word: str) -> bool:
        """Return whether it runs compiled; with `auto` only where that is faster."""
        return not self.fault and (word != AUTO or self.compiled_ms < _MARGIN * self.eager_ms)

    def describe(self, word: str) -> str:
        """Return which one runs, and why."""
        if self.fault:
            return f'{self.network} eager ({self.fault})'
        which = self.form if self.takes(word) else 'eager'
        times = f'eager {self.eager_ms:.2f} ms, {self.form} {self.compiled_ms:.2f} ms'
        return f'{self.network} {which} ({times})'


class Compilation:
    """Compiles parts of an engine, compares and times them.

    Args:
        parts: every shape of every network that may be compiled.
        runs: calls that run instead of the eager network, by key; empty until `choose`.
        compile_call: returns the compiled form of a network's call, given its name.
        bound: largest error, in units of the eager output's largest number where that is above 1.
        form: form of the network in words, as `Verdict.form`.
        inspect: looks closer at a part whose outputs are within the bound: returns what is wrong
            with it in the given form, else ''.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        runs: Runs,
        compile_call: Callable[[str, Run], Run],
        bound: float,
        form: str = 'compiled',
        inspect: Callable[[Part, Run], str] = lambda part, run: '',
    ) -> None:
        self._parts, self._runs = parts, runs
        self._compile_call, self._bound = compile_call, bound
        self._inspect = inspect
        self._made: dict[Key, Run] = {}
        self._verdicts = {part.key[0]: Verdict(part.key[0], form) for part in parts}

    def compare(self) -> None:
        """Compare all parts on the inputs that are in the buffers; the first time compiles them."""
        for part in self._parts:
            verdict = self._verdicts[part.key[0]]
            part.work()
            expected = part.outputs()
            if verdict.fault:
                continue
            try:
                error_found = largest_error(self._compiled_outputs(part), expected)
                if not error_found <= self._bound:
                    fault = f'differs by {error_found:.1e}, bound {self._bound:.0e}'
                else:
                    fault = self._inspect(part, self._made[part.key])
            except Exception as error:
                # Of any kind: compilers, drivers and torch's own tracing raise what they like.
                verdict.fault = 'cannot be compiled'
                verdict.failure = f'{type(error).__name__}: {error}'
                continue
            if fault:
                verdict.fault = f'{verdict.form} {fault}'

    def measure(self, capture: Capture | None, synchronize: Work) -> None:
        """Time all parts that may run compiled, on the inputs that are in the buffers.

        Args:
            capture: captures work as the engine will; None: the engine runs it as it is.
            synchronize: waits for the device.
        """
        for part in self._parts:
            verdict = self._verdicts[part.key[0]]
            if verdict.fault:
                continue
            try:
                eager, compiled = self._milliseconds(part, capture, synchronize)
            except RuntimeError as error:
                verdict.fault, verdict.failure = 'cannot be captured', str(error)
                continue
            verdict.eager_ms += eager
            verdict.compiled_ms += compiled

    def choose(self, word: str) -> tuple[list[str], str]:
        """Leave in `runs` what is to run, and seal it.

        Args:
            word: `auto`, or one that names networks.

        Returns:
            names of the networks that run compiled, and why, in words
        """
        verdicts = self._verdicts.values()
        failed = [verdict for verdict in verdicts if verdict.failure]
        if failed:
            logger.warning(
                'torch_compile: %s: %s, and runs eagerly; %s. %s',
                ', '.join(verdict.network for verdict in failed),
                failed[0].fault,
                remedy(failed[0].failure),
                failed[0].failure.strip()[:500],
            )
        for key, run in self._made.items():
            getattr(run, 'seal', lambda: None)()
            if self._verdicts[key[0]].takes(word):
                self._runs[key] = run
        taken = [verdict.network for verdict in verdicts if verdict.takes(word)]
        return taken, ', '.join(verdict.describe(word) for verdict in verdicts)

    def _compiled_outputs(self, part: Part) -> Outputs:
        if part.key not in self._made:
            self._made[part.key] = self._compile_call(part.key[0], part.call)
        with self._compiled(part):
            part.work()
            return part.outputs()

    @contextmanager
    def _compiled(self, part: Part) -> Iterator[None]:
        self._runs[part.key] = self._made[part.key]
        try:
            yield
        finally:
            del self._runs[part.key]

    def _milliseconds(
        self, part: Part, capture: Capture | None, synchronize: Work
    ) -> tuple[float, float]:
        """Median milliseconds of the eager and of the compiled network, run by turns."""

        def compiled() -> None:
            with self._compiled(part):
                part.work()

        works = [capture(work) if capture else work for work in (part.work, compiled)]
        times: list[list[float]] = [[] for _ in works]
        while len(times[0]) < _LEAST_TRIALS or (
            len(times[0]) < _MOST_TRIALS and sum(map(sum, times)) < _TRIALS_MS
        ):
            for work, found in zip(works, times, strict=True):
                synchronize()
                start = perf_counter()
                work()
                synchronize()
                found.append((perf_counter() - start) * 1e3)
        eager, of_compiled = map(median, times)
        return eager, of_compiled


def largest_error(found: Outputs, expected: Outputs) -> float:
    """Return the largest error of any tensor; infinite where masks differ or a number is NaN."""
    errors = [0.0]
    for name, reference in expected.items():
        error, _ = error_of(_array(found[name]), _array(reference))
        # A mask is right or wrong, and NaN is no error that could be compared.
        wrong = error > 0.0 if not reference.is_floating_point() else math.isnan(error)
        errors.append(math.inf if wrong else error)
    return max(errors)


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
    return array
