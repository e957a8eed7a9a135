"""Flow time embedding and its layers in numpy, for backends that run without PyTorch."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.files.safetensors_reader import SafetensorsReader

# Periods of the sines and cosines.
SHORTEST, LONGEST = 4e-3, 4.0
# Logarithm of the longest wavelength of a time code over the shortest.
_SPAN = math.log(10000.0)


def time_embedding(times: np.ndarray, width: int) -> np.ndarray:
    """Sine-cosine embedding of flow times, computed in float64; (N,) to (N, width) float32."""
    fraction = np.linspace(0.0, 1.0, width // 2)
    period = SHORTEST * (LONGEST / SHORTEST) ** fraction
    # Rounded to float32, as the networks get them.
    seen = np.asarray(times, np.float32).astype(np.float64)
    angle = seen[:, None] * (2.0 * math.pi / period)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


def time_code_rows(times: np.ndarray, width: int) -> np.ndarray:
    """Return `time_code.time_code` of training steps (N,), (N, width) float32."""
    half = width // 2
    frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-_SPAN / (half - 1)))
    angles = np.asarray(times, np.float32)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def linear_rows(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    # A product of its own for each row, so that a row's numbers do not depend on N.
    return np.matmul(weight, x[:, :, None])[:, :, 0] + bias


def layer_rows(x: np.ndarray, weights: SafetensorsReader, name: str) -> np.ndarray:
    return linear_rows(x, weights.read(f'{name}.weight'), weights.read(f'{name}.bias'))


def silu(x: np.ndarray) -> np.ndarray:
    return (x / (1.0 + np.exp(-x.astype(np.float64)))).astype(np.float32)


class ExpertDims(Protocol):
    """Dimensions of a policy with an action expert."""

    @property
    def expert(self) -> DecoderDims:
        """Sizes of the expert's stack."""


class ActionTimeTable:
    """The time's contribution to `action_time_in`, with bias, as `action_time.time_share`."""

    def __init__(self, dims: ExpertDims, weights: SafetensorsReader) -> None:
        self._width, self._weights = dims.expert.width, weights

    @property
    def width(self) -> int:
        return self._weights.shape('action_time_in.weight')[0]

    def __call__(self, times: np.ndarray) -> np.ndarray:
        layer = self._weights.read('action_time_in.weight')[:, self._width :]
        embedded = time_embedding(times, self._width)
        return linear_rows(embedded, layer, self._weights.read('action_time_in.bias'))
