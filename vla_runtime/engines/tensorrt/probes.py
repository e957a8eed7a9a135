"""Inputs that each network is tried on at load (see `graphed_work.Probe`)."""

from __future__ import annotations

import numpy as np

from vla_runtime.engines.tensorrt.buffers import DeviceArray, PrefixSlot, RowBuffers


class VisionProbe:
    """Random pixels."""

    def __init__(self, pixels: DeviceArray, encoded: DeviceArray) -> None:
        self._pixels, self._encoded = pixels, encoded

    def vary(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._pixels.write(random.uniform(-1.0, 1.0, self._pixels.shape))

    def outputs(self) -> np.ndarray:
        return self._encoded.read().ravel()


class PrefixProbe:
    """Random image tokens and prompts, nothing masked."""

    def __init__(
        self, vocabulary: int, image_tokens: DeviceArray, buffers: RowBuffers, slot: PrefixSlot
    ) -> None:
        self._vocabulary = vocabulary
        self._image_tokens, self._buffers, self._slot = image_tokens, buffers, slot

    def vary(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._image_tokens.draw(random)
        for array in self._buffers.prefix_inputs.values():
            if np.dtype(array.dtype).kind == 'i':
                array.write(random.integers(0, self._vocabulary, array.shape))
            else:
                array.draw(random)

    def outputs(self) -> np.ndarray:
        floats = [array for array in self._slot.arrays.values() if array.dtype != 'bool']
        return np.concatenate([array.read().ravel() for array in floats])


class StepsProbe:
    """Random noise, from the buffer `noise` to the buffer `x`, and at load random keys and values.

    `prefix` is the slot to fill; None keeps the encoded prefix.
    """

    def __init__(
        self, noise: DeviceArray, x: DeviceArray, buffers: RowBuffers, prefix: PrefixSlot | None
    ) -> None:
        self._noise, self._x, self._buffers, self._prefix = noise, x, buffers, prefix

    def vary(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._noise.draw(random)
        if self._prefix is None:
            return
        for array in self._prefix.arrays.values():
            array.draw(random)
        rows = self._buffers.row_weight.shape[0]
        self._buffers.row_weight.write(np.full(rows, 1.0 / rows, np.float32))
        for array in self._buffers.head_inputs.values():
            array.draw(random)

    def outputs(self) -> np.ndarray:
        return np.concatenate([self._x.read().ravel(), self._buffers.velocity.read().ravel()])
