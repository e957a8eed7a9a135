"""Time tables of Multi-Task DiT: what a time adds to the modulations, in numpy."""

from __future__ import annotations

import math

import numpy as np

from vla_runtime.families.blocks.flow_time import layer_rows, linear_rows, silu, time_code_rows
from vla_runtime.families.multi_task_dit.dimensions import DitDims
from vla_runtime.files.safetensors_reader import SafetensorsReader

_erf = np.vectorize(math.erf, otypes=[np.float64])


class TransformerTimes:
    """Rows of the modulations by the training step (see `MultiTaskDit.time_conditioning`)."""

    def __init__(self, dims: DitDims, weights: SafetensorsReader) -> None:
        self._transformer, self._weights = dims.transformer, weights

    @property
    def width(self) -> int:
        return self._transformer.modulations

    def __call__(self, times: np.ndarray) -> np.ndarray:
        width = self._transformer.time_width
        seen = silu(self.features(times))
        parts = []
        for block in range(self._transformer.depth):
            weight = self._weights.read(f'transformer.blocks.{block}.modulation.weight')[:, :width]
            parts.append(linear_rows(seen, weight, np.zeros(len(weight), np.float32)))
        return np.concatenate(parts, axis=1)

    def features(self, times: np.ndarray) -> np.ndarray:
        """Return the time features (N, time_width) of training steps (N,)."""
        x = time_code_rows(times, self._transformer.time_width)
        for name in ('transformer.time1', 'transformer.time2'):
            x = gelu(layer_rows(x, self._weights, name))
        return x


class FlowTimes(TransformerTimes):
    """Rows of the modulations by the flow time, which the transformer counts from the noise on."""

    def __call__(self, times: np.ndarray) -> np.ndarray:
        return super().__call__(np.float32(1.0) - np.asarray(times, np.float32))


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU in its exact form (arXiv 1606.08415), in float64."""
    wide = x.astype(np.float64)
    found: np.ndarray = (0.5 * wide * (1.0 + _erf(wide / math.sqrt(2.0)))).astype(np.float32)
    return found
