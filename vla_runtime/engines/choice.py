"""Choice of backend and precision that the user leaves open: `backend: auto`, `precision: auto`.

Invariants:
- a precision below float32 is chosen only where a receipt vouches for it, 8 bits only where
  closed-loop success was judged (`bundle.success`), 16 bits of PyTorch not where it was lost;
- the receipt is that of the ONNX files: PyTorch in its precision also has to give the chunks of the
  recorded cases here, because it may round elsewhere (ACT's convolutions do);
- candidates stand in a fixed order, and a later one is chosen only where it is faster by a margin,
  so that noise in a measurement does not choose;
- a choice that was measured is remembered on this machine, and made again where anything that it
  rests on has changed: bundle, candidates, threads, processor, versions.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from vla_runtime import __version__
from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.identity import spec_identity
from vla_runtime.bundle.schema import VERIFICATION_FILE
from vla_runtime.bundle.success import is_judged, success_fault
from vla_runtime.engines.cpu import check_int8, multiplies_bfloat16
from vla_runtime.engines.device_names import accepts_device
from vla_runtime.engines.free_memory import available_host_bytes
from vla_runtime.engines.onnx.files import graph_path
from vla_runtime.engines.preflight import (
    BACKENDS,
    PRECISIONS,
    fp8_refusal,
    gpu_name,
    missing_package,
)
from vla_runtime.files.cache_folder import cache_folder
from vla_runtime.files.json_file import JsonError, JsonMapping, read_json
from vla_runtime.files.machine import cpu_name
from vla_runtime.files.whole_files import write_text

logger = logging.getLogger(__name__)

Loaded = TypeVar('Loaded')

AUTO = 'auto'
# A candidate further down the order must need less than this share of the time of the one above.
_MARGIN = 0.9
# Bundles with larger weights are not loaded once per candidate, and neither are those that would
# need more of the free memory, for a copy in float32 and what loading takes: the order decides.
MOST_MEASURED_BYTES = 4_000_000_000
_TIMES_WEIGHTS = 3
# What loading a candidate, or running it once, may end with: refused, out of memory (PyTorch's is a
# RuntimeError), a driver or a file that is missing, a package that is installed and broken.
CANNOT_RUN = (ValueError, RuntimeError, MemoryError, OSError, ImportError)
_PACKAGES = ('torch', 'onnxruntime', 'onnxruntime-gpu', 'tensorrt')
_LARGEST_MEMORY = 200


@dataclass(frozen=True)
class Candidate:
    """A backend and a precision that may run a bundle."""

    backend: str
    precision: str

    def __str__(self) -> str:
        return f'{self.backend} in {self.precision}'


# In 8 bits: ONNX files on a CPU, and PyTorch on a GPU that multiplies them.
INT8, FP8 = Candidate('onnxruntime', 'int8'), Candidate('torch', 'fp8')


@dataclass(frozen=True)
class Choice:
    """The chosen candidate.

    Attributes:
        backend, precision: chosen.
        why: in words, with the times that decided.
        measured: it ran here, and was checked before.
    """

    backend: str
    precision: str
    why: str
    measured: bool = False


def candidates(bundle: Bundle, backend: str, device: str, precision: str) -> list[Candidate]:
    """Candidates that may run a bundle, the likely fastest first.

    Args:
        bundle: checked.
        backend: one of `BACKENDS`, or `auto`.
        device: as for `Policy.load`.
        precision: that was asked for, or `auto`.

    Raises:
        ValueError: nothing is left; says why.
    """
    receipt = _receipt_precision(bundle)
    refused = reduced_precisions(bundle, device) if precision == AUTO else {}
    found: list[Candidate] = []
    built = any(bundle.engines_folder.glob(f'*-trt*/{VERIFICATION_FILE}'))
    if receipt and built and not refused.get(INT8):
        found.append(Candidate('tensorrt', receipt))
    if precision != AUTO:
        # Named outright: the user vouches for it.
        if precision != 'int8':
            found.append(Candidate('torch', precision))
    else:
        if refused.get(FP8) == '':
            found.append(FP8)
        half = Candidate('torch', str(receipt))
        if refused.get(half) == '':
            found.append(half)
        found.append(Candidate('torch', 'float32'))
    # ONNX Runtime has no bfloat16 products on a CPU.
    unusable = receipt == 'bfloat16' and device == 'cpu'
    runs_files = receipt and not refused.get(INT8) and not unusable
    if runs_files and graph_path(bundle.folder, 'vision').is_file():
        found.append(Candidate('onnxruntime', str(receipt)))
    if backend not in (AUTO, *(candidate.backend for candidate in found)):
        if refusal := refused.get(INT8):
            raise ValueError(
                f"{bundle.folder}: precision 'auto' does not take its int8 files: {refusal}; name "
                "precision 'int8' to run them all the same"
            )
        # Its own checks say what is missing.
        found.append(Candidate(backend, receipt or 'float32'))
    fitting = [
        candidate
        for candidate in found
        if backend in (AUTO, candidate.backend)
        and precision in (AUTO, candidate.precision)
        and (
            backend != AUTO
            or (
                accepts_device(device, candidate.backend) and not missing_package(candidate.backend)
            )
        )
    ]
    if not fitting:
        raise ValueError(
            f"{bundle.folder}: backend '{backend}' with precision '{precision}' on '{device}' "
            f'leaves nothing that may run this policy (receipt: {receipt or "none"}); install '
            "PyTorch, export ONNX files ('vla_runtime export'), or name backend and precision"
        )
    return fitting


def reduced_precisions(bundle: Bundle, device: str) -> dict[Candidate, str]:
    """Return int8 and PyTorch's candidates below float32, each with why `auto` leaves it alone.

    Args:
        bundle: checked.
        device: as for `Policy.load`.

    Returns:
        those that could run here, with an empty text where `auto` may take them
    """
    could_run = []
    receipt = _receipt_precision(bundle)
    if receipt == INT8.precision:
        could_run.append(INT8)
    if _is_faster_reduced(receipt, device):
        could_run.append(Candidate('torch', str(receipt)))
    if accepts_device(device, FP8.backend) and not fp8_refusal(device):
        could_run.append(FP8)
    return {candidate: _refusal(bundle, candidate, device) for candidate in could_run}


def _refusal(bundle: Bundle, candidate: Candidate, device: str) -> str:
    """Return why `auto` leaves a reduced precision alone; empty where it may take it."""
    try:
        if candidate == INT8:
            if device != 'cpu':
                return f"its files are for the CPU, not for device '{device}'"
            check_int8()
        elif is_vouched_by_onnx(candidate) and not is_judged(
            bundle, candidate.backend, candidate.precision
        ):
            return ''
        return success_fault(bundle, candidate.backend, candidate.precision)
    except ValueError as error:
        return str(error)


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
        bundle, backend, device, precision: as for `candidates`; backend or precision is `auto`.
        threads, settings: as for `choose`.
        load: loads a candidate; an error of CANNOT_RUN where it cannot run.
        check: refuses a loaded candidate that gives other numbers than the recorded cases have,
            and closes it (ValueError).
        measure: milliseconds of an inference of a loaded candidate, which it closes.

    Raises:
        ValueError: nothing may run this bundle here.
        Exception: none of the candidates can run; the error of the first.
    """
    found = candidates(bundle, backend, device, precision)

    def load_checked(candidate: Candidate) -> Loaded:
        loaded = load(candidate)
        # A precision that was named outright is the user's to vouch for, 8 bits were judged.
        if precision == AUTO and is_vouched_by_onnx(candidate):
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
        reasons += [f'{one.precision} is left out: {why}' for one, why in refused.items() if why]
        return loaded, '; '.join(reasons)
    raise failed[0]


def is_vouched_by_onnx(candidate: Candidate) -> bool:
    """Return whether a candidate rests on the receipt of files that it does not run."""
    return candidate.backend == 'torch' and candidate.precision in ('bfloat16', 'float16')


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
        bundle: checked.
        found: as `candidates` gives them.
        device: that they would run on.
        threads: CPU threads of each network.
        settings: name to value, of those that a backend may refuse or that change its time.
        measure: milliseconds of an inference with a candidate; an error of CANNOT_RUN where it
            cannot run.

    Raises:
        Exception: one of CANNOT_RUN; none of several can run; the error of the first.
    """
    first = found[0]
    if len(found) == 1:
        return Choice(first.backend, first.precision, 'nothing else may run this bundle here')
    size, free = bundle.weights_path.stat().st_size, available_host_bytes()
    if size > MOST_MEASURED_BYTES or (free is not None and _TIMES_WEIGHTS * size > free):
        return Choice(first.backend, first.precision, 'by order: too large to try each')
    key = _key(bundle, found, device, threads, settings)
    remembered = _remembered()
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
    best = next(iter(times))
    for candidate, milliseconds in times.items():
        if milliseconds < _MARGIN * times[best]:
            best = candidate
    why = ', '.join(
        [f'{candidate} {milliseconds:.1f} ms' for candidate, milliseconds in times.items()]
        + [f'{candidate} cannot: {error}' for candidate, error in errors.items()]
    )
    choice = Choice(best.backend, best.precision, f'measured: {why}', measured=True)
    # Refusals are the same next time; memory or a driver may not be.
    if all(isinstance(error, ValueError) for error in errors.values()):
        _remember({**remembered, key: choice})
    return choice


def memory_path() -> Path:
    """File of the choices that this machine remembers; without it all are made again."""
    return cache_folder() / 'choices.json'


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


def _receipt_precision(bundle: Bundle) -> str | None:
    """Precision of the ONNX files that the bundle's receipt vouches for; None without one."""
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
    """Return whether PyTorch is likely faster there in the receipt's precision than in float32."""
    if receipt == 'bfloat16':
        return device != 'cpu' or multiplies_bfloat16()
    # A CPU emulates float16.
    return receipt == 'float16' and device != 'cpu'


def _key(
    bundle: Bundle,
    found: Sequence[Candidate],
    device: str,
    threads: int,
    settings: Mapping[str, object],
) -> str:
    """Return a digest of everything that the choice depends on."""
    facts: dict[str, Any] = {
        'bundle': spec_identity(bundle.spec),
        'candidates': [asdict(candidate) for candidate in found],
        'device': device,
        'threads': threads,
        'settings': dict(settings),
        'cpu': cpu_name(),
        'gpu': '' if device == 'cpu' else gpu_name(device),
        'versions': {name: _version(name) for name in _PACKAGES} | {'vla_runtime': __version__},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ''


def _remembered() -> dict[str, Choice]:
    """All remembered choices; a damaged file counts as none."""
    try:
        path = memory_path()
        stored: Mapping[str, Any] = read_json(path).values if path.is_file() else {}
        return {key: Choice(**values) for key, values in stored.items()}
    except (ValueError, OSError, TypeError) as error:
        logger.warning('remembered choices are not used: %s', error)
        return {}


def _remember(choices: Mapping[str, Choice]) -> None:
    newest = list(choices.items())[-_LARGEST_MEMORY:]
    document = {name: asdict(value) for name, value in newest}
    try:
        path = memory_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(document, indent=1) + '\n')
    except (ValueError, OSError) as error:
        logger.warning('the choice of a backend is not remembered: %s', error)


def check_words(backend: str, precision: str) -> None:
    """Refuse an unknown backend or precision beside `auto` (ValueError)."""
    if backend not in (AUTO, *BACKENDS):
        raise ValueError(
            f"backend '{backend}' is unknown; known are: {', '.join((AUTO, *BACKENDS))}"
        )
    if precision not in (AUTO, *PRECISIONS):
        raise ValueError(
            f"precision '{precision}' is unknown; known are: {', '.join((AUTO, *PRECISIONS))}"
        )
