"""Gain of `pipeline: throughput` on a mid-size policy (100 M parameters, 3 cameras) on a CPU.

In every round, one after the other: the same stream of requests, each with everything new (vision
of three cameras, prefix, denoise) and there as soon as there is room for it, in `latency`, in
`throughput`, and in `latency` on twice the threads, which are the cores that `throughput` uses. A
stream's rate is that from its first chunk to its last. So what slows the machine slows both sides
of a ratio. `families.operation_counts` allows `throughput` the sum of the two halves, encoding
and denoising, over the longer one; so does the time that they take in `latency`.
Intervals are those of the median, by bootstrap. It needs two cores for every thread.

    python benchmark/throughput.py [--rounds 12] [--threads 1]
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measurement import in_turn, median_interval, percentiles, write_result
from mid_size import DIMS, PACKAGES, STEPS, look, mid_size_policy, parse_arguments

from vla_runtime.families.operation_counts import count_operations
from vla_runtime.inference.settings import PipelineMode, PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import InferenceReport, Observation

# Pipeline, and how many times the threads.
KINDS: dict[str, tuple[PipelineMode, int]] = {
    'latency': ('latency', 1),
    'throughput': ('throughput', 1),
    'latency_on_twice_the_threads': ('latency', 2),
}
# In a stream.
REQUESTS = 6
_ENCODING = ('tokens', 'images', 'vision', 'prefix')


def stream(
    policy: Policy, looks: Sequence[Observation], settings: PolicySettings
) -> tuple[float, list[InferenceReport]]:
    """Chunks a second from the first to the last of a stream, and their reports."""
    policy.reset()
    done: list[float] = []
    futures = []
    for observation in looks:
        futures.append(policy.submit(observation, settings=settings))
        futures[-1].add_done_callback(lambda _: done.append(perf_counter()))
    policy.drain()
    reports = [future.result()[1] for future in futures]
    for report in reports:
        # Nothing was found in the cache.
        assert report.runs['vision'] == len(report.cache.images)
        assert report.runs['prefix'] == 1
    return (len(done) - 1) / (done[-1] - done[0]), reports


def halves(reports: Sequence[InferenceReport]) -> tuple[float, float]:
    """Milliseconds of encoding and of denoising an inference, on average."""
    encoding = np.mean([sum(r.milliseconds[phase] for phase in _ENCODING) for r in reports])
    return float(encoding), float(np.mean([r.milliseconds['denoise'] for r in reports]))


def allowed(encoding: float, denoising: float) -> float:
    """Factor of the rate that two halves running at the same time allow."""
    return (encoding + denoising) / max(encoding, denoising)


def counted() -> float:
    """Factor that the counted operations allow."""
    work = count_operations('pi05', DIMS).inference(steps=STEPS)
    return allowed(work['vision'].flops + work['prefix'].flops, work['denoise'].flops)


def measure(policy: Policy, rounds: int, threads: int) -> dict[str, list[float]]:
    """Per kind its rates by round; of `latency` also `encoding` and `denoising`, milliseconds."""
    found: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        looks = [look(1 + round_ * REQUESTS + request) for request in range(REQUESTS)]
        for name in in_turn(list(KINDS), round_):
            pipeline, times = KINDS[name]
            torch.set_num_threads(times * threads)
            settings = PolicySettings(pipeline=pipeline)
            rate, reports = stream(policy, looks, settings)
            overlapped = [report.overlap_ms > 0 for report in reports[1:]]
            assert all(overlapped) if pipeline == 'throughput' else not any(overlapped)
            # The first round warms up what the policy's own warm-up has not.
            if round_:
                found.setdefault(name, []).append(rate)
                if name == 'latency':
                    for half, ms in zip(('encoding', 'denoising'), halves(reports), strict=True):
                        found.setdefault(half, []).append(ms)
    return found


def summary(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Ratios within a round, rates, and what was to be expected."""
    values = {name: np.array(numbers) for name, numbers in found.items()}
    gained = values['throughput'] / values['latency']
    by_time = allowed(np.median(values['encoding']), np.median(values['denoising']))
    ratios = {
        'throughput_over_latency': gained,
        'throughput_over_latency_on_twice_the_threads': (
            values['throughput'] / values['latency_on_twice_the_threads']
        ),
    }
    return {
        **{
            name: {**percentiles(ratio), 'median_95': median_interval(ratio)}
            for name, ratio in ratios.items()
        },
        'allowed': {'by_counted_operations': counted(), 'by_time_in_latency': float(by_time)},
        'chunks_per_s': {name: float(np.median(values[name])) for name in KINDS},
        'ms_in_latency': {
            half: float(np.median(values[half])) for half in ('encoding', 'denoising')
        },
    }


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=12)
    cores = len(os.sched_getaffinity(0))
    if cores < 2 * arguments.threads:
        raise SystemExit(
            f'--threads {arguments.threads}: two networks need {2 * arguments.threads} cores, '
            f'and there are {cores}'
        )
    with mid_size_policy(arguments.threads) as policy:
        figures = summary(measure(policy, arguments.rounds, arguments.threads))
    for name in ('throughput_over_latency', 'throughput_over_latency_on_twice_the_threads'):
        low, high = figures[name]['median_95']
        print(f'{name:46s} median {figures[name]["median"]:.3f} [{low:.3f}, {high:.3f}]')
    for name in ('allowed', 'chunks_per_s', 'ms_in_latency'):
        print(name, {key: round(value, 3) for key, value in figures[name].items()})
    figures = {'requests': REQUESTS, 'threads': arguments.threads, **figures}
    print('wrote', write_result('throughput', figures, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()
