"""Predicted times of PyTorch on CUDA: counted kernels, and the least time of their work.

A prediction is the roofline's least time plus a fixed cost for each kernel. Left out are products
and attention that fill few multiprocessors: they take longer than their least time.
"""

from __future__ import annotations

from collections.abc import Mapping

from vla_runtime.family.performance_figures import Kernels
from vla_runtime.performance.roofline import Floor

# About what a kernel takes that is too small to fill a GPU. On an H200 each kernel of a denoise
# step adds 4.1 µs to its least time with operators, 4.4 in Triton (benchmark/results/gpu.json).
SECONDS_A_KERNEL = 4e-6


# Precisions that kernels were counted in; others have other casts, masks and scales.
COUNTED_PRECISIONS = ('bfloat16', 'float16')


def predicted_ms(
    floors: Mapping[str, Floor], kernels: Kernels, *, views: int, steps: int
) -> dict[str, float]:
    """Return the predicted milliseconds of each phase.

    Args:
        floors: least times by phase, from `roofline.phase_floors`, for one prompt row.
        kernels: kernels of the policy.
        views: cameras whose image has changed at a miss.
        steps: denoise steps.
    """
    return {
        phase: floors[phase].milliseconds + 1e3 * SECONDS_A_KERNEL * count
        for phase, count in kernels.phases(views=views, steps=steps).items()
    }
