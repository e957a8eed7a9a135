"""Latency of a policy on this device, phase by phase, next to its roofline.

Every round runs each kind once, so that a slow machine slows all alike; the policy's report
confirms the kind. Queries after the measurement can fail without losing it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.candidates import CANNOT_RUN, Candidate, candidates
from vla_runtime.engines.closing import close_on_error
from vla_runtime.engines.devices import MOST_THREADS, parse_device
from vla_runtime.engines.preflight import AUTO, check_cuda_device
from vla_runtime.engines.triton_option import OFF
from vla_runtime.family.declaration import image_sizes
from vla_runtime.inference.request import cache_words
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.models.shapes.operation_counts import counts_of
from vla_runtime.policy import Policy
from vla_runtime.processing.poses import from_matrix
from vla_runtime.types import InferenceReport, Observation
from vla_tools.performance.device_rates import power_state, rates_of
from vla_tools.performance.measurement import percentiles
from vla_tools.performance.roofline import Floor, Rates, phase_floors

WARM_UP = 2
_IMAGE_SHAPE = (480, 640, 3)
# Any guidance scale would do; this one is moderate.
_BETA = 2.0

Found = TypeVar('Found')


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark.

    Attributes:
        views: cameras with an image; None: all of the bundle.
        rows: prompt rows; 2: fused guidance.
        steps: denoise steps; None: as recommended.
    """

    backend: str = AUTO
    device: str = 'cpu'
    precision: str = AUTO
    views: int | None = None
    rows: int = 1
    steps: int | None = None
    repeats: int = 30
    threads: int | None = None
    triton: str = OFF


@dataclass(frozen=True)
class DeviceFacts:
    """Name and memory of the measured device.

    `name`: the driver's, None for a CPU; `total_bytes`: 0 for a CPU or where unknown;
    `used_bytes`: None where unknown; `used`: what it means, or why it is unknown.
    """

    name: str | None = None
    total_bytes: int = 0
    used_bytes: int | None = None
    used: str = ''


@dataclass(frozen=True)
class Kind:
    """One kind of inference; `settings` None: the policy's."""

    name: str
    new_views: int
    settings: PolicySettings | None = None


def _in_force(options: BenchOptions, policy: Policy) -> BenchOptions:
    """Return the options with what `auto` came to."""
    return replace(
        options,
        backend=policy.backend,
        precision=policy.precision,
        threads=policy.threads,
        triton=policy.triton,
    )


def run_bench(
    bundle: Path,
    options: BenchOptions,
    progress: Callable[[range], Iterable[int]] = lambda rounds: rounds,
) -> dict[str, Any]:
    """Load the policy, measure it, and close it.

    Args:
        progress: wraps the rounds, e.g. in a progress bar.

    Returns `milliseconds` (kind, phase, percentiles), `floors_ms`, `rates`, `memory`,
    `device_name`, `power` (`before` and `after` the measurement, see `power_state`), the options
    with what `auto` became and `why`, and `notes`: what could not be found out. Raises
    BundleError: the bundle is damaged or inconsistent; ValueError: options that this bundle or
    this machine cannot serve; RuntimeError: an inference was not of its kind, or failed on the
    device.
    """
    checked = read_bundle(bundle, verify=False)
    spec = checked.spec
    views = _check(spec, options)
    before = _resident_bytes()
    policy = load_policy(checked, options)
    options = _in_force(options, policy)
    kinds, rounds = kinds_of(views), range(options.repeats + WARM_UP)
    power = {'before': power_state()}
    with close_on_error(policy.close):
        samples, report = measure_kinds(policy, spec, kinds, progress(rounds))
    power['after'] = power_state()
    memory = {'resident_before': before, 'resident_peak': _peak_resident_bytes()}
    notes: list[str] = []
    facts = _late('the device', lambda: device_facts(options), notes) or DeviceFacts()
    _late('closing the policy', policy.close, notes)
    rates = _late("the device's rates", lambda: _rates(options, facts, policy.threads), notes)
    return {
        'policy': spec.name,
        **asdict(options),
        'why': policy.why,
        'views': views,
        'steps': report.denoise_steps,
        'device_name': facts.name,
        'cuda_graph': dict(report.cuda_graph),
        'milliseconds': {
            kind: {phase: percentiles(values) for phase, values in of_kind.items()}
            for kind, of_kind in samples.items()
        },
        'floors_ms': _floors(checked, rates, options, kinds, report.denoise_steps),
        'rates': asdict(rates) if rates else None,
        'memory': {**memory, 'device': facts.used_bytes, 'device_is': facts.used},
        'power': power,
        'notes': notes,
    }


def kinds_of(views: int) -> list[Kind]:
    """Return the kinds to measure: a miss, one new view of several, and a hit."""
    one = [Kind('one new view', 1)] if views > 1 else []
    return [Kind('miss', views), *one, Kind('hit', 0)]


def look(spec: BundleSpec, images: dict[str, np.ndarray | None]) -> Observation:
    """Return an observation of these images; the state is zero, rotations are the identity."""
    state = np.zeros(len(spec.state), dtype=np.float32)
    for pose in spec.poses:
        unturned = from_matrix(np.eye(3), pose.form, pose.euler_axes or 'sxyz')
        for name, value in zip(pose.state_rotation, unturned, strict=False):
            state[spec.state_names.index(name)] = value
    return Observation(images=images, state=state, instruction='pick up the red block')


def device_facts(options: BenchOptions) -> DeviceFacts:
    """Return name and memory of the GPU, from the library at hand, while a policy is loaded."""
    kind, index = parse_device(options.device, options.backend)
    if kind == 'cpu':
        return DeviceFacts()
    if options.backend == 'torch':
        import torch

        properties = torch.cuda.get_device_properties(index)
        peak = torch.cuda.max_memory_allocated(index)
        how = 'at most, allocated by PyTorch'
        return DeviceFacts(properties.name, properties.total_memory, peak, how)
    from vla_runtime.engines.cuda_runtime import CudaRuntime

    try:
        with closing(CudaRuntime(index)) as runtime:
            info, free = runtime.info, runtime.free_bytes()
    except ValueError as error:
        # ONNX Runtime runs without cuda-bindings; only this query needs it.
        return DeviceFacts(options.device, used=f'not known: {error}')
    used = info.total_bytes - free
    return DeviceFacts(info.name, info.total_bytes, used, 'in use on the device, by all processes')


def load_policy(bundle: Bundle, options: BenchOptions) -> Policy:
    """Load the policy as it is to be measured."""
    settings = PolicySettings(
        denoise_steps=options.steps,
        cfg_enabled=options.rows == 2,
        cfg_beta=_BETA,
        cfg_mode='fused' if options.rows == 2 else 'auto',
    )
    return Policy.load(
        bundle,
        options.backend,
        options.device,
        precision=options.precision,
        settings=settings,
        threads=options.threads,
        triton=options.triton,
        verify=False,
    )


def _late(what: str, ask: Callable[[], Found], notes: list[str]) -> Found | None:
    """Call `ask` after the measurement; a failure becomes a note and loses no measurement."""
    try:
        return ask()
    except Exception as error:
        notes.append(f'{what}: {type(error).__name__}: {error}')
        return None


def _rates(options: BenchOptions, facts: DeviceFacts, threads: int | None) -> Rates | None:
    kind, index = parse_device(options.device, options.backend)
    if kind == 'cpu':
        return rates_of(None, 0, 'cpu', options.precision, threads)
    # A GPU of unknown name is still a GPU.
    name = facts.name or options.device
    return rates_of(name, facts.total_bytes, f'cuda:{index}', options.precision)


def _check(spec: BundleSpec, options: BenchOptions) -> int:
    """Check the options and return the number of views."""
    present = sum(camera.present for camera in spec.cameras)
    views = present if options.views is None else options.views
    if not 1 <= views <= present:
        raise ValueError(f'--views {views}: this policy has {present} cameras; expected 1 to that')
    if options.rows not in (1, 2):
        raise ValueError(f'--rows {options.rows}: expected 1, or 2 (guidance)')
    if options.rows == 2 and spec.advantage is None:
        raise ValueError(
            f"--rows 2: policy '{spec.name}' was trained without advantage tags (policy.yaml: "
            'prompt.advantage is not set), so it has no second row'
        )
    if options.repeats < 1:
        raise ValueError(f'--repeats {options.repeats}: expected at least 1')
    if options.threads is not None and not 0 <= options.threads <= MOST_THREADS:
        raise ValueError(f'--threads {options.threads}: expected 0 to {MOST_THREADS}')
    return views


def measure_kinds(
    policy: Policy,
    spec: BundleSpec,
    kinds: list[Kind],
    rounds: Iterable[int],
) -> tuple[dict[str, dict[str, list[float]]], InferenceReport]:
    """Measure every kind once a round, the warm-up first.

    Returns milliseconds by kind and phase, and the last report. Raises RuntimeError: an inference
    was not of its kind, or failed.
    """
    random = np.random.default_rng(0)
    names = [camera.name for camera in spec.cameras if camera.present]
    images: dict[str, np.ndarray | None] = dict.fromkeys(names)
    shapes = dict(zip(spec.camera_names, _image_shapes(spec), strict=True))
    samples: dict[str, dict[str, list[float]]] = {kind.name: {} for kind in kinds}
    for round_ in rounds:
        for kind in kinds:
            for name in names[: kind.new_views]:
                images[name] = random.integers(0, 256, shapes[name], dtype=np.uint8)
            _, report = policy.infer(look(spec, dict(images)), settings=kind.settings)
            _check_kind(kind, report)
            if round_ >= WARM_UP:
                for phase, value in report.milliseconds.items():
                    samples[kind.name].setdefault(phase, []).append(value)
    return samples, report


def _image_shapes(spec: BundleSpec) -> list[tuple[int, int, int]]:
    """Return the shape of each camera's image: the usual one where the policy resizes them."""
    # `area` takes images of one aspect only.
    if spec.images.padding == 'none' or spec.images.resample == 'area':
        return [(height, width, 3) for height, width in image_sizes(spec.dims)]
    return [_IMAGE_SHAPE] * len(spec.cameras)


def _check_kind(kind: Kind, report: InferenceReport) -> None:
    ran = (report.runs['vision'], report.runs['prefix'])
    expected = (kind.new_views, int(kind.new_views > 0))
    if ran != expected:
        raise RuntimeError(
            f'{kind.name}: vision and prefix ran {ran} times and should have {expected}: the '
            f'cache says {cache_words(report.cache)}'
        )


def _floors(
    bundle: Bundle, rates: Rates | None, options: BenchOptions, kinds: list[Kind], steps: int
) -> dict[str, dict[str, Any]]:
    """Return floors by kind and phase; empty without rates."""
    if rates is None:
        return {}
    floors = phase_floors(
        counts_of(bundle),
        rates,
        precision=options.precision,
        rows=options.rows,
        steps=steps,
        views=1,
    )
    found = {}
    for kind in kinds:
        vision = floors['vision']
        of_kind = {'denoise': floors['denoise']}
        if kind.new_views:
            all_views = Floor(vision.milliseconds * kind.new_views, vision.bound)
            of_kind = {'vision': all_views, 'prefix': floors['prefix'], **of_kind}
        found[kind.name] = {phase: asdict(one) for phase, one in of_kind.items()}
    return found


def _resident_bytes() -> int:
    """Resident memory of the process now, bytes."""
    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()


def _peak_resident_bytes() -> int | None:
    """Peak resident memory since the program began, bytes; None where it is not counted.

    Not from `getrusage`, which starts at what the parent held when it started this process.
    """
    lines = Path('/proc/self/status').read_text().splitlines()
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM:'))
    return next(found, None)


# --- The fastest of what may run a bundle here, in words for the policy node's parameter file


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
