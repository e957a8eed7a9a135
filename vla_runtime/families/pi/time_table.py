"""The expert's time conditioning in numpy, for backends that run without PyTorch.

One row a flow time, as `models.FlowPolicy.time_conditioning` gives it (arXiv 2410.24164,
2504.16054), from the few matrices of `weights.safetensors` that the flow time passes through. The
rows depend on the time alone: made once a schedule, they are an input of the expert engine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.families.pi.dimensions import PolicyDims

_DTYPES = {'F64': '<f8', 'F32': '<f4', 'F16': '<f2', 'BF16': '<u2'}
# Periods of the sines and cosines.
_SHORTEST, _LONGEST = 4e-3, 4.0


class TimeTable:
    """Flow times to time conditioning.

    Args:
        family: `pi05` or `pi0`.
        dims: of the policy.
        weights: its weights.safetensors; the few matrices needed are read when asked for.
    """

    def __init__(self, family: str, dims: PolicyDims, weights: Path) -> None:
        self._family, self._dims = family, dims
        self._weights = SafetensorsReader(weights)

    @property
    def width(self) -> int:
        """C, numbers of a row; read off the matrices' shapes.

        Raises:
            ValueError: one of them is missing.
        """
        names = ['action_time_in'] if self._family == 'pi0' else self._modulations()
        return sum(self._weights.shape(f'{name}.weight')[0] for name in names)

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """Rows of the table.

        Args:
            times: (N,) flow times in [0, 1].

        Returns:
            (N, C) float32
        """
        embedded = time_embedding(times, self._dims.expert.width)
        if self._family == 'pi0':
            layer = self._weights.read('action_time_in.weight')[:, self._dims.expert.width :]
            return _rows(embedded, layer, self._weights.read('action_time_in.bias'))
        for name in ('time_in', 'time_out'):
            embedded = _silu(self._linear(embedded, name))
        return np.concatenate(
            [self._linear(embedded, name) for name in self._modulations()], axis=1
        )

    def _modulations(self) -> list[str]:
        blocks = range(self._dims.expert.depth)
        norms = [f'blocks.{i}.{norm}' for i in blocks for norm in ('input_norm', 'post_norm')]
        return [f'expert.{norm}.modulation' for norm in (*norms, 'norm')]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        weight, bias = (self._weights.read(f'{name}.{part}') for part in ('weight', 'bias'))
        return _rows(x, weight, bias)


class SafetensorsReader:
    """Single tensors of a safetensors file in float32, bfloat16 ones too (numpy knows none).

    Raises:
        ValueError: not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open('rb') as file:
                length = int.from_bytes(file.read(8), 'little')
                if length > path.stat().st_size:
                    raise ValueError('the header is longer than the file')
                self._header: dict[str, Any] = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise ValueError(f'{path}: is not a whole safetensors file: {error}') from None
        self._start = 8 + length

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32.

        Raises:
            ValueError: it is not there, or its dtype is not a float.
        """
        entry = self._entry(name)
        begin, end = entry['data_offsets']
        dtype = np.dtype(_DTYPES[entry['dtype']])
        values = np.fromfile(
            self.path, dtype, (end - begin) // dtype.itemsize, offset=self._start + begin
        )
        if entry['dtype'] == 'BF16':
            values = bfloat16_to_float32(values)
        return values.astype(np.float32, copy=False).reshape(entry['shape'])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; errors as `read`."""
        return tuple(self._entry(name)['shape'])

    def _entry(self, name: str) -> dict[str, Any]:
        entry = self._header.get(name)
        if entry is None or entry['dtype'] not in _DTYPES:
            raise ValueError(f"{self.path}: float tensor '{name}' is missing")
        return dict(entry)


def time_embedding(times: np.ndarray, width: int) -> np.ndarray:
    """Sine-cosine embedding of flow times, computed in float64; (N,) to (N, width) float32."""
    fraction = np.linspace(0.0, 1.0, width // 2)
    period = _SHORTEST * (_LONGEST / _SHORTEST) ** fraction
    # The times as the networks see them.
    seen = np.asarray(times, np.float32).astype(np.float64)
    angle = seen[:, None] * (2.0 * math.pi / period)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


def bfloat16_to_float32(values: np.ndarray) -> np.ndarray:
    """bfloat16 held as uint16 to float32, exactly."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 held as uint16, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _rows(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    # One by one, so that a row does not depend on how many were asked for.
    return np.stack([weight @ row + bias for row in x])


def _silu(x: np.ndarray) -> np.ndarray:
    return (x / (1.0 + np.exp(-x.astype(np.float64)))).astype(np.float32)
