"""All notes for a person on a bundle that can be used."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.statistics import statistics_notes
from vla_runtime.bundle.summary import task_notes
from vla_runtime.bundle.unit_doubts import unit_notes


def bundle_notes(spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> list[str]:
    """Return notes on tasks without words, odd statistics, and units that these contradict."""
    return [
        *task_notes(spec),
        *statistics_notes(spec, statistics),
        *unit_notes(spec, statistics),
    ]
