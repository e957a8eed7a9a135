"""Performance figures of the published GR00T N1.5 and N1.7."""

from __future__ import annotations

from vla_runtime.family.performance_figures import PerformanceFigures, vla_cpp_runs

N15_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (409.57, 129.22),
            'orin-nano': (1182.67, 299.38),
            'rtx-3060': (203.73, 51.09),
            'rtx-5090': (29.4, 5.9),
        }
    )
)
N17_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (367.43, 145.29),
            'rtx-3060': (139.89, 44.63),
            'rtx-5090': (33.4, 6.2),
        }
    )
)
