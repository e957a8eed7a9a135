"""Sizes and flow times of heads that are a DiT (arXiv 2212.09748) in buckets of the flow time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from vla_runtime.family.dimensions import Share, depth_of, size
from vla_runtime.family.flow_time import layer_rows, linear_rows, silu
from vla_runtime.files.safetensors_reader import SafetensorsReader


@dataclass(frozen=True)
class StackDims:
    """A stack of attention blocks with plain MLPs, without grouped keys."""

    depth: Annotated[int, depth_of()]
    num_heads: int
    head_dim: Annotated[int, Share('0.attention.q.weight', among='num_heads')]
    mlp_dim: Annotated[int, size('0.mlp.fc1.weight')]

    @property
    def heads_width(self) -> int:
        return self.num_heads * self.head_dim


class DitDims:
    """What follows from the sizes of a DiT head.

    Attributes:
        dit: cross- and self-attention over state, future and action tokens. Even blocks attend to
            the context, odd ones to the tokens themselves.
        positions: rows of the table of action positions.
    """

    dit: StackDims
    positions: int
    horizon: int
    # Time steps of the state, a token each.
    state_steps = 1
    # Matrices of the encoders and the decoder are stored (inputs, outputs).
    input_major = False

    @property
    def dit_width(self) -> int:
        """W, numbers of a DiT token."""
        return self.dit.heads_width

    @property
    def cross_blocks(self) -> tuple[int, ...]:
        """DiT blocks that attend to the context; the others attend to their own tokens."""
        return tuple(range(0, self.dit.depth, 2))

    def check_dit(self) -> None:
        """Raise ValueError if the sizes do not fit each other."""
        if self.dit.depth < 1:
            raise ValueError('dit: depth 0 where at least one block is expected')
        if self.dit_width % 2:
            raise ValueError(
                f'dit: width {self.dit_width} (num_heads * head_dim) is odd; the flow time enters '
                'as as many sines as cosines'
            )
        if self.horizon > self.positions:
            raise ValueError(
                f'horizon {self.horizon} is more than the {self.positions} action positions'
            )


# --- Flow times: buckets, their codes, and the rows of the time table in numpy


BUCKETS = 1000
# A flow time in whole 2^-24: every float32 from 0.5 to 1 is a whole number of them.
UNIT = 2**24
# Half a unit of rounding in t, half in `bucket` itself, times the buckets; 6e-5 of a bucket.
SLACK = BUCKETS
# Numbers of the DiT's code of a bucket, and the ratio of its largest to its smallest period.
DIT_CODE, PERIODS = 256, 10000.0


def bucket(times: np.ndarray) -> np.ndarray:
    """Buckets (N,) int64 of flow times (N,), from 1 (noise) to 0 (actions).

    floor(1000 k / N) of 1 - k / N in float32, for every N up to 8000; 1000 at t = 0.
    """
    passed = UNIT - np.rint(np.asarray(times, np.float64) * UNIT).astype(np.int64)
    return (passed * BUCKETS + SLACK) // UNIT


def frequencies(half: int, divisor: int) -> np.ndarray:
    """Frequencies of a sine code, (half,) float32: 10000^(-i / divisor)."""
    exponent = np.arange(half, dtype=np.float32) * np.float32(-math.log(PERIODS))
    return np.exp(exponent / np.float32(divisor))


def dit_code(buckets: np.ndarray) -> np.ndarray:
    """Code of buckets for the DiT, (N,) to (N, 256) float32: cosines, then sines."""
    half = DIT_CODE // 2
    angle = buckets.astype(np.float32)[:, None] * frequencies(half, half - 1)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def action_code(buckets: np.ndarray, width: int) -> np.ndarray:
    """Code of buckets for the action encoder, (N,) to (N, width) float32: sines, then cosines."""
    half = width // 2
    angle = buckets.astype(np.float32)[:, None] * frequencies(half, half)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


class DitTimeTable:
    """Rows of `DitNetwork.time_conditioning`: the action encoder's share, then all modulations."""

    def __init__(self, dims: DitDims, weights: SafetensorsReader) -> None:
        self._dims, self._weights = dims, weights
        self._modulations = [f'dit.{block}.modulation' for block in range(dims.dit.depth)]
        self._modulations.append('out_modulation')

    @property
    def width(self) -> int:
        return self._dims.dit_width * (1 + 2 * len(self._modulations))

    def __call__(self, times: np.ndarray) -> np.ndarray:
        buckets, width = bucket(times), self._dims.dit_width
        mix = self._weights.read('action_encoder.mix.weight')
        matrix = mix[width:].T if self._dims.input_major else mix[:, width:]
        share = linear_rows(
            action_code(buckets, width), matrix, self._weights.read('action_encoder.mix.bias')
        )
        embedded = silu(layer_rows(dit_code(buckets), self._weights, 'time_in'))
        embedded = silu(layer_rows(embedded, self._weights, 'time_out'))
        rows = [layer_rows(embedded, self._weights, name) for name in self._modulations]
        return np.concatenate([share, *rows], axis=1)
