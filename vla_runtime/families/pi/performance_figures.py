"""Performance figures of the published pi0 and pi0.5."""

from __future__ import annotations

from vla_runtime.family.performance_figures import Kernels, PerformanceFigures, vla_cpp_runs

PI05_FIGURES = PerformanceFigures(
    kernels={
        'torch': Kernels(vision=306, prefix=339, step=412, inputs=8),
        'triton': Kernels(vision=306, prefix=338, step=155, inputs=8),
    },
    runs=vla_cpp_runs({'rtx-5090': (56.1, 11.4)}),
)
PI0_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (580.22, 177.96),
            'orin-nano': (1484.75, 300.92),
            'rtx-3060': (261.58, 49.94),
            'rtx-5090': (52.1, 11.6),
        }
    )
)
