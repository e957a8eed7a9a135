"""Milliseconds of each phase of one policy: captured graphs, eager, and Triton.

A miss runs every camera, prefix and denoise; a hit denoises alone. Each is the wall time from
inputs in host memory to the chunk in host memory.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from parts.gpu_checks import relative_error
from parts.measurement import Target, percentiles
from parts.random_policy import (
    ChunkInputs,
    denoise_chunk,
    infer,
    random_inputs,
    torch_engine,
    with_cameras,
)

from vla_runtime.engines.protocol import PolicyEngine
from vla_runtime.engines.recorded_cases import BOUNDS
from vla_runtime.engines.torch.layer_trial import choose_layers
from vla_runtime.engines.triton_option import ON
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.models.pi import PiNetwork
from vla_runtime.models.shapes.operation_counts import count_operations
from vla_tools.performance.devices import device_of_cuda
from vla_tools.performance.roofline import phase_floors, published_rates


@dataclass(frozen=True)
class Mode:
    """Way of running the networks."""

    name: str
    graphs: bool
    triton: bool = False
    precision: str = 'bfloat16'


GRAPH = Mode('graph', graphs=True)
EAGER = Mode('eager', graphs=False)
TRITON_GRAPH = Mode('triton, graph', graphs=True, triton=True)


def time_phases(
    engine: PolicyEngine,
    inputs: ChunkInputs,
    repeats: int,
    warm_up: int,
    most_s: float = math.inf,
) -> dict[str, list[float]]:
    """Milliseconds per phase, `repeats` samples of each after `warm_up`, until `most_s` seconds.

    Returns `vision` (one camera), `prefix`, `denoise`, `miss` (all of them) and `hit` (denoise
    alone).
    """
    cameras = len(inputs.pixels)
    samples: dict[str, list[float]] = {
        phase: [] for phase in ('vision', 'prefix', 'denoise', 'miss', 'hit')
    }
    end_s = perf_counter() + most_s
    for repeat in range(repeats + warm_up):
        if repeat > warm_up and perf_counter() > end_s:
            break
        marks = [_now(engine)]
        for camera, pixels in enumerate(inputs.pixels):
            engine.encode_image(camera, pixels)
        marks.append(_now(engine))
        engine.encode_prefix(inputs.image_mask, inputs.prefix_inputs)
        marks.append(_now(engine))
        denoise_chunk(engine, inputs)
        marks.append(_now(engine))
        denoise_chunk(engine, inputs)
        marks.append(_now(engine))
        if repeat < warm_up:
            continue
        vision, prefix, denoise, hit = np.diff(marks) * 1e3
        taken = (vision / cameras, prefix, denoise, vision + prefix + denoise, hit)
        for phase, milliseconds in zip(samples, taken, strict=True):
            samples[phase].append(float(milliseconds))
    return samples


def _now(engine: PolicyEngine) -> float:
    engine.synchronize()
    return perf_counter()


def measure(
    network: PiNetwork,
    family: str,
    cameras: int,
    rows: int,
    mode: Mode,
    *,
    repeats: int,
    warm_up: int = 3,
    most_s: float = math.inf,
) -> dict[str, Any]:
    """Latency of one configuration, and how far its chunk is from the eager one.

    `network`: weights on the device, in the mode's precision; `cameras` and `rows`: of the engine.
    Returns percentiles of each phase in ms, first run in s, status of the graphs, error, `fault`
    (of its chunk, or ''), least times in ms, memory in GiB. Raises RuntimeError: the Triton
    kernels are not usable.
    """
    network = with_cameras(network, family, cameras)
    inputs = random_inputs(network.dims, rows, seed=1)
    device = network.action_in.weight.device
    if device.type == 'cuda':
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    eager = torch_engine(network, graphs=False, max_rows=rows)
    expected = infer(eager, inputs)
    eager.close()
    engine = torch_engine(network, graphs=mode.graphs, max_rows=rows)
    if mode.triton:
        choose_layers(engine, mode.precision)
        if engine.triton != ON:
            raise RuntimeError(engine.why_triton)
    start = perf_counter()
    chunk = infer(engine, inputs)
    first_s = perf_counter() - start
    samples = time_phases(engine, inputs, repeats, warm_up, most_s)
    status = dict(engine.cuda_graph)
    engine.close()
    error = relative_error(chunk, expected)
    return {
        'views': cameras,
        'rows': rows,
        'mode': mode.name,
        'milliseconds': {phase: percentiles(values) for phase, values in samples.items()},
        'first_run_s': first_s,
        'cuda_graph': status,
        'error_against_eager': error,
        'fault': fault_of(mode, error),
        'least_ms': _least_ms(network, rows, device) if mode.precision == 'bfloat16' else None,
        'peak_memory_gib': torch.cuda.max_memory_allocated(device) / 2**30
        if device.type == 'cuda'
        else None,
    }


def fault_of(mode: Mode, error: float) -> str:
    """Return what is wrong with a chunk so far from the eager one; '' within receipts' bound."""
    bound = BOUNDS[mode.precision].chunk
    if error <= bound:
        return ''
    return f'{mode.name}: its chunk is off by {error:.1e} from the eager one (bound {bound:.0e})'


def least_ms(
    family: str, dims: PolicyDims, rows: int, name: str, total_bytes: int
) -> dict[str, float] | None:
    """The roofline of a miss and a hit, or None for a GPU whose rates are in no table."""
    found = device_of_cuda(name, total_bytes)
    if found is None:
        return None
    floors = phase_floors(
        count_operations(family, dims),
        published_rates(found, 'bfloat16'),
        precision='bfloat16',
        rows=rows,
        steps=10,
        views=dims.cameras,
    )
    return {phase: floors[phase].milliseconds for phase in ('miss', 'hit')}


def _least_ms(network: PiNetwork, rows: int, device: torch.device) -> dict[str, float] | None:
    if device.type != 'cuda':
        return None
    properties = torch.cuda.get_device_properties(device)
    name, total_bytes = properties.name, properties.total_memory
    return least_ms(network.family.name, network.dims, rows, name, total_bytes)


def configurations(quick: bool, triton: bool = True) -> list[tuple[int, int, Mode]]:
    """(views, rows, mode), the most important first; `quick`: two views alone.

    Our kernels follow PyTorch's modes: one that writes out of bounds ends the process.
    """
    views = (2,) if quick else (3, 2, 1)
    modes = (GRAPH, EAGER, *((TRITON_GRAPH,) if triton else ()))
    first = [(views[0], rows, mode) for mode in modes for rows in (1, 2)]
    captured = [mode for mode in modes if mode.graphs]
    others = [(v, rows, mode) for v in views[1:] for mode in captured for rows in (1, 2)]
    return first + others


def summary(result: Mapping[str, Any]) -> str:
    """Return a configuration's medians in a line."""
    miss, hit = (result['milliseconds'][phase] for phase in ('miss', 'hit'))
    times = f'miss {miss["median"]:.2f} ms, hit {hit["median"]:.2f} ms, {miss["count"]} samples'
    return f'{times}; WRONG: {result["fault"]}' if result['fault'] else times


def table(results: list[Mapping[str, Any]]) -> list[str]:
    """Lines for people: median ms of each phase, the roofline, memory, and the chunk's error."""
    head = f'{"views":>5} {"rows":>4}  {"mode":<16}'
    phases = ('vision', 'prefix', 'denoise', 'miss', 'hit')
    titles = ''.join(f'{phase:>10}' for phase in phases)
    lines = [f'{head}{titles}{"least miss/hit":>17}{"memory":>12}{"off eager by":>14}']
    for result in results:
        medians = [result['milliseconds'][phase]['median'] for phase in phases]
        least, memory = result['least_ms'], result['peak_memory_gib']
        lines.append(
            f'{result["views"]:>5} {result["rows"]:>4}  {result["mode"]:<16}'
            + ''.join(f'{median:>10.2f}' for median in medians)
            + (f'{least["miss"]:>10.2f} /{least["hit"]:>5.2f}' if least else f'{"-":>17}')
            + (f'{memory:>8.1f} GiB' if memory is not None else f'{"-":>12}')
            + f'{result["error_against_eager"]:>14.1e}'
            + (' WRONG' if result['fault'] else '')
        )
    return lines


VIEWS = 3
# With PyTorch's operators, and with the expert's layers in Triton kernels.
MODES = ('graph', 'triton, graph')
# Fewer samples have no 99th percentile.
LEAST_SAMPLES = 200


class Samples(NamedTuple):
    """Samples of a configuration; `share` of the remaining time that they may take."""

    count: int
    warm_up: int
    share: float


# Of the headline in Triton kernels with one row, where the slowest count; of its other forms; and
# of everything else.
SLOWEST, HEADLINE, OTHERS = (
    Samples(2000, 50, 0.6),
    Samples(200, 50, 0.25),
    Samples(30, 3, 0.25),
)


def samples_of(views: int, rows: int, mode: str) -> Samples:
    """Return the samples of a configuration."""
    if views != VIEWS or mode not in MODES:
        return OTHERS
    return SLOWEST if (rows, mode) == (1, MODES[1]) else HEADLINE


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Return every target with its figure from `measure`; None where not measured."""
    return [target for mode in MODES for target in _targets_of(mode, results)]


def _targets_of(mode: str, results: Sequence[Mapping[str, Any]]) -> list[Target]:
    found = {
        result['rows']: result
        for result in results
        if result['views'] == VIEWS and result['mode'] == mode and not result['fault']
    }
    one, two = (found.get(rows) for rows in (1, 2))

    def median(result: Mapping[str, Any] | None, phase: str) -> float | None:
        return None if result is None else float(result['milliseconds'][phase]['median'])

    def least(phase: str) -> float | None:
        floors = None if one is None else one['least_ms']
        return None if floors is None else float(floors[phase])

    slowest, count = None, None
    if one is not None and one['milliseconds']['miss']['count'] >= LEAST_SAMPLES:
        slowest, count = (one['milliseconds']['miss'][name] for name in ('p99', 'count'))
    found_by_name = {
        'miss, of its roofline': (1.5, _ratio(median(one, 'miss'), least('miss'))),
        'hit, of its roofline': (2.5, _ratio(median(one, 'hit'), least('hit'))),
        'guided miss, of a miss': (1.5, _ratio(median(two, 'miss'), median(one, 'miss'))),
        'guided hit, of a hit': (1.15, _ratio(median(two, 'hit'), median(one, 'hit'))),
        'p99 of a miss, of its median': (1.1, _ratio(slowest, median(one, 'miss')), count),
    }
    return [Target(f'{mode}: {name}', *figures) for name, figures in found_by_name.items()]


def _ratio(time: float | None, reference: float | None) -> float | None:
    return None if time is None or reference is None else time / reference
