"""Checks and measures the CUDA path on a GPU machine: full-size pi0.5 with random weights.

Needs torch, numpy, pyyaml and safetensors and nothing else, and runs from the source tree:

    python benchmark/gpu.py [--quick] [--json OUT]

First what must be true (against the CPU in float32 and in fp8, graphs fresh, guidance, attention by
lengths, overlap, memory), at a reduced size; then milliseconds in bfloat16 for 1 to 3 views, one
and two prompt rows, 10 denoise steps, cache hit and miss: captured graphs, also with the expert in
Triton kernels, eager, and torch.compile, beside the roofline; and captured graphs in fp8 where the
GPU has it (from compute capability 8.9 on). Captured graphs with 3 views are sampled 2,000
times with one row and 200 times with two, after 50 for warming up. Stops measuring after 7 minutes
and says what it left out. Last it prints a table, and each target with whether it was met. Exit
code: 0, 1 where a check failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmark')]

BUDGET_S = 420.0
# Compiling the three full-size networks has been seen to take minutes.
COMPILE_S = 150.0
# Of the time that is left, what one configuration may sample for.
SHARE = 0.25
PACKAGES = ['torch', 'triton', 'numpy', 'pyyaml', 'safetensors']


class Clock:
    """Progress lines with the time since the start, and what is left of the budget."""

    def __init__(self, budget_s: float) -> None:
        self._start = perf_counter()
        self._budget_s = budget_s

    @property
    def left_s(self) -> float:
        return self._budget_s - (perf_counter() - self._start)

    def say(self, text: str) -> None:
        print(f'[{perf_counter() - self._start:5.0f} s] {text}', flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; see the module's docstring for the exit code."""
    arguments = _arguments(argv)
    if reason := device_fault(arguments.device):
        print(f'error: {reason}', file=sys.stderr)
        return 2
    clock = Clock(arguments.budget_s)
    small = arguments.size == 'tiny'
    checks = run_checks(arguments.device, 'tiny' if small else 'reduced', clock)
    results, left_out = run_latency(arguments, clock)
    from gpu_targets import targets

    figures = {
        'device': device_facts(arguments.device),
        'size': arguments.size,
        'checks': checks,
        'latency': results,
        'left_out': left_out,
        'targets': [target._asdict() for target in targets(results)],
    }
    show(figures)
    if arguments.json:
        from measurement import write_result

        print('wrote', write_result('gpu', figures, PACKAGES, arguments.json))
    return 0 if all(check['passed'] for check in checks.values()) else 1


def device_fault(device: str) -> str:
    """Explain why PyTorch cannot run on this device here; empty where it can."""
    from vla_runtime.engines.preflight import check_backend

    try:
        # The driver is asked first: PyTorch takes seconds to import.
        check_backend('torch', device)
    except ValueError as error:
        return str(error)
    return pytorch_without_gpu() if device == 'cuda' else ''


def pytorch_without_gpu() -> str:
    """Explain why PyTorch sees no GPU on a machine that has one; empty where it sees it."""
    import torch

    if torch.cuda.is_available():
        return ''
    built = torch.version.cuda or 'no CUDA'
    return (
        f'PyTorch {torch.__version__} ({built}) does not see the GPU that the driver shows; '
        'install a CUDA build of PyTorch that is no newer than the driver'
    )


def run_checks(device: str, size: str, clock: Clock) -> dict[str, dict[str, Any]]:
    """Every check's finding; one that raises has failed, and the others still run."""
    from gpu_checks import CHECKS, Finding

    found = {}
    for name, check in CHECKS.items():
        clock.say(f'check: {name} ...')
        try:
            finding = check(device, size)
        except Exception as error:
            finding = Finding(False, f'{type(error).__name__}: {error}')
        clock.say(f'  {"passed" if finding.passed else "FAILED"}: {finding.note}')
        found[name] = vars(finding)
    return found


def run_latency(
    arguments: argparse.Namespace, clock: Clock
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Results of all configurations that fit into the budget, and why the others are missing."""
    from gpu_latency import configurations, measure
    from gpu_targets import samples_of
    from random_policy import random_network, sized_dims

    from vla_runtime.engines.preflight import fp8_refusal

    dims = sized_dims('pi05', arguments.size, cameras=1)
    network, precision = None, ''
    results: list[dict[str, Any]] = []
    refusal = '' if arguments.device == 'cpu' else fp8_refusal(arguments.device)
    left_out: dict[str, str] = {'fp8': refusal} if refusal else {}
    wanted = configurations(
        arguments.quick,
        not arguments.no_compile,
        fp8=not refusal,
        triton=arguments.device != 'cpu',
    )
    for views, rows, mode in wanted:
        label = f'{views} view(s), {rows} row(s), {mode.name}'
        if clock.left_s < (COMPILE_S if mode.compiled else 10.0):
            left_out[label] = f'{clock.left_s:.0f} s of the time budget were left'
            clock.say(f'left out: {label}: {left_out[label]}')
            continue
        if mode.precision != precision:
            # One at a time: the memory of a mode is that of its own weights.
            network, precision = None, mode.precision
            clock.say(f'random weights: pi05, {arguments.size}, {precision} ...')
            network = random_network('pi05', dims, arguments.device, precision)
        clock.say(f'{label} ...')
        repeats, warm_up = (5, 3) if arguments.quick else samples_of(views, rows, mode.name)
        try:
            result = measure(
                network,
                'pi05',
                views,
                rows,
                mode,
                repeats=repeats,
                # A slow GPU leaves time for the other configurations.
                most_s=max(5.0, SHARE * clock.left_s),
                warm_up=warm_up,
                compiler=arguments.compiler,
            )
        except Exception as error:
            # torch.compile needs a compiler, two rows more memory: the rest is worth having.
            left_out[label] = f'{type(error).__name__}: {str(error).splitlines()[0][:200]}'
            clock.say(f'left out: {label}: {left_out[label]}')
            continue
        results.append(result)
    return results, left_out


def device_facts(device: str) -> dict[str, Any]:
    """Name, memory, capability, driver and CUDA version of the device, for the JSON."""
    import torch

    if device == 'cpu':
        return {'name': platform.processor() or platform.machine(), 'cuda': None}
    properties = torch.cuda.get_device_properties(0)
    return {
        'name': properties.name,
        'memory_gib': properties.total_memory / 2**30,
        'capability': f'{properties.major}.{properties.minor}',
        'multiprocessors': properties.multi_processor_count,
        # Both off: sums of products in full precision.
        'reduced_bfloat16_sums': torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        'tf32_convolutions': torch.backends.cudnn.allow_tf32,
        'cuda': torch.version.cuda,
        'driver': driver_version(),
    }


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where its tool is missing."""
    query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split('\n')[0].strip()


def show(figures: dict[str, Any]) -> None:
    """The short table."""
    from gpu_latency import table
    from target import Target

    print(f'\n{figures["device"]["name"]}, pi05 {figures["size"]}, 10 steps, median ms; bfloat16')
    print('\n'.join(table(figures['latency'])))
    for label, reason in figures['left_out'].items():
        print(f'left out: {label}: {reason}')
    for name, check in figures['checks'].items():
        print(f'{name:16s} {"passed" if check["passed"] else "FAILED"}  {check["note"]}')
    for target in figures['targets']:
        print(f'target: {Target(**target).line}')


def described_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring."""
    summary, _, rest = str(text).partition('\n')
    return argparse.ArgumentParser(
        description=summary,
        epilog=rest.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument(
        '--quick', action='store_true', help='2 views only, 5 samples each, no torch.compile'
    )
    parser.add_argument('--json', type=Path, metavar='OUT', help='write all figures to this file')
    parser.add_argument('--no-compile', action='store_true', help='leave torch.compile out')
    # For the tests of this script, which have no GPU.
    parser.add_argument('--device', choices=['cuda', 'cpu'], default='cuda', help=argparse.SUPPRESS)
    parser.add_argument('--size', choices=['full', 'tiny'], default='full', help=argparse.SUPPRESS)
    parser.add_argument('--budget-s', type=float, default=BUDGET_S, help=argparse.SUPPRESS)
    parser.add_argument('--compiler', default='inductor', help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.no_compile = arguments.no_compile or arguments.quick
    return arguments


if __name__ == '__main__':
    raise SystemExit(main())
