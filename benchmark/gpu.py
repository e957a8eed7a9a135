"""Checks and measures the CUDA path on a GPU machine: full-size pi0.5 with random weights.

Needs torch, numpy, pyyaml and safetensors and nothing else, and runs from the source tree:

    python benchmark/gpu.py [--quick] [--json OUT]

First what must be true (against the CPU in float32, in Triton kernels, every family,
graphs fresh, guidance, attention by lengths, overlap, memory), at a reduced size; then milliseconds
in bfloat16 for 1 to 3 views, one and two prompt rows, 10 denoise steps, cache hit and miss:
captured graphs, also with the expert in Triton kernels, and eager, beside the roofline. Captured
graphs with 3 views are sampled 200 times, with one row in Triton kernels 2,000 times, after 50 for
warming up.
Last it prints a table, and each target with whether it was met. `--only` does one half.

OUT is written before the first check and again after each check and each configuration, so that a
run that is killed leaves all that it had measured; `complete` in it says whether it came to its
end. Nothing begins after the budget, what runs then is cut off 2 minutes later, and half a minute
after that the process ends.

Exit code: 0, 1 where a check failed, a chunk was wrong or the process was ended, 2 without a GPU or
where OUT cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmark')]

from parts.gpu_run import (  # noqa: E402
    PACKAGES,
    Clock,
    OverTimeError,
    described,
    described_parser,
    device_facts,
    device_fault,
    ended_after,
    limited,
)

if TYPE_CHECKING:
    from parts.gpu_latency import Mode

BUDGET_S = 420.0
# Past the budget: the running part is cut off, then the process ends.
GRACE_S, LAST_S = 120.0, 150.0
# Seconds of one check, and the fraction of the budget for all.
CHECK_S, CHECKS_SHARE = 90.0, 0.3
Figures = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; see the module's docstring for the exit code."""
    arguments = _arguments(argv)
    # Importing PyTorch is part of the budget.
    clock = Clock(arguments.budget_s)
    with ended_after(arguments.budget_s + LAST_S):
        return _run(arguments, clock)


def _run(arguments: argparse.Namespace, clock: Clock) -> int:
    if reason := device_fault(arguments.device):
        print(f'error: {reason}', file=sys.stderr)
        return 2
    from vla_runtime.engines.torch.weights import compute_in_full_precision

    # The facts are those under which everything runs.
    compute_in_full_precision()
    figures: Figures = {
        'device': device_facts(arguments.device),
        'size': arguments.size,
        'only': arguments.only,
        'complete': False,
        'checks': {},
        'latency': [],
        'left_out': {},
    }
    try:
        # Before any measurement, so that a missing folder shows now.
        save(figures, arguments.json)
    except OSError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    size = 'tiny' if arguments.size == 'tiny' else 'reduced'
    share = 1.0 if arguments.only == 'checks' else CHECKS_SHARE
    checks = run_checks(arguments.device, size, clock, share)
    latency = run_latency(arguments, clock)
    for name, check in checks if arguments.only != 'latency' else ():
        figures['checks'][name] = check
        _save_or_say(figures, arguments.json, clock)
    for part, found in latency if arguments.only != 'checks' else ():
        if part == 'latency':
            figures['latency'].append(found)
        else:
            figures['left_out'].update(found)
        _save_or_say(figures, arguments.json, clock)
    figures['complete'] = True
    wrote = _save_or_say(figures, arguments.json, clock)
    show(figures)
    if wrote:
        print('wrote', wrote)
    passed = all(check['passed'] for check in figures['checks'].values())
    return 0 if passed and not any(result['fault'] for result in figures['latency']) else 1


def save(figures: Figures, out: Path | None) -> Path | None:
    """Update the targets and write the figures, where a file was named (OSError)."""
    from parts.gpu_latency import targets
    from parts.measurement import write_result

    figures['targets'] = [target._asdict() for target in targets(figures['latency'])]
    return write_result('gpu', figures, PACKAGES, out) if out else None


def _save_or_say(figures: Figures, out: Path | None, clock: Clock) -> Path | None:
    try:
        return save(figures, out)
    except OSError as error:
        # The table at the end is worth having without the file.
        clock.say(f'not written: {error}')
        return None


def run_checks(
    device: str, size: str, clock: Clock, share: float = CHECKS_SHARE
) -> Iterator[tuple[str, Figures]]:
    """Yield every check's name and finding; one that raises has failed, and the others still run.

    A check without time left fails.
    """
    from parts.gpu_checks import CHECKS, Finding

    least_left_s = (1 - share) * clock.budget_s
    for name, check in CHECKS.items():
        left_s = clock.left_s - least_left_s
        clock.say(f'check: {name} ...')
        try:
            if left_s <= 0:
                raise OverTimeError('not run: the other checks took the time of all')
            with limited(min(CHECK_S, left_s)):
                finding = check(device, size)
        except OverTimeError as error:
            finding = Finding(False, str(error))
        except Exception as error:
            finding = Finding(False, described(error))
        clock.say(f'  {"passed" if finding.passed else "FAILED"}: {finding.note}')
        yield name, vars(finding)


def run_latency(arguments: argparse.Namespace, clock: Clock) -> Iterator[tuple[str, Figures]]:
    """Yield `latency` with the result of a configuration, or `left_out` with why one is missing."""
    from parts.gpu_latency import configurations, summary

    wanted = configurations(arguments.quick, triton=arguments.device != 'cpu')
    measure_one = _measurement(arguments, clock)
    for views, rows, mode in wanted:
        label = f'{views} view(s), {rows} row(s), {mode.name}'
        try:
            if clock.left_s < 10.0:
                raise OverTimeError(f'{clock.left_s:.0f} s of the time budget were left')
            with limited(clock.left_s + GRACE_S):
                clock.say(f'{label} ...')
                result = measure_one(views, rows, mode)
        except OverTimeError as error:
            reason = str(error)
        except Exception as error:
            # Triton needs a compiler, two rows more memory: the rest is worth having.
            reason = described(error)
        else:
            clock.say(f'  {summary(result)}')
            yield 'latency', result
            continue
        clock.say(f'left out: {label}: {reason}')
        yield 'left_out', {label: reason}


def _measurement(
    arguments: argparse.Namespace, clock: Clock
) -> Callable[[int, int, Mode], Figures]:
    from parts.gpu_latency import measure, samples_of
    from parts.random_policy import random_network, sized_dims

    networks: Figures = {}

    def measure_one(views: int, rows: int, mode: Mode) -> Figures:
        if mode.precision not in networks:
            networks.clear()
            clock.say(f'random weights: pi05, {arguments.size}, {mode.precision} ...')
            dims = sized_dims('pi05', arguments.size, cameras=1)
            networks[mode.precision] = random_network(
                'pi05', dims, arguments.device, mode.precision
            )
        samples = samples_of(views, rows, mode.name)
        repeats, warm_up = (5, 3) if arguments.quick else (samples.count, samples.warm_up)
        return measure(
            networks[mode.precision],
            'pi05',
            views,
            rows,
            mode,
            repeats=repeats,
            # A slow GPU leaves time for the other configurations.
            most_s=max(5.0, samples.share * clock.left_s),
            warm_up=warm_up,
        )

    return measure_one


def show(figures: dict[str, Any]) -> None:
    """Print the short table."""
    from parts.gpu_latency import table
    from parts.measurement import Target

    print(f'\n{figures["device"]["name"]}, pi05 {figures["size"]}, 10 steps, median ms; bfloat16')
    print('\n'.join(table(figures['latency'])))
    for result in figures['latency']:
        if result['fault']:
            print(f'WRONG: {result["views"]} view(s), {result["rows"]} row(s), {result["fault"]}')
    for label, reason in figures['left_out'].items():
        print(f'left out: {label}: {reason}')
    for name, check in figures['checks'].items():
        print(f'{name:16s} {"passed" if check["passed"] else "FAILED"}  {check["note"]}')
    for target in figures['targets']:
        print(f'target: {Target(**target).line}')


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument('--quick', action='store_true', help='2 views only, 5 samples each')
    parser.add_argument('--json', type=Path, metavar='OUT', help='write all figures to this file')
    parser.add_argument('--only', choices=['checks', 'latency'], help='leave the other half out')
    parser.add_argument(
        '--budget-s',
        type=float,
        default=BUDGET_S,
        metavar='S',
        help=f'begin nothing later, end {LAST_S:.0f} s later at most (default: {BUDGET_S:.0f})',
    )
    # For the tests of this script, which have no GPU.
    parser.add_argument('--device', choices=['cuda', 'cpu'], default='cuda', help=argparse.SUPPRESS)
    parser.add_argument('--size', choices=['full', 'tiny'], default='full', help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == '__main__':
    raise SystemExit(main())
