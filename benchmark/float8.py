"""Chunks in 8-bit floating point beside float32: the shipped policies, and the golden cases.

The shipped policies infer on what the demo policy sees at its task (as int8 is calibrated on), from
the same noise in every precision; errors are those of the joint targets, in radians, largest and
root mean square. Parts of the network stay in bfloat16 by turns, to see where the error comes from.
The golden cases have random weights; their errors are relative to the largest action, if above 1.
fp8 is emulated on the CPU, which gives the numbers of a GPU up to the order of sums.

    python benchmark/float8.py
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from measurement import write_result
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / 'test'))
from golden_chunks import chunk_and_reference, golden_cases  # isort: skip

from vla_runtime.engines.tolerances import error_of
from vla_runtime.engines.torch import weights
from vla_runtime.policy import Policy
from vla_runtime.types import Observation
from vla_tabletop.study.calibration import demo_observations

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ('demo', 'demo_act', 'demo_smolvla')
# Endings of the weights that stay in bfloat16.
KEPT = {
    'the first products of the MLPs': ('.gate.weight', '.up.weight', '.fc1.weight'),
    'the last products of the MLPs': ('.down.weight', '.fc2.weight'),
    'queries, keys and values': ('.q.weight', '.k.weight', '.v.weight'),
    "attention's last products": ('.out.weight',),
}
PACKAGES = ('torch', 'numpy', 'mujoco')


def chunks(bundle: Path, precision: str, seen: Sequence[Observation]) -> np.ndarray:
    """Joint targets (observations, H, joints), the noise of each that of its number."""
    loaded = Policy.load(bundle, 'torch', precision=precision, threads=1, verify=False)
    with closing(loaded) as policy:
        return np.stack(
            [policy.infer(look, number=number)[0].actions for number, look in enumerate(seen)]
        )


def kept_in_half(ends: tuple[str, ...]) -> Callable[[nn.Module], set[str]]:
    """`product_names` without the names that end so."""
    every = weights.product_names
    return lambda network: {name for name in every(network) if not name.endswith(ends)}


def errors_of_policy(bundle: Path) -> dict[str, Any]:
    """Errors of a policy's joint targets in each precision, and with parts kept in bfloat16."""
    seen = demo_observations(bundle)
    expected = chunks(bundle, 'float32', seen)

    def measured(found: np.ndarray) -> dict[str, float]:
        off = found - expected
        return {
            'largest_rad': float(np.abs(off).max()),
            'rms_rad': float(np.sqrt(np.square(off).mean())),
        }

    errors = {one: measured(chunks(bundle, one, seen)) for one in ('bfloat16', 'fp8')}
    for part, ends in KEPT.items():
        with mock.patch.object(weights, 'product_names', kept_in_half(ends)):
            errors[f'fp8 without {part}'] = measured(chunks(bundle, 'fp8', seen))
    return {'observations': len(seen), 'errors': errors}


def errors_of_cases() -> dict[str, dict[str, float]]:
    """Largest error of each golden case's chunk, by precision."""
    found: dict[str, dict[str, float]] = {}
    for name, case in golden_cases().items():
        for precision in ('float32', 'bfloat16', 'fp8'):
            chunk, expected = chunk_and_reference(case, precision)
            largest, _ = error_of(chunk.numpy(), expected.numpy())
            found.setdefault(name, {})[precision] = largest
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    summary, _, rest = str(__doc__).partition('\n')
    argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    # Every load says that it emulates.
    logging.disable(logging.WARNING)
    figures = {
        'policies': {name: errors_of_policy(ROOT / 'engines' / name) for name in POLICIES},
        'golden_cases': errors_of_cases(),
    }
    for name, policy in figures['policies'].items():
        for what, error in policy['errors'].items():
            print(
                f'{name:13} {what:45} rms {1e3 * error["rms_rad"]:5.2f} mrad, largest '
                f'{1e3 * error["largest_rad"]:5.1f}'
            )
    for name, by_precision in figures['golden_cases'].items():
        print(f'{name:13}', ', '.join(f'{one} {e:.1e}' for one, e in by_precision.items()))
    print('wrote', write_result('float8', figures, PACKAGES))
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
