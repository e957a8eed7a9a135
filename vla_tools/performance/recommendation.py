"""The fastest of what may run a bundle here, in words for the policy node's parameter file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.candidates import Candidate, candidates
from vla_runtime.engines.choice import CANNOT_RUN
from vla_runtime.engines.preflight import check_cuda_device
from vla_tools.performance.bench import BenchOptions, run_bench

_Way = tuple[Candidate, str]


def recommend(
    bundle: Path,
    options: BenchOptions,
    device: str | None,
    progress: Callable[[range], Iterable[int]] = lambda rounds: rounds,
) -> str:
    """Measure every way to run a bundle, and return the times and the fastest in words.

    Backend and precision of the options may be `auto`; `device` None: the CPU, and CUDA where a
    GPU answers; `progress` wraps the rounds. Raises BundleError: damaged or inconsistent;
    ValueError: nothing can run it.
    """
    times: dict[_Way, float] = {}
    faults: list[str] = []
    for way in _ways(bundle, options, [device] if device else _devices()):
        one, where = way
        named = replace(options, backend=one.backend, precision=one.precision, device=where)
        try:
            figures = run_bench(bundle, named, progress)
        except CANNOT_RUN as error:
            faults.append(f'{one} on {where} cannot: {error}')
            continue
        times[way] = figures['milliseconds']['miss']['total']['median']
    if not times:
        raise ValueError('; '.join(faults))
    return '\n'.join([*_lines(times), *faults])


def _devices() -> list[str]:
    try:
        check_cuda_device('cuda')
    except ValueError:
        return ['cpu']
    return ['cpu', 'cuda']


def _ways(bundle: Path, options: BenchOptions, devices: Sequence[str]) -> list[_Way]:
    """Return candidates with their devices."""
    checked, found = read_bundle(bundle), []
    fault = None
    for device in devices:
        try:
            named = candidates(checked, options.backend, device, options.precision)
        except ValueError as error:
            fault = error
            continue
        found += [(one, device) for one in named]
    if fault and not found:
        raise fault
    return found


def _lines(times: dict[_Way, float]) -> list[str]:
    ranked = sorted(times, key=lambda way: times[way])
    (best, device), *others = ranked
    lines = [f'{f"{one} on {where}":40}{times[one, where]:>9.2f} ms' for one, where in ranked]
    lines.append('')
    if others:
        factor = times[others[0]] / times[best, device]
        lines.append(f'# {factor:.2f} times as fast as {others[0][0]} on {others[0][1]}')
    return [
        *lines,
        '/**/vla_policy:',
        '  ros__parameters:',
        f'    backend: {best.backend}',
        f'    device: {device}',
        f'    precision: {best.precision}',
    ]
