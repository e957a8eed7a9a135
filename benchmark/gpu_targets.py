"""Targets of the CUDA path, and what a run of `gpu.py` says of each.

Full-size pi0.5 in bfloat16 with 3 views and 10 steps: times beside the roofline of the device, of
guidance beside none, and the slowest inferences beside the median. Of a configuration whose chunk
is wrong nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from measurement import Target

VIEWS = 3
# With PyTorch's operators, and with the expert's layers in Triton kernels.
MODES = ('graph', 'triton, graph')
# Fewer samples have no 99th percentile.
LEAST_SAMPLES = 200


class Samples(NamedTuple):
    """Samples of a configuration.

    Attributes:
        count: samples that count.
        warm_up: samples before them.
        share: part of the time that is left which they may take.
    """

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
    """Return every target with what was found; None where it was not measured.

    Args:
        results: results of `gpu_latency.measure`.
    """
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
