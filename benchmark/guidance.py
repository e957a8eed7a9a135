"""Cost of guidance on a mid-size policy (100 M parameters, 3 cameras) on a CPU.

In every round, one after the other: unguided, fused and serial inferences, each with everything
new (vision of three cameras, prefix, denoise) and with everything in the cache. A guided one is
compared with what `performance.operation_counts` makes of the unguided one: vision once, prefix
and expert for two rows. So what slows the machine slows both sides of a ratio.
Targets: fused at most 1.05 of the count, and never slower than serial.

    python benchmark/guidance.py [--rounds 12] [--threads 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from measurement import percentiles, write_result
from mid_size import DIMS, PACKAGES, STEPS, look, mid_size_policy, parse_arguments

from vla_runtime.inference.settings import PolicySettings
from vla_runtime.performance.operation_counts import count_operations
from vla_runtime.policy import Policy
from vla_runtime.types import InferenceReport

SETTINGS = {
    'unguided': PolicySettings(),
    'fused': PolicySettings(cfg_enabled=True, cfg_beta=2.0, cfg_mode='fused'),
    'serial': PolicySettings(cfg_enabled=True, cfg_beta=2.0, cfg_mode='serial'),
}
PHASES = ('vision', 'prefix', 'denoise', 'total')
# Twice as much of what is shorter: a single disturbance weighs more there.
_HITS = 2


def measure(policy: Policy, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds per phase: `unguided miss`, `fused hit` and so on to phase to rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for round_ in range(rounds + 1):
        # Every kind is first as often as last.
        names = list(SETTINGS)[:: 1 if round_ % 2 else -1]
        for name in names:
            policy.settings = SETTINGS[name]
            policy.reset()
            reports = [policy.infer(look(round_))[1] for _ in range(1 + _HITS)]
            runs = {'unguided': 1, 'fused': 1, 'serial': 2}[name]
            assert reports[0].runs == {'vision': 3, 'prefix': runs, 'expert': STEPS * runs}
            assert all(report.runs['prefix'] == 0 for report in reports[1:])
            if round_:
                _add(found, f'{name} miss', reports[:1])
                _add(found, f'{name} hit', reports[1:])
    return found


def _add(
    found: dict[str, dict[str, list[float]]], kind: str, reports: list[InferenceReport]
) -> None:
    fastest = min(reports, key=lambda report: report.milliseconds['total'])
    phases = found.setdefault(kind, {phase: [] for phase in PHASES})
    for phase in PHASES:
        phases[phase].append(fastest.milliseconds[phase])


def counted(unguided: Mapping[str, np.ndarray]) -> np.ndarray:
    """Milliseconds that the counted operations of two rows take at the unguided one's speed."""
    one, two = (count_operations('pi05', DIMS).inference(steps=STEPS, rows=rows) for rows in (1, 2))
    expected = unguided['total'].copy()
    for phase in ('prefix', 'denoise'):
        expected += unguided[phase] * (two[phase].flops / one[phase].flops - 1)
    return expected


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Ratios within a round, and the times of every phase."""
    times = {
        kind: {phase: np.array(values) for phase, values in phases.items()}
        for kind, phases in found.items()
    }
    figures: dict[str, Any] = {}
    for what in ('miss', 'hit'):
        unguided, fused, serial = (times[f'{name} {what}'] for name in SETTINGS)
        for name, over, target in (
            ('fused_over_counted', counted(unguided), 1.05),
            ('fused_over_serial', serial['total'], 1.0),
            ('fused_over_unguided', unguided['total'], None),
        ):
            figures[f'{what}_{name}'] = {
                **percentiles(fused['total'] / over),
                'of_the_fastest': float(fused['total'].min() / over.min()),
                **({'target': target} if target else {}),
            }
    figures['ms'] = {
        kind: {phase: float(np.median(values)) for phase, values in phases.items()}
        for kind, phases in times.items()
    }
    return figures


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=12)
    with mid_size_policy(arguments.threads) as policy:
        figures = summary(measure(policy, arguments.rounds))
    for name, ratio in figures.items():
        if name != 'ms':
            print(
                f'{name:26s} median {ratio["median"]:.3f}   of the fastest '
                f'{ratio["of_the_fastest"]:.3f}   target {ratio.get("target", "-")}'
            )
    figures = {'beta': 2.0, 'threads': arguments.threads, **figures}
    print('wrote', write_result('guidance', figures, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()
