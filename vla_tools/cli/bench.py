"""Measure a policy on this device: milliseconds per phase, cache hit and miss, memory, roofline.

Three kinds of inference, in turn: a miss (every view has a new image), one new view, and a hit (all
as before: denoise alone). 'least' is the roofline, from counted operations and bytes at the
device's published rates (vla_runtime roofline --list), or at rates measured here where it is in no
table, as every CPU; networks small enough for a cache can beat it. A CPU has none in half
precision.

--plot measures more: cost against views, denoise steps and prompt rows, one at a time, and
on paper against prompt tokens and actions; with it the least time of every published size on every
device of the table, and where its kernels were counted what PyTorch on CUDA is predicted to take.

--recommend measures every backend, device and precision that may run the bundle here, and prints
the fastest as words for the policy node's parameter file.

examples:
  vla_runtime bench engines/demo
  vla_runtime bench engines/mine --device cuda --precision bfloat16 --rows 2
  vla_runtime bench engines/mine --backend onnxruntime --views 1 --repeats 100
  vla_runtime bench engines/mine --backend tensorrt --precision float16 --json o.json
  vla_runtime bench engines/demo --repeats 10 --plot cost.html
  vla_runtime bench engines/mine --recommend
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._files import output_file
from vla_runtime.cli._numbers import at_least, between
from vla_runtime.engines.devices import MOST_THREADS, default_device
from vla_runtime.engines.preflight import AUTO, PRECISIONS, require_packages
from vla_runtime.engines.triton_option import OFF, WORDS
from vla_runtime.family.declaration import MOST_DENOISE_STEPS
from vla_runtime.files.atomic_write import write_text

if TYPE_CHECKING:
    from vla_tools.performance.bench import BenchOptions

_PACKAGES = (
    'torch',
    'onnxruntime',
    'onnxruntime-gpu',
    'tensorrt',
    'cuda-python',
    'cuda-bindings',
    'numpy',
    'opencv-python-headless',
)
# All times stay in memory.
_MOST_REPEATS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('bundle', type=Path, metavar='BUNDLE', help='the folder')
    parser.add_argument(
        '--backend', default=AUTO, help='runs the networks (default: auto, the first in order)'
    )
    parser.add_argument(
        '--device',
        help="cpu, cuda, cuda:N, or tensorrt for ONNX Runtime's TensorRT provider (default: cpu; "
        'with --backend tensorrt: cuda)',
    )
    parser.add_argument(
        '--precision',
        choices=[AUTO, *PRECISIONS],
        default=AUTO,
        help="of the large matrices (default: auto, the fewest bits that passed, by the bundle's "
        'receipt)',
    )
    parser.add_argument(
        '--views', type=at_least(1), metavar='V', help='cameras that see something (default: all)'
    )
    parser.add_argument(
        '--rows', type=int, choices=(1, 2), default=1, help='2: guided (default: 1)'
    )
    parser.add_argument(
        '--steps',
        type=between(1, MOST_DENOISE_STEPS),
        metavar='N',
        help="denoise steps, at most 100 of a flow (default: the bundle's)",
    )
    parser.add_argument(
        '--repeats',
        type=between(1, _MOST_REPEATS),
        default=30,
        metavar='N',
        help='of each kind (default: 30)',
    )
    parser.add_argument(
        '--threads',
        type=between(0, MOST_THREADS),
        metavar='N',
        help='CPU threads of each network; 0: all cores but one (default: OMP_NUM_THREADS, else 0)',
    )
    parser.add_argument(
        '--triton',
        choices=WORDS,
        default=OFF,
        help="the action expert's layers in Triton kernels, on CUDA (default: off)",
    )
    parser.add_argument(
        '--plot', type=output_file, metavar='OUT', help='measure more, and draw it: an HTML page'
    )
    parser.add_argument(
        '--recommend',
        action='store_true',
        help='measure whatever may run here; print the fastest for the parameter file',
    )
    parser.add_argument(
        '--json',
        type=output_file,
        metavar='OUT',
        help='write all figures to this file (-: standard output)',
    )


def main(arguments: argparse.Namespace) -> int:
    """Measure and print; 2 where bundle, device or options cannot be served."""
    from vla_runtime.files.machine import machine, versions
    from vla_tools.performance.bench import BenchOptions, run_bench

    options = BenchOptions(
        backend=arguments.backend,
        device=arguments.device or default_device(arguments.backend),
        precision=arguments.precision,
        views=arguments.views,
        rows=arguments.rows,
        steps=arguments.steps,
        repeats=arguments.repeats,
        threads=arguments.threads,
        triton=arguments.triton,
    )
    try:
        if arguments.plot and arguments.plot == arguments.json:
            raise ValueError(f'--plot and --json are both {arguments.plot}: name two files')
        if arguments.recommend:
            if arguments.plot or arguments.json:
                raise ValueError('--recommend writes no file: leave out --plot and --json')
            from vla_tools.performance.bench import recommend

            print(recommend(arguments.bundle, options, arguments.device, _progress))
            return 0
        if arguments.plot:
            require_packages('matplotlib')
        figures = run_bench(arguments.bundle, options, _progress)
        # Files are written whether or not somebody still reads, and the table shown whether or not
        # the files could be written.
        try:
            result = {
                'command': shlex.join(['vla_runtime', *sys.argv[1:]]),
                'date': datetime.now(timezone.utc).strftime('%Y-%m-%d'),
                'machine': machine(),
                'versions': versions(_PACKAGES),
                'figures': figures,
            }
            if arguments.plot:
                _plot(arguments, options, result)
            if arguments.json:
                write_text(arguments.json, json.dumps(result, indent=1) + '\n')
        finally:
            print(describe(figures))
        for path in filter(None, (arguments.plot, arguments.json)):
            print(f'\nwrote {path}')
    except (RuntimeError, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


def _plot(arguments: argparse.Namespace, options: BenchOptions, result: dict[str, Any]) -> None:
    """Measure the sweeps, add them to the result, and write the page."""
    from tqdm import tqdm

    from vla_tools.performance.cost_page import cost_page
    from vla_tools.performance.cost_sweep import (
        Setup,
        published_floors,
        published_predictions,
        run_sweep,
    )
    from vla_tools.performance.roofline import Rates

    figures = result['figures']
    chosen = {name: figures[name] for name in ('backend', 'precision', 'threads', 'triton')}
    figures['cost'] = run_sweep(
        arguments.bundle,
        replace(options, **chosen),
        Setup(figures['views'], figures['steps'], figures['rows']),
        Rates(**figures['rates']) if figures['rates'] else None,
        _progress,
    )
    try:
        figures['published'] = published_floors(
            lambda names: tqdm(names, desc='count published sizes', unit='size', disable=None)
        )
    except ValueError as error:
        figures['published'] = {}
        figures['cost']['notes'].append(f'published sizes: {error}')
    figures['predicted'] = published_predictions(figures['published'])
    write_text(arguments.plot, cost_page(result))


def describe(figures: Mapping[str, Any]) -> str:
    """The figures as lines for people."""
    where = figures['device_name'] or figures['device']
    lines = [
        f'{figures["policy"]}: {figures["backend"]} on {where}, {figures["precision"]}, '
        f'{figures["views"]} view(s), {figures["rows"]} row(s), {figures["steps"]} denoise steps, '
        f'{figures["threads"]} thread(s), {figures["repeats"]} of each kind',
    ]
    if figures['why']:
        lines.append(f'chosen: {figures["why"]}')
    for kind, phases in figures['milliseconds'].items():
        least_title = f'{"least":>9}  {"of least":>8}' if figures['rates'] else ''
        lines += ['', f'{kind + ", ms":20}{"median":>9}{"p95":>9}{"p99":>9}{least_title}']
        floors = figures['floors_ms'].get(kind, {})
        for phase, found in phases.items():
            least = _least(phase, floors)
            lines.append(
                f'  {phase:18}{found["median"]:>9.2f}{found["p95"]:>9.2f}{found["p99"]:>9.2f}'
                + (f'{least:>9.3g}  {found["median"] / least:>8.1f}' if least else '')
            )
    rates, memory = figures['rates'], figures['memory']
    if rates:
        rate = f'{rates["flops_per_s"] / 1e12:.3g} TFLOP/s, {rates["bytes_per_s"] / 1e9:.3g} GB/s'
        lines += ['', f"'least' from {rate}; {rates['source']}"]
    elif figures['device'] == 'cpu' and figures['precision'] != 'float32':
        lines += [
            '',
            f"no 'least': on a CPU every library computes {figures['precision']} in its own way, "
            'so there is no rate to compare with',
        ]
    else:
        lines += [
            '',
            "no 'least': this device is in no table, and to measure its rates a PyTorch is needed "
            'that runs on it',
        ]
    lines += [
        f'resident memory: {_mebibytes(memory["resident_peak"])} at most, '
        f'{_mebibytes(memory["resident_before"])} before loading',
        'CUDA graphs: ' + ', '.join(f'{name} {how}' for name, how in figures['cuda_graph'].items()),
    ]
    if memory['device_is']:
        size = '' if memory['device'] is None else f'{_mebibytes(memory["device"])} '
        lines.append(f'device memory: {size}{memory["device_is"]}')
    lines += _power_lines(figures['power'])
    lines += [f'note: {note}' for note in figures['notes']]
    return '\n'.join(lines)


def _power_lines(power: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Power mode, clocks and the hottest zone before and after; no line for what is not there."""
    lines = []
    if mode := power['after'].get('power_mode'):
        lines.append(f'power mode: {mode}')
    if clocks := power['after'].get('clocks'):
        lines.append(
            'clocks after it: '
            + ', '.join(
                f'{name} {clock["now_mhz"]} MHz'
                + (f' of {clock["most_mhz"]}' if 'most_mhz' in clock else '')
                for name, clock in clocks.items()
                if 'now_mhz' in clock
            )
        )
    hottest = [
        max(zones.items(), key=lambda zone: zone[1])
        for when in ('before', 'after')
        if (zones := power[when].get('celsius'))
    ]
    if len(hottest) == 2:
        (first, cold), (last, warm) = hottest
        lines.append(f'hottest: {first} {cold:.0f} °C before, {last} {warm:.0f} °C after')
    return lines


def _mebibytes(count: int | None) -> str:
    return 'not known' if count is None else f'{count / 2**20:,.0f} MiB'


def _least(phase: str, floors: Mapping[str, Mapping[str, float]]) -> float | None:
    """The floor of a phase; of the whole inference their sum."""
    if phase == 'total' and floors:
        return sum(floor['milliseconds'] for floor in floors.values())
    return floors[phase]['milliseconds'] if phase in floors else None


def _progress(rounds: range) -> Iterable[int]:
    from tqdm import tqdm

    return tqdm(rounds, desc='measure', unit='round', disable=None)
