"""Time table of Diffusion Policy: what a training step adds to the modulations, in numpy."""

from __future__ import annotations

import numpy as np

from vla_runtime.families.blocks.flow_time import layer_rows, linear_rows, time_code_rows
from vla_runtime.families.diffusion.dimensions import DiffusionDims
from vla_runtime.files.safetensors_reader import SafetensorsReader


class UNetTimes:
    """Rows of the U-Net's modulations by the training step (see `unet.UNet.time_modulation`)."""

    def __init__(self, dims: DiffusionDims, weights: SafetensorsReader) -> None:
        self._unet, self._weights = dims.unet, weights

    @property
    def width(self) -> int:
        return sum(self._unet.modulations)

    def __call__(self, times: np.ndarray) -> np.ndarray:
        width = self._unet.time_width
        seen = mish(self.features(times))
        parts = []
        for name in self._unet.block_names:
            weight = self._weights.read(f'unet.{name}.modulation.weight')[:, :width]
            parts.append(linear_rows(seen, weight, np.zeros(len(weight), np.float32)))
        return np.concatenate(parts, axis=1)

    def features(self, times: np.ndarray) -> np.ndarray:
        """Return the time features (N, time_width) of training steps (N,)."""
        code = time_code_rows(times, self._unet.time_width)
        return layer_rows(
            mish(layer_rows(code, self._weights, 'unet.time1')), self._weights, 'unet.time2'
        )


def mish(x: np.ndarray) -> np.ndarray:
    """x tanh(log(1 + exp x)) (arXiv 1908.08681), in float64."""
    wide = x.astype(np.float64)
    return (wide * np.tanh(np.logaddexp(wide, 0.0))).astype(np.float32)
