"""Performance figures of the published Evo-1."""

from __future__ import annotations

from vla_runtime.family.performance_figures import PerformanceFigures, vla_cpp_runs

EVO1_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (996.05, 696.21),
            'orin-nano': (3551.56, 2667.63),
            'rtx-3060': (486.74, 348.75),
            'rtx-5090': (55.2, 17.8),
        }
    )
)
