"""Ternary weights (BitNet b1.58, arXiv 2402.17764): rounded from master weights, four a byte.

A matrix is -1, 0 and 1 times one scale, the mean of its absolute numbers. Two bits hold a weight
as a signed number: 0, 1 and 3 for -1. A row of K weights takes Q = ceil(K / 4) bytes: the first Q
weights are the lowest bits of its bytes, the next Q the two bits above, and so on, so that a row is
unpacked in four shifts.
"""

from __future__ import annotations

import numpy as np

PER_BYTE = 4
_SMALLEST_SCALE = 1e-5


def packed_width(inputs: int) -> int:
    """Bytes of a row of so many weights."""
    return -(-inputs // PER_BYTE)


def scale_of(master: np.ndarray) -> np.float32:
    """Mean of the absolute numbers of a matrix of float32."""
    return np.maximum(np.abs(master).mean(dtype=np.float32), np.float32(_SMALLEST_SCALE))


def ternary_of(master: np.ndarray) -> np.ndarray:
    """Round master weights (outputs, inputs) float32 to -1, 0 and 1, int8, halves to even.

    As published: W times the reciprocal of the scale, rounded, clamped.
    """
    factor = np.float32(1.0) / scale_of(master)
    return np.clip(np.rint(master * factor), -1.0, 1.0).astype(np.int8)


def pack(ternary: np.ndarray) -> np.ndarray:
    """Pack (outputs, inputs) int8 of -1, 0 and 1 into (outputs, `packed_width(inputs)`) uint8."""
    outputs, inputs = ternary.shape
    width = packed_width(inputs)
    padded = np.zeros((outputs, PER_BYTE, width), dtype=np.uint8)
    padded.reshape(outputs, -1)[:, :inputs] = ternary.view(np.uint8) & 3
    packed = padded[:, 0].copy()
    for place in range(1, PER_BYTE):
        packed |= padded[:, place] << (2 * place)
    return packed


def count_invalid(packed: np.ndarray) -> int:
    """Count the bytes that hold two bits which stand for no weight."""
    return int(np.count_nonzero((packed >> 1) & ~packed & 0b01010101))
