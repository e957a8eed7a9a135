"""Backends and precisions that may run a bundle here, in a fixed order.

On a GPU: TensorRT engines, PyTorch, ONNX files. On a CPU: ONNX files in float32 or int8, PyTorch,
ONNX files in 16 bits. PyTorch in the receipt's 16 bits comes before float32. A precision below
float32 needs a receipt; 8 and 4 bits need judged closed-loop success (`bundle.success`), and 16
bits must not have lost it: with the backend itself, or with another where nobody judged this one.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.onnx_files import QUANTISED, graph_path
from vla_runtime.bundle.schema import VERIFICATION_FILE
from vla_runtime.bundle.success import is_judged, success_fault
from vla_runtime.engines.devices import accepts_device, check_int8, multiplies_bfloat16
from vla_runtime.engines.preflight import AUTO, BACKENDS
from vla_runtime.files.json_file import JsonError, JsonMapping, read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A backend and a precision that may run a bundle."""

    backend: str
    precision: str

    def __str__(self) -> str:
        return f'{self.backend} in {self.precision}'


# ONNX files in 8 bits on a CPU.
INT8 = Candidate('onnxruntime', 'int8')
# Of ONNX files for TensorRT, which ONNX Runtime emulates.
_FLOATS_OF_FILES = ('fp8', 'nvfp4')
_HALVES = ('bfloat16', 'float16')


def candidates(bundle: Bundle, backend: str, device: str, precision: str) -> list[Candidate]:
    """Candidates that may run a bundle, in order; what is not installed here is among them.

    Raises:
        ValueError: nothing is left; says why.
    """
    receipt = _receipt_precision(bundle)
    refused = reduced_precisions(bundle, device) if precision == AUTO else {}
    of_files = [
        candidate
        for candidate in _of_files(bundle, receipt, device)
        if not refused.get(candidate) and not refused.get(INT8)
    ]
    before = [one for one in of_files if _comes_before_torch(one, device)]
    found = [
        *before,
        *_of_torch(receipt, precision, refused),
        *(one for one in of_files if one not in before),
    ]
    if backend not in (AUTO, *(candidate.backend for candidate in found)):
        if refusal := refused.get(Candidate(backend, str(receipt))) or refused.get(INT8):
            raise ValueError(
                f"{bundle.folder}: precision 'auto' does not take its {receipt} files: {refusal}; "
                f"name precision '{receipt}' to run them all the same"
            )
        # Its own checks say what is missing.
        found.append(Candidate(backend, receipt or 'float32'))
    fitting = [
        candidate
        for candidate in found
        if backend in (AUTO, candidate.backend)
        and precision in (AUTO, candidate.precision)
        and (backend != AUTO or accepts_device(device, candidate.backend))
    ]
    if not fitting:
        raise ValueError(
            f"{bundle.folder}: backend '{backend}' with precision '{precision}' on '{device}' "
            f'leaves nothing that may run this policy (its ONNX files: {receipt or "none"}); '
            f'{_remedy(bundle, backend, precision, receipt)}'
        )
    return fitting


def running_elsewhere(bundle: Bundle, device: str, precision: str) -> list[Candidate]:
    """Return what the bundle has files for that run on no device of this name."""
    return [
        one
        for one in _of_files(bundle, _receipt_precision(bundle), device)
        if precision in (AUTO, one.precision) and not accepts_device(device, one.backend)
    ]


def _comes_before_torch(candidate: Candidate, device: str) -> bool:
    # ONNX Runtime emulates 16 bits on a CPU, and on a GPU captures no graphs.
    return candidate.backend == 'tensorrt' or (
        device == 'cpu' and candidate.precision not in _HALVES
    )


def _remedy(bundle: Bundle, backend: str, precision: str, receipt: str | None) -> str:
    if precision in QUANTISED and precision != receipt:
        return (
            f'only ONNX files in {precision} run in it: vla_runtime export {bundle.folder} --out '
            f'NEW_BUNDLE --onnx-precision {precision} --calibration RECORDING'
        )
    if backend == 'torch' and precision in QUANTISED:
        return "PyTorch does not run in it: leave the backend at 'auto', or name another"
    return (
        "install PyTorch, export ONNX files ('vla_runtime export'), or name backend and precision"
    )


def reduced_precisions(bundle: Bundle, device: str) -> dict[Candidate, str]:
    """Return the candidates below float32 that could run here, each with why `auto` skips it."""
    could_run = []
    receipt = _receipt_precision(bundle)
    if receipt == INT8.precision:
        could_run.append(INT8)
    if receipt in _FLOATS_OF_FILES:
        could_run += [Candidate(backend, receipt) for backend in ('tensorrt', 'onnxruntime')]
    if _is_faster_reduced(receipt, device):
        could_run.append(Candidate('torch', str(receipt)))
    if receipt in _HALVES:
        could_run += [
            candidate
            for candidate in _of_files(bundle, receipt, device)
            if accepts_device(device, candidate.backend)
        ]
    return {candidate: _refusal(bundle, candidate, device) for candidate in could_run}


def _refusal(bundle: Bundle, candidate: Candidate, device: str) -> str:
    """Return why `auto` leaves a reduced precision alone; empty where it may take it."""
    try:
        if candidate == INT8:
            if device != 'cpu':
                return f"its files are for the CPU, not for device '{device}'"
            check_int8()
        elif candidate.backend == 'onnxruntime' and candidate.precision in _FLOATS_OF_FILES:
            return 'a CPU only emulates it'
        elif candidate.precision in _HALVES:
            return _lost_success(bundle, candidate)
        return success_fault(bundle, candidate.backend, candidate.precision)
    except ValueError as error:
        return str(error)


def _lost_success(bundle: Bundle, candidate: Candidate) -> str:
    """Return what judged success says against 16 bits; empty where nobody judged them."""
    precision = candidate.precision
    if is_judged(bundle, candidate.backend, precision):
        return success_fault(bundle, candidate.backend, precision)
    for other in BACKENDS:
        judged = is_judged(bundle, other, precision)
        if judged and (fault := success_fault(bundle, other, precision)):
            return f'judged with {other}, and not with {candidate.backend}: {fault}'
    return ''


def rests_on_onnx_receipt(candidate: Candidate) -> bool:
    """Return whether a candidate rests on the receipt of files that it does not run."""
    return candidate.backend == 'torch' and candidate.precision in _HALVES


def _of_torch(
    receipt: str | None, precision: str, refused: Mapping[Candidate, str]
) -> list[Candidate]:
    if precision in QUANTISED:
        return []
    if precision != AUTO:
        # Named outright: it is the user's choice.
        return [Candidate('torch', precision)]
    reduced = Candidate('torch', str(receipt))
    accepted = [reduced] if refused.get(reduced) == '' else []
    return [*accepted, Candidate('torch', 'float32')]


def _of_files(bundle: Bundle, receipt: str | None, device: str) -> list[Candidate]:
    if not receipt:
        return []
    found = []
    if any(bundle.engines_folder.glob(f'*-trt*/{VERIFICATION_FILE}')):
        found.append(Candidate('tensorrt', receipt))
    # ONNX Runtime has no bfloat16 products on a CPU.
    unusable = receipt == 'bfloat16' and device == 'cpu'
    if not unusable and graph_path(bundle.folder, 'vision').is_file():
        found.append(Candidate('onnxruntime', receipt))
    return found


def _receipt_precision(bundle: Bundle) -> str | None:
    receipt = _receipt(bundle)
    return None if receipt is None else str(receipt.get('precision', str))


def _receipt(bundle: Bundle) -> JsonMapping | None:
    """The bundle's receipt of its ONNX files; None without one that has their precision."""
    path = bundle.folder / VERIFICATION_FILE
    if VERIFICATION_FILE not in bundle.spec.files:
        return None
    try:
        document = read_json(path)
        if 'onnx' not in document:
            return None
        receipt = document.mapping('onnx')
        receipt.get('precision', str)
        return receipt
    except JsonError as error:
        logger.warning('%s', error)
        return None


def _is_faster_reduced(receipt: str | None, device: str) -> bool:
    if receipt == 'bfloat16':
        return device != 'cpu' or multiplies_bfloat16()
    # A CPU emulates float16.
    return receipt == 'float16' and device != 'cpu'


# --- Choice of backend and precision that the user leaves open: `backend: auto`, `precision: auto


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
