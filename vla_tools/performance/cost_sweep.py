"""Cost of a policy against its sizes and settings: measured, beside the least time on paper.

One thing changes at a time. Views, denoise steps and prompt rows are measured with one loaded
policy, turn by turn; prompt tokens and chunk actions change the weights' shapes and are on paper
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.family.counts import PolicyCounts
from vla_runtime.family.listing import find_family, performance_figures, preset, preset_names
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.models.shapes.operation_counts import count_operations, counts_of
from vla_runtime.policy import Policy
from vla_tools.performance.bench import (
    WARM_UP,
    BenchOptions,
    Kind,
    load_policy,
    measure_kinds,
)
from vla_tools.performance.devices import DEVICES, MATRIX_BYTES
from vla_tools.performance.measurement import percentiles
from vla_tools.performance.roofline import SECONDS_A_KERNEL, Rates, floor, published_rates

Axis = Literal['views', 'tokens', 'horizon', 'steps', 'rows']
AXES: tuple[Axis, ...] = get_args(Axis)
KINDS = ('miss', 'hit')

# Factors on the bundle's own number, on paper.
_FACTORS = (0.25, 0.5, 1, 2, 4)
_STEPS = (1, 2, 5, 10, 20)
_PRECISION = 'bfloat16'


@dataclass(frozen=True)
class Setup:
    """What the cost of an inference depends on, beside the networks.

    `views`: cameras with a new image at a miss; `rows`: prompt rows, 2 for fused guidance.
    """

    views: int
    steps: int
    rows: int


@dataclass(frozen=True)
class CostPoint:
    """One value of one axis.

    `as_is`: the bundle's own; `least_ms`: roofline by kind (`miss`, `hit`), empty without rates;
    `measured_ms`: percentiles by kind, empty if not measured.
    """

    value: int
    as_is: bool
    least_ms: Mapping[str, float]
    measured_ms: Mapping[str, Mapping[str, float]]


def least_times(
    counts: PolicyCounts, rates: Rates, precision: str, setup: Setup
) -> dict[str, float]:
    """Return the roofline of a miss and a hit, ms.

    Samples share the weights and the prefix; each has operations and a chunk of its own.
    """
    size = MATRIX_BYTES[precision]
    hit = floor(
        counts.step[setup.rows].work(size) * (setup.steps * counts.passes), rates
    ).milliseconds
    encode = (counts.vision.work(size) * setup.views, counts.prefix[setup.rows].work(size))
    return {'miss': hit + sum(floor(work, rates).milliseconds for work in encode), 'hit': hit}


def setups_of(bundle: Bundle, base: Setup) -> dict[Axis, dict[int, Setup]]:
    """Return what to measure, by axis and value; an axis without a choice is left out."""
    spec = bundle.spec
    has_steps = find_family(spec.family).takes_steps
    of_axis: dict[Axis, Iterable[int]] = {
        'views': range(base.views, 0, -1),
        'steps': {*_STEPS, base.steps} if has_steps else (),
        'rows': (1, 2) if spec.advantage is not None else (),
    }
    return {
        axis: {value: replace(base, **{axis: value}) for value in sorted(values)}
        for axis, values in of_axis.items()
        if len(list(values)) > 1
    }


def settings_of(settings: PolicySettings, setup: Setup) -> PolicySettings:
    """Return settings with which a loaded policy runs this setup."""
    guided = setup.rows == 2
    return replace(
        settings,
        denoise_steps=setup.steps,
        cfg_enabled=guided,
        cfg_mode='fused' if guided else 'auto',
    )


def sizes_of(bundle: Bundle) -> dict[Axis, dict[int, PolicyCounts]]:
    """Count the networks with other numbers of prompt tokens and actions, by axis and value.

    Impossible sizes are left out. Raises ValueError: PyTorch is not installed.
    """
    dims: Any = bundle.spec.dims
    found: dict[Axis, dict[int, PolicyCounts]] = {}
    of_axis: tuple[tuple[Axis, str], ...] = (('tokens', 'prompt_length'), ('horizon', 'horizon'))
    for axis, name in of_axis:
        own = getattr(dims, name, 0)
        for value in sorted({int(own * factor) for factor in _FACTORS} - {0}):
            try:
                other = replace(dims, **{name: value})
            except ValueError:
                continue
            counts = count_operations(bundle.spec.family, other)
            found.setdefault(axis, {})[value] = counts
    return found


def _runnable(
    policy: Policy, setups: Mapping[Axis, Mapping[int, Setup]], base: Setup
) -> tuple[list[Setup], list[str]]:
    """Return the setups that a policy can run, `base` first, and notes on the others."""
    # First: it computes every view's tokens.
    runnable, notes = [base], []
    for setup in {setup for values in setups.values() for setup in values.values()} - {base}:
        try:
            policy.check(settings_of(policy.settings, setup))
        except ValueError as error:
            notes.append(f'{setup.rows} rows: not measured: {error}')
        else:
            runnable.append(setup)
    return runnable, notes


def run_sweep(
    folder: Path,
    options: BenchOptions,
    base: Setup,
    rates: Rates | None,
    progress: Callable[[range], Iterable[int]] = lambda rounds: rounds,
) -> dict[str, Any]:
    """Load a policy, measure every setup that it can run, close it, and count all on paper.

    Args:
        options: with `auto` resolved.
        base: setup that one thing of changes at a time.
        rates: of this device; None: nothing to compare with.

    Returns `axes` (axis, list of `CostPoint` as mappings) and `notes`: what was not measured, and
    why. Raises RuntimeError: an inference was not of its kind, or failed on the device;
    ValueError, BundleError: as for `run_bench`.
    """
    bundle = read_bundle(folder, verify=False)
    setups = setups_of(bundle, base)
    with closing(load_policy(bundle, options)) as policy:
        runnable, notes = _runnable(policy, setups, base)
        rounds = progress(range(options.repeats + WARM_UP))
        measured = _measure(policy, bundle, runnable, rounds)
    counts, precision = counts_of(bundle), options.precision

    def least(of: PolicyCounts, setup: Setup) -> dict[str, float]:
        if rates is None or precision not in MATRIX_BYTES:
            return {}
        return least_times(of, rates, precision, setup)

    axes = {
        axis: [
            CostPoint(value, setup == base, least(counts, setup), measured.get(setup, {}))
            for value, setup in values.items()
        ]
        for axis, values in setups.items()
    }
    try:
        sizes = sizes_of(bundle)
    except ValueError as error:
        sizes = {}
        notes.append(f'tokens and horizon: {error}')
    for axis, of_value in sizes.items():
        axes[axis] = [
            CostPoint(value, own, least(of, base), measured[base] if own else {})
            for value, of in of_value.items()
            for own in [of == counts]
        ]
    return {
        'axes': {axis: [asdict(point) for point in axes[axis]] for axis in AXES if axis in axes},
        'notes': sorted(notes),
    }


def published_floors(
    progress: Callable[[list[str]], Iterable[str]] = lambda names: names,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the roofline (ms) of every published size, by size, device and kind.

    In bfloat16, all views new at a miss, ten denoise steps where the head has steps; `progress`
    wraps the sizes, seconds each. Raises ValueError: PyTorch is not installed.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in progress(list(preset_names())):
        published = preset(name)
        assert published is not None
        family, dims = published
        steps = find_family(family).denoise_steps
        counts, setup = count_operations(family, dims), Setup(dims.cameras, steps, rows=1)
        found[name] = {
            key: least_times(counts, published_rates(device, _PRECISION), _PRECISION, setup)
            for key, device in DEVICES.items()
        }
    return found


def published_predictions(
    published: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Predict PyTorch's times on CUDA, ms, for sizes whose kernels were counted.

    By size and implementation of the expert's layers (`SIZE, torch`), device and kind.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, of_device in published.items():
        size = preset(name)
        assert size is not None
        views, steps = size[1].cameras, find_family(size[0]).denoise_steps
        for run_by, kernels in performance_figures(name).kernels.items():
            counts = kernels.phases(views=views, steps=steps)
            found[f'{name}, {run_by}'] = {
                key: {kind: least[kind] + 1e3 * SECONDS_A_KERNEL * counts[kind] for kind in KINDS}
                for key, least in of_device.items()
            }
    return found


def _measure(
    policy: Policy, bundle: Bundle, setups: list[Setup], rounds: Iterable[int]
) -> dict[Setup, dict[str, Any]]:
    """Return percentiles, ms, by setup and kind."""
    # The first inference after a change of settings finds other numbers in the processor's caches.
    kinds = [
        Kind(
            f'{number} {kind}',
            0 if kind == 'hit' else setup.views,
            settings_of(policy.settings, setup),
        )
        for number, setup in enumerate(setups)
        for kind in ('changed', *KINDS)
    ]
    samples, _ = measure_kinds(policy, bundle.spec, kinds, rounds)
    return {
        setup: {kind: percentiles(samples[f'{number} {kind}']['total']) for kind in KINDS}
        for number, setup in enumerate(setups)
    }
