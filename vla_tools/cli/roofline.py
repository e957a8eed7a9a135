"""Say on paper whether a policy fits on a device, and the least time that each phase can take.

MODEL is the name of a published size or the folder of a bundle. The times are floors from published
bandwidth and arithmetic rates and from counted operations and bytes (the roofline model): no real
run is faster (one in float16 on a GeForce may be, and a note says so), most are clearly slower, and
nothing was measured.

A miss is an inference with nothing cached: every view, prefix and all denoise steps, or all tokens
of the longest answer; a hit reuses the prefix. Two rows are guidance (fused), which a policy that
answers in tokens has not. Memory depends on what runs the networks: PyTorch
and TensorRT hold the weights once, ONNX Runtime those of prefix and expert once for every number of
rows. PyTorch holds the text table too; the others leave it to the host, which maps it. Engines of
TensorRT are built on the device that runs them, and building takes more than running: 'tensorrt,
build' is what 'vla_runtime build' asks for first. They fit where they can be built, with swap if
need be, and where loading them, which asks for 0.25 GiB more than they need, is not refused.
Shares of a miss stand beside those that others
measured and published for that policy and device, where there are any; their views and precision
may differ.

'PyTorch predicted' is what PyTorch on CUDA is expected to take with one row: the least time plus
4 microseconds for each kernel that it launches, with its own operators, and with the expert's
layers in Triton kernels (triton: on). It is a prediction, not a measurement: the kernels
were counted on a CPU, and the cost of one is an estimate. It stands for the published sizes whose
kernels were counted (see MODEL), in bfloat16 or float16.

examples:
  vla_runtime roofline --list
  vla_runtime roofline engines/demo --device agx-orin
  vla_runtime roofline engines/demo --device orin-nano orin-nx thor --precision float16 --views 2
  vla_runtime roofline engines/demo --device thor --steps 5 --json roofline.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_runtime.bundle.rules import LIMITS
from vla_runtime.cli._files import output_file
from vla_runtime.cli._numbers import between
from vla_runtime.engines.preflight import BACKENDS
from vla_runtime.family.declaration import (
    MOST_DENOISE_STEPS,
    observation_steps,
    token_dims,
    with_cameras,
)
from vla_runtime.family.listing import find_family, performance_figures, preset, preset_names
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import did_you_mean
from vla_tools.cli._roofline_lines import describe
from vla_tools.performance.devices import DEVICES, GIB, MATRIX_BYTES

if TYPE_CHECKING:
    from vla_runtime.family.counts import PolicyCounts
    from vla_runtime.family.declaration import PolicyDims
    from vla_runtime.family.performance_figures import Kernels
    from vla_tools.performance.devices import Device
    from vla_tools.performance.roofline import MemoryNeed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    counted = [name for name in preset_names() if performance_figures(name).kernels]
    parser.add_argument(
        'model',
        nargs='?',
        metavar='MODEL',
        help=f'a published size ({", ".join(preset_names())}) or a bundle, such as in: '
        f'vla_runtime roofline {counted[0]} --device thor; kernels were counted for '
        f'{", ".join(counted)}',
    )
    parser.add_argument('--list', action='store_true', help='show the known devices, and stop')
    parser.add_argument(
        '--device', nargs='+', type=_device, metavar='NAME', help='one or more of --list'
    )
    parser.add_argument(
        '--precision',
        choices=list(MATRIX_BYTES),
        default='bfloat16',
        help='of the large matrices, with int8 of all of them (default: bfloat16)',
    )
    parser.add_argument(
        '--views',
        type=between(1, LIMITS['dimensions.cameras']),
        metavar='V',
        help="cameras; of a bundle, those whose image has changed (default: the model's)",
    )
    parser.add_argument(
        '--steps',
        type=between(1, MOST_DENOISE_STEPS),
        metavar='N',
        help="denoise steps, at most 100 of a flow (default: the bundle's, or the published "
        "policy's)",
    )
    parser.add_argument(
        '--json',
        type=output_file,
        metavar='OUT',
        help='write all figures to this file (-: standard output)',
    )


def _device(text: str) -> str:
    if text not in DEVICES:
        raise argparse.ArgumentTypeError(f'{quoted(text)} is unknown{did_you_mean(text, DEVICES)}')
    return text


def main(arguments: argparse.Namespace) -> int:
    """Compute and print; 0 also where it does not fit, 2 for unusable arguments."""
    from vla_runtime.bundle.folder import BundleError

    if arguments.list:
        if arguments.json:
            print('error: --list writes no file: leave out --json', file=sys.stderr)
            return 2
        print(device_table())
        return 0
    try:
        answer = answer_of(arguments)
        print('\n\n'.join(describe(answer, device) for device in answer['devices'].values()))
        if arguments.json:
            command = shlex.join(['vla_runtime', *sys.argv[1:]])
            document = {'command': command, **answer}
            write_text(arguments.json, json.dumps(document, indent=1) + '\n')
            print(f'\nwrote {arguments.json}')
    except (BundleError, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


def device_table() -> str:
    """Every known device in a line."""
    lines = [f'{"device":16}{"memory":>9}{"bandwidth":>13}{"half":>15}{"float32":>15}  source']
    for key, device in DEVICES.items():
        lines.append(
            f'{key:16}{device.memory_gib:>5g} GiB{device.bandwidth_gb_s:>8g} GB/s'
            f'{device.half_tflops:>8g} TFLOP/s{device.float32_tflops:>7g} TFLOP/s  {device.source}'
        )
    return '\n'.join(lines)


def answer_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures, as they go into the JSON.

    Raises ValueError: no model or device, an unknown family, too many views; BundleError: no
    bundle.
    """
    from vla_tools.performance.roofline import memory_need

    if not arguments.model or not arguments.device:
        missing = '--device' if arguments.model else 'MODEL'
        model = arguments.model or preset_names()[0]
        raise ValueError(
            f'{missing} is missing, such as in: vla_runtime roofline {model} --device agx-orin '
            '(--list shows the devices)'
        )
    workload, dims = _workload(arguments)
    published = performance_figures(arguments.model)
    counts, precision = workload.counts, workload.precision
    needs = {
        backend: {
            rows: memory_need(counts, backend, precision=precision, rows=rows)
            for rows in workload.rows
        }
        for backend in BACKENDS
    }
    return {
        'model': arguments.model,
        'precision': precision,
        'views': workload.views,
        'steps': workload.steps,
        'answer_tokens': workload.answer_tokens,
        'prefix_tokens': dims.prefix_length,
        'memory_bytes': {
            backend: {_up_to(rows): _sizes(need) for rows, need in of_backend.items()}
            for backend, of_backend in needs.items()
        },
        'devices': {
            key: {
                **_on_device(DEVICES[key], workload, needs),
                'measured_by_others': [asdict(run) for run in published.runs_on(key)],
            }
            for key in arguments.device
        },
    }


@dataclass(frozen=True)
class _Workload:
    """The policy whose inference is judged, and how it runs.

    Attributes:
        precision: of the large matrices, a key of `MATRIX_BYTES`.
        views: cameras with a new image at a miss.
        answer_tokens: most tokens of an answer; None for other heads.
        rows: loaded numbers of prompt rows.
        kernels: PyTorch's kernel launches by the implementation of the expert's layers; empty
            where not counted.
    """

    counts: PolicyCounts
    precision: str
    views: int
    steps: int
    answer_tokens: int | None
    rows: tuple[int, ...]
    kernels: Mapping[str, Kernels]


def _on_device(
    device: Device,
    workload: _Workload,
    needs: Mapping[str, Mapping[int, MemoryNeed]],
) -> dict[str, Any]:
    """Return what one device makes of the workload: builds, what fits, floors of every phase."""
    from vla_tools.performance.roofline import fits, largest_engine_bytes

    precision = workload.precision
    build = _build_on(device, largest_engine_bytes(workload.counts, MATRIX_BYTES[precision]))
    # Engines run only where they were built, if need be with swap.
    builds = {'tensorrt': build['swap_bytes'] is not None}
    return {
        **asdict(device),
        'note': device.note(precision),
        'build': build,
        'fits': {
            backend: {
                _up_to(rows): builds.get(backend, True) and fits(need, device)
                for rows, need in of_backend.items()
            }
            for backend, of_backend in needs.items()
        },
        **_times_on(device, workload),
    }


def _times_on(device: Device, workload: _Workload) -> dict[str, Any]:
    """Return floors, predictions and shares of a miss on a device, by rows and phase."""
    from vla_tools.performance.roofline import (
        miss_shares,
        phase_floors,
        predicted_ms,
        published_rates,
    )

    counts, precision = workload.counts, workload.precision
    rates = published_rates(device, precision)
    floors, shares, predicted = {}, {}, {}
    for rows in workload.rows:
        found = phase_floors(
            counts,
            rates,
            precision=precision,
            rows=rows,
            steps=workload.steps,
            views=workload.views,
        )
        floors[f'{rows}_rows'] = {phase: asdict(one) for phase, one in found.items()}
        shares[f'{rows}_rows'] = miss_shares(found, workload.views)
        if rows == 1:
            predicted = {
                run_by: predicted_ms(found, one, views=workload.views, steps=workload.steps)
                for run_by, one in workload.kernels.items()
            }
    return {'floors_ms': floors, 'predicted_ms': predicted, 'miss_shares': shares}


def _sizes(need: MemoryNeed) -> dict[str, int]:
    return {**asdict(need), 'total': need.total}


def _build_on(device: Device, largest: int) -> dict[str, Any]:
    """Bytes of an engine build: device, host (not in the tables), swap (None: no help)."""
    from vla_convert.export.tensorrt.build import DEFAULT_WORKSPACE, MemoryEstimate

    build = MemoryEstimate.of(largest, DEFAULT_WORKSPACE)
    free = int((device.memory_gib - device.reserved_gib) * GIB)
    if device.shares_memory:
        need, host, swap = build.device + build.host, 0, build.shared_swap(free)
    else:
        need, host, swap = build.device, build.host, 0 if build.device <= free else None
    return {'memory_bytes': need, 'host_bytes': host, 'swap_bytes': swap, 'fits': swap == 0}


def _workload(arguments: argparse.Namespace) -> tuple[_Workload, PolicyDims]:
    """Return the policy that the command line names, as it is to run, and its dimensions."""
    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.models.shapes.operation_counts import count_operations, counts_of
    from vla_tools.performance.roofline import COUNTED_PRECISIONS

    published, views = preset(arguments.model), arguments.views
    rows: tuple[int, ...] = (1, 2)
    if published is not None:
        name, dims = published
        if views:
            # Each has a frame of every step.
            dims = with_cameras(dims, views * (observation_steps(dims) or 1))
        counts, family = count_operations(name, dims), find_family(name)
        steps = family.denoise_steps
        # Without language there is no second prompt row.
        rows = rows if family.has_language else (1,)
    elif Path(arguments.model).exists():
        bundle = read_bundle(arguments.model, verify=False)
        spec, counts = bundle.spec, counts_of(bundle)
        dims, steps, family = spec.dims, spec.denoise_steps, find_family(spec.family)
        if spec.advantage is None:
            # It cannot be guided, and nothing builds or loads a second row for it.
            rows = (1,)
        if views and views > dims.cameras:
            raise ValueError(f'--views {views}: this policy has {dims.cameras} cameras')
    else:
        raise ValueError(
            f"MODEL '{arguments.model}' is neither the folder of a bundle nor a published size"
            f'{did_you_mean(arguments.model, preset_names())}'
        )
    if not family.takes_steps and arguments.steps not in (None, 1):
        raise ValueError(
            f'--steps {arguments.steps}: the head of {family.name} ({family.head}) runs once'
        )
    answer_tokens = None
    if family.head == 'tokens':
        # An answer of tokens cannot be guided.
        answer_tokens, rows = token_dims(dims).answer_length, (1,)
    counted = arguments.precision in COUNTED_PRECISIONS
    workload = _Workload(
        counts,
        arguments.precision,
        views or dims.cameras,
        arguments.steps or steps,
        answer_tokens,
        rows,
        performance_figures(arguments.model).kernels if counted else {},
    )
    return workload, dims


def _up_to(rows: int) -> str:
    """The numbers of rows that are built, as a key in the JSON."""
    return '1_row' if rows == 1 else f'1_to_{rows}_rows'
