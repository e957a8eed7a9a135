"""Choice of backend and precision that the user leaves open: `backend: auto`, `precision: auto`.

Invariants:
- the first of `engines.candidates` that can run here is chosen; whatever is left out is named,
  with the reason;
- nothing is timed and nothing is remembered (`vla_runtime bench --recommend` times them);
- the receipt is that of the ONNX files: PyTorch in its precision also has to give the chunks of
  the recorded cases here, because it may round elsewhere (convolutions do).
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import TypeVar

from vla_runtime.bundle.folder import Bundle
from vla_runtime.engines.candidates import (
    Candidate,
    candidates,
    reduced_precisions,
    rests_on_onnx_receipt,
    running_elsewhere,
)
from vla_runtime.engines.preflight import AUTO

Loaded = TypeVar('Loaded')

# What loading a candidate, or running it once, may end with: refused, out of memory (PyTorch's is a
# RuntimeError), a driver or a file that is missing, a package that is installed and broken.
CANNOT_RUN = (ValueError, RuntimeError, MemoryError, OSError, ImportError)


def load_chosen(
    bundle: Bundle,
    backend: str,
    device: str,
    precision: str,
    *,
    load: Callable[[Candidate], Loaded],
    check: Callable[[Loaded], None],
) -> tuple[Loaded, str]:
    """Load the first candidate that can run; also return why, with what was left out.

    Args:
        backend, precision: one of them is `auto`.
        load: loads a candidate; an error of CANNOT_RUN where it cannot run.
        check: refuses a loaded candidate that gives other numbers than the recorded cases have, and
            closes it (ValueError).

    Raises:
        ValueError: nothing may run this bundle here.
        Exception: none of the candidates can run; the error of the first.
    """
    found = candidates(bundle, backend, device, precision)
    reasons, failed = [], []
    for candidate in found:
        try:
            loaded = load(candidate)
            # A precision that was named outright is the user's choice, 8 bits were judged.
            if precision == AUTO and rests_on_onnx_receipt(candidate):
                check(loaded)
        except CANNOT_RUN as error:
            _free_frames(error)
            failed.append(error)
            reasons.append(f'{candidate} cannot: {error}')
            continue
        left_out = reduced_precisions(bundle, device) if precision == AUTO else {}
        if backend == AUTO:
            elsewhere = running_elsewhere(bundle, device, precision)
            left_out |= dict.fromkeys(elsewhere, f"it does not run on device '{device}'")
        reasons += [f'{one} is left out: {why}' for one, why in left_out.items() if why]
        first = 'nothing else may run this bundle here'
        if len(found) > 1:
            first = f'{candidate} is the first in order that can run here'
        return loaded, '; '.join([first, *reasons])
    raise failed[0]


def _free_frames(error: BaseException | None) -> None:
    """Release objects held by an error's frames, above all the networks of a failed candidate."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    # An engine's graphs hold the engine, which is a cycle.
    gc.collect()
