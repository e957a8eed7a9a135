"""Predicted times of PyTorch on CUDA: counted kernels, and the least time of their work.

A prediction is the roofline's least time plus a fixed cost for each kernel. Nothing here was
measured on a GPU. Left out are products and attention that fill few multiprocessors: they take
longer than their least time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vla_runtime.performance.roofline import Floor

# About what a kernel takes that is too small to fill a GPU.
SECONDS_A_KERNEL = 4e-6


@dataclass(frozen=True)
class Kernels:
    """Kernels that a GPU launches for one inference of one prompt row.

    Attributes:
        vision: for one view.
        prefix: for the prefix.
        step: for one denoise step.
        inputs: for what a chunk's denoise steps are given, once a chunk.
    """

    vision: int
    prefix: int
    step: int
    inputs: int

    def phases(self, *, views: int, steps: int) -> dict[str, int]:
        """Return the kernels of each phase, under the names of `roofline.phase_floors`."""
        denoise = steps * self.step + self.inputs
        return {
            'vision': self.vision,
            'prefix': self.prefix,
            'step': self.step,
            'denoise': denoise,
            'miss': views * self.vision + self.prefix + denoise,
            'hit': denoise,
        }


# Of the fused modules, attention without a mask and products with epilogues, counted by
# benchmark/kernels.py: by family, with PyTorch's operators and with the expert's layers in Triton
# kernels. The number does not depend on widths.
COUNTED = {
    'pi05': {
        'torch': Kernels(vision=307, prefix=514, step=632, inputs=8),
        'triton': Kernels(vision=307, prefix=513, step=132, inputs=8),
    },
    'smolvla': {
        'torch': Kernels(vision=143, prefix=536, step=527, inputs=8),
        'triton': Kernels(vision=143, prefix=554, step=123, inputs=8),
    },
}
# Other precisions have other casts, masks and scales.
COUNTED_PRECISIONS = ('bfloat16', 'float16')


def predicted_ms(
    floors: Mapping[str, Floor], kernels: Kernels, *, views: int, steps: int
) -> dict[str, float]:
    """Return the predicted milliseconds of each phase.

    Args:
        floors: of `roofline.phase_floors` for one prompt row.
        kernels: of the policy.
        views: cameras whose image has changed at a miss.
        steps: denoise steps.
    """
    return {
        phase: floors[phase].milliseconds + 1e3 * SECONDS_A_KERNEL * count
        for phase, count in kernels.phases(views=views, steps=steps).items()
    }
