"""Common parts of every measurement: percentiles, package versions, and the machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from vla_runtime.engines.cpu import cpu_name


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and load of this machine; never its name."""
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return {
        'cpu': cpu_name(),
        'cores': os.cpu_count(),
        'memory_gib': round(memory / 2**30),
        'system': platform.platform(terse=True),
        'load_1min': round(os.getloadavg()[0], 2),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions; a package that is not installed is left out.

    An imported module is asked first: PyTorch's version names its build (`2.13.0+cpu`), which the
    package's may lack.
    """
    found = {'python': platform.python_version()}
    for package in packages:
        imported = getattr(sys.modules.get(package), '__version__', None)
        try:
            found[package] = str(imported or metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    return found


def percentiles(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return median, p95, p99, maximum and count."""
    values = np.asarray(samples, dtype=float)
    return {
        'median': float(np.median(values)),
        'p95': float(np.percentile(values, 95)),
        'p99': float(np.percentile(values, 99)),
        'max': float(values.max()),
        'count': len(values),
    }
