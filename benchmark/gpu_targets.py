"""Targets of the CUDA path, and what a run of `gpu.py` says of each.

Full-size pi0.5 in bfloat16 with 3 views and 10 steps: times beside the roofline of the device, of
guidance beside none, and the slowest inferences beside the median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from target import Target

VIEWS = 3
# Samples of a mode and warm-ups before them: of the headline with one row, where the slowest count,
# with two rows, and of everything else.
SLOWEST, HEADLINE, OTHERS = (2000, 50), (200, 50), (30, 3)
# With PyTorch's operators, and with the expert's layers in Triton kernels.
MODES = ('graph', 'triton, graph')


def samples_of(views: int, rows: int, mode: str) -> tuple[int, int]:
    """Return samples and warm-ups of a configuration."""
    if views != VIEWS or mode not in MODES:
        return OTHERS
    return SLOWEST if rows == 1 else HEADLINE


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
        if result['views'] == VIEWS and result['mode'] == mode
    }
    one, two = (found.get(rows) for rows in (1, 2))

    def median(result: Mapping[str, Any] | None, phase: str) -> float | None:
        return None if result is None else float(result['milliseconds'][phase]['median'])

    def least(phase: str) -> float | None:
        floors = None if one is None else one['least_ms']
        return None if floors is None else float(floors[phase])

    slowest = None if one is None else float(one['milliseconds']['miss']['p99'])
    found_by_name = {
        'miss, of its roofline': (1.5, _ratio(median(one, 'miss'), least('miss'))),
        'hit, of its roofline': (2.5, _ratio(median(one, 'hit'), least('hit'))),
        'guided miss, of a miss': (1.5, _ratio(median(two, 'miss'), median(one, 'miss'))),
        'guided hit, of a hit': (1.15, _ratio(median(two, 'hit'), median(one, 'hit'))),
        'p99 of a miss, of its median': (1.1, _ratio(slowest, median(one, 'miss'))),
    }
    return [Target(f'{mode}: {name}', *figures) for name, figures in found_by_name.items()]


def _ratio(time: float | None, reference: float | None) -> float | None:
    return None if time is None or reference is None else time / reference
