"""Record of a measurement: figures, command, versions and machine in one JSON file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.machine import machine, versions
from vla_tools.performance.measurement import percentiles

__all__ = [
    'RESULTS',
    'Target',
    'in_turn',
    'median_interval',
    'median_ratio',
    'percentiles',
    'write_result',
]

RESULTS = Path(__file__).parents[1] / 'results'


class Target(NamedTuple):
    """A figure that a run may reach at most; `found` is None where not measured.

    `samples`: measurements behind it, where their number matters.
    """

    name: str
    most: float
    found: float | None
    samples: int | None = None

    @property
    def line(self) -> str:
        """Line for a person."""
        if self.found is None:
            return f'{self.name}: not measured (at most {self.most:.3g})'
        met = 'met' if self.found <= self.most else 'NOT MET'
        over = '' if self.samples is None else f' over {self.samples:,} samples'
        return f'{self.name}: {self.found:.3g}{over} (at most {self.most:.3g}): {met}'


def in_turn(kinds: Sequence[str], round_: int) -> list[str]:
    """All kinds, each equally often at each position: the second of two equal ones took 0.95."""
    first = round_ % len(kinds)
    return [*kinds[first:], *kinds[:first]]


def median_interval(values: np.ndarray) -> list[float]:
    """The 95% interval of the median, by bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    return np.percentile(np.median(drawn, axis=1), [2.5, 97.5]).tolist()


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """Times as a part of the reference's in the same round: median and its 95% interval."""
    ratios = np.array(times) / np.array(reference)
    return {'median': float(np.median(ratios)), 'interval': median_interval(ratios)}


def commit() -> str | None:
    """Return the checkout's commit, with `+` if files were changed since; None without git."""
    words = ['git', '-C', str(RESULTS), 'describe', '--always', '--dirty=+', '--exclude=*']
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def write_result(
    name: str, figures: Mapping[str, Any], packages: Sequence[str], out: Path | None = None
) -> Path:
    """Write `benchmark/results/NAME.json`, or to `out`, with command and commit."""
    path = out or RESULTS / f'{name}.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    script = Path(sys.argv[0]).resolve()
    command = ' '.join(['python', f'{script.parent.name}/{script.name}', *sys.argv[1:]])
    result = {
        'command': command,
        'date': datetime.now(timezone.utc).strftime('%Y-%m-%d'),
        'machine': machine(),
        'versions': versions(packages),
        'commit': commit(),
        'figures': figures,
    }
    write_text(path, json.dumps(result, indent=1) + '\n')
    return path
