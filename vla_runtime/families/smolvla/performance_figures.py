"""Performance figures of the published SmolVLA."""

from __future__ import annotations

from vla_runtime.family.performance_figures import Kernels, PerformanceFigures, vla_cpp_runs

SMOLVLA_FIGURES = PerformanceFigures(
    kernels={
        'torch': Kernels(vision=142, prefix=381, step=362, inputs=8),
        'triton': Kernels(vision=142, prefix=399, step=140, inputs=8),
    },
    runs=vla_cpp_runs(
        {
            'agx-orin': (205.95, 109.44),
            'orin-nano': (509.60, 284.03),
            'rtx-3060': (99.31, 42.94),
            'rtx-5090': (49.6, 16.1),
        }
    ),
)
