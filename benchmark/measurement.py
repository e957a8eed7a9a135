"""How a measurement is written down: figures, command, versions and machine in one JSON file."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / 'results'


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and GPU of this machine; never its name."""
    cpu = ''
    info = Path('/proc/cpuinfo')
    if info.exists():
        lines = (line for line in info.read_text().splitlines() if line.startswith('model name'))
        cpu = next(lines, '').partition(':')[2].strip()
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return {
        'cpu': cpu or platform.processor() or platform.machine(),
        'cores': os.cpu_count(),
        'memory_gib': round(memory / 2**30),
        'system': platform.platform(terse=True),
        'load_1min': round(os.getloadavg()[0], 2),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions; a package that is not installed is left out."""
    found = {'python': platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def percentiles(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median, p95, p99 and maximum."""
    values = np.asarray(samples, dtype=float)
    return {
        'median': float(np.median(values)),
        'p95': float(np.percentile(values, 95)),
        'p99': float(np.percentile(values, 99)),
        'max': float(values.max()),
        'count': len(values),
    }


def write_result(
    name: str, figures: Mapping[str, Any], packages: Sequence[str], out: Path | None = None
) -> Path:
    """Write `benchmark/results/NAME.json`, or to `out`.

    The command is recorded as a user would type it from the project's root.
    """
    path = out or RESULTS / f'{name}.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    script = Path(sys.argv[0])
    command = ' '.join(['python', f'{script.parent.name}/{script.name}', *sys.argv[1:]])
    result = {
        'command': command,
        'date': datetime.now(timezone.utc).strftime('%Y-%m-%d'),
        'machine': machine(),
        'versions': versions(packages),
        'figures': figures,
    }
    path.write_text(json.dumps(result, indent=1) + '\n')
    return path
