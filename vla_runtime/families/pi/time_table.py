"""The expert's time conditioning in numpy, for backends that run without PyTorch.

One row per flow time, equal to `FlowNetwork.time_conditioning`, computed from the few matrices of
`weights.safetensors` that the flow time passes through. The rows depend on the time alone, so they
are computed once per schedule and are an input of the expert engine.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.families.blocks.flow_time import layer_rows, silu, time_embedding
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.files.safetensors_reader import SafetensorsReader


class Pi05TimeTable:
    """pi0.5's time table: every norm's modulation, in the order in which they run."""

    def __init__(self, dims: PiDims, weights: SafetensorsReader) -> None:
        self._width, self._weights = dims.expert.width, weights
        norms = [
            f'blocks.{i}.{norm}'
            for i in range(dims.expert.depth)
            for norm in ('input_norm', 'post_norm')
        ]
        self._modulations = [f'expert.{norm}.modulation' for norm in (*norms, 'norm')]

    @property
    def width(self) -> int:
        return sum(self._weights.shape(f'{name}.weight')[0] for name in self._modulations)

    def __call__(self, times: np.ndarray) -> np.ndarray:
        embedded = time_embedding(times, self._width)
        for name in ('time_in', 'time_out'):
            embedded = silu(layer_rows(embedded, self._weights, name))
        return np.concatenate(
            [layer_rows(embedded, self._weights, name) for name in self._modulations], axis=1
        )
