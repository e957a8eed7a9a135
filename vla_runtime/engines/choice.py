"""Choice of backend and precision that the user leaves open: `backend: auto`, `precision: auto`.

Invariants:
- only a candidate is chosen (`engines.candidates`);
- the receipt is that of the ONNX files: PyTorch in its precision also has to give the chunks of the
  recorded cases here, because it may round elsewhere (convolutions do);
- candidates stand in a fixed order, and a later one is chosen only where it is faster by a margin,
  so that noise in a measurement does not choose;
- fewer bits have to win: a candidate is faster by the margin than every one of more bits, or not
  chosen;
- a choice that was measured is remembered on this machine (`engines.remembered_choices`).
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from vla_runtime.bundle.folder import Bundle
from vla_runtime.engines.candidates import (
    Candidate,
    candidates,
    reduced_precisions,
    rests_on_onnx_receipt,
)
from vla_runtime.engines.free_memory import available_host_bytes
from vla_runtime.engines.preflight import AUTO
from vla_runtime.engines.remembered_choices import (
    Choice,
    choice_key,
    remember_choices,
    remembered_choices,
)

logger = logging.getLogger(__name__)

Loaded = TypeVar('Loaded')

# A candidate further down the order must need less than this share of the time of the one above,
# and one of fewer bits less than this share of the time of each of more.
_MARGIN = 0.9
_BITS = {'float32': 32, 'float16': 16, 'bfloat16': 16, 'fp8': 8, 'int8': 8, 'nvfp4': 4}
# Bundles with larger weights are not loaded once per candidate, and neither are those that would
# need more of the free memory, for a copy in float32 and what loading takes: the order decides.
MOST_MEASURED_BYTES = 4_000_000_000
_TIMES_WEIGHTS = 3
# What loading a candidate, or running it once, may end with: refused, out of memory (PyTorch's is a
# RuntimeError), a driver or a file that is missing, a package that is installed and broken.
CANNOT_RUN = (ValueError, RuntimeError, MemoryError, OSError, ImportError)


def load_chosen(
    bundle: Bundle,
    backend: str,
    device: str,
    precision: str,
    threads: int,
    settings: Mapping[str, object],
    *,
    load: Callable[[Candidate], Loaded],
    check: Callable[[Loaded], None],
    measure: Callable[[Loaded], float],
) -> tuple[Loaded, str]:
    """Load the candidate that `choose` takes, or the next that can run; also return why.

    Args:
        bundle: the checked bundle.
        backend: one of `preflight.BACKENDS`, or `auto`.
        device: device that they would run on.
        precision: requested precision, or `auto`; backend or precision is `auto`.
        threads: CPU threads of each network.
        settings: values by name of the settings that a backend may refuse or that change its time.
        load: function that loads a candidate; an error of CANNOT_RUN where it cannot run.
        check: function that refuses a loaded candidate that gives other numbers than the recorded
            cases have, and closes it (ValueError).
        measure: function that returns the milliseconds of an inference of a loaded candidate, which
            it closes.

    Raises:
        ValueError: nothing may run this bundle here.
        Exception: none of the candidates can run; the error of the first.
    """
    found = candidates(bundle, backend, device, precision)

    def load_checked(candidate: Candidate) -> Loaded:
        loaded = load(candidate)
        # A precision that was named outright is the user's choice, 8 bits were judged.
        if precision == AUTO and rests_on_onnx_receipt(candidate):
            check(loaded)
        return loaded

    choice = choose(
        bundle, found, device, threads, settings, lambda one: measure(load_checked(one))
    )
    chosen = Candidate(choice.backend, choice.precision)
    reasons, failed = [choice.why], []
    for candidate in [chosen, *(one for one in found if one != chosen)]:
        known = choice.measured and candidate == chosen
        try:
            loaded = (load if known else load_checked)(candidate)
        except CANNOT_RUN as error:
            _free_frames(error)
            failed.append(error)
            reasons.append(f'{candidate} cannot: {error}')
            continue
        refused = reduced_precisions(bundle, device) if precision == AUTO else {}
        reasons += [f'{one} is left out: {why}' for one, why in refused.items() if why]
        return loaded, '; '.join(reasons)
    raise failed[0]


def choose(
    bundle: Bundle,
    found: Sequence[Candidate],
    device: str,
    threads: int,
    settings: Mapping[str, object],
    measure: Callable[[Candidate], float],
) -> Choice:
    """Choose among the candidates.

    Args:
        bundle: the checked bundle.
        found: candidates, the likely fastest first.
        device: device that they would run on.
        threads: CPU threads of each network.
        settings: values by name of the settings that a backend may refuse or that change its time.
        measure: function that returns the milliseconds of an inference with a candidate; an error
            of CANNOT_RUN where it cannot run.

    Raises:
        Exception: one of CANNOT_RUN; none of several can run; the error of the first.
    """
    first = found[0]
    if len(found) == 1:
        return Choice(first.backend, first.precision, 'nothing else may run this bundle here')
    size, free = bundle.weights_path.stat().st_size, available_host_bytes()
    if size > MOST_MEASURED_BYTES or (free is not None and _TIMES_WEIGHTS * size > free):
        return Choice(first.backend, first.precision, 'by order: too large to try each')
    key = choice_key(bundle, found, device, threads, settings)
    remembered = remembered_choices()
    if (known := remembered.get(key)) is not None:
        return known
    logger.info(
        '%s: trying what runs it fastest here, once for this machine: %s',
        bundle.folder,
        ', '.join(map(str, found)),
    )
    times, errors = _measured(found, measure)
    if not times:
        raise errors[first]
    best = _fastest(times)
    why = ', '.join(
        [f'{candidate} {milliseconds:.1f} ms' for candidate, milliseconds in times.items()]
        + [f'{candidate} cannot: {error}' for candidate, error in errors.items()]
    )
    choice = Choice(best.backend, best.precision, f'measured: {why}', measured=True)
    # Refusals are the same next time; memory or a driver may not be.
    if all(isinstance(error, ValueError) for error in errors.values()):
        remember_choices({**remembered, key: choice})
    return choice


def _fastest(times: Mapping[Candidate, float]) -> Candidate:
    """Return the fastest candidate, whose margin noise does not explain.

    Args:
        times: milliseconds, the likely fastest first.
    """
    worth = {
        candidate: milliseconds
        for candidate, milliseconds in times.items()
        if all(
            milliseconds < _MARGIN * other
            for one, other in times.items()
            if _BITS[one.precision] > _BITS[candidate.precision]
        )
    }
    best = next(iter(worth))
    for candidate, milliseconds in worth.items():
        if milliseconds < _MARGIN * worth[best]:
            best = candidate
    return best


def _measured(
    found: Sequence[Candidate], measure: Callable[[Candidate], float]
) -> tuple[dict[Candidate, float], dict[Candidate, Exception]]:
    times: dict[Candidate, float] = {}
    errors: dict[Candidate, Exception] = {}
    for candidate in found:
        try:
            times[candidate] = measure(candidate)
        except CANNOT_RUN as error:
            _free_frames(error)
            errors[candidate] = error
    return times, errors


def _free_frames(error: BaseException | None) -> None:
    """Release objects held by an error's frames, above all the networks of a failed candidate."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    # An engine's graphs hold the engine, which is a cycle.
    gc.collect()
