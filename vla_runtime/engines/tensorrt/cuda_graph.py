"""CUDA graphs without PyTorch: inputs that a network is tried on, the fastest of its captures."""

from __future__ import annotations

import logging

import numpy as np

from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime, Graph
from vla_runtime.engines.graphed_work import Work
from vla_runtime.engines.tensorrt.adapter import TensorRTError
from vla_runtime.engines.tensorrt.buffers import DeviceArray, PrefixSlot, RowBuffers

logger = logging.getLogger(__name__)

# A graph's time is the fastest of this many replays.
_TIMED_REPLAYS = 3

# --- Inputs that each network is tried on at load (see `graphed_work.Probe`)


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


# --------------------------------------------------------------------------------------------------


class GraphCapturer:
    """Captures the work of one network; see `graphed_work.Capturer`.

    `captures` is the number of captures, of which the fastest graph is kept; 0 never captures.
    """

    def __init__(self, name: str, runtime: CudaRuntime, captures: int) -> None:
        self.name = name
        self.runtime = runtime
        self._captures = captures
        self.status = 'eager'

    @property
    def active(self) -> bool:
        return self._captures > 0

    def capture(self, work: Work, once: bool = False) -> Graph | None:
        if not self.active:
            return None
        best: Graph | None = None
        try:
            work()
            self.runtime.synchronize()
            if once or self._captures == 1:
                return self.runtime.capture(work)
            fastest = 0.0
            for _ in range(self._captures):
                graph = self.runtime.capture(work)
                try:
                    seconds = self._time(graph)
                except BaseException:
                    self.runtime.destroy(graph)
                    raise
                slower: Graph | None = graph
                if best is None or seconds < fastest:
                    slower, best, fastest = best, graph, seconds
                if slower is not None:
                    self.runtime.destroy(slower)
        except (CudaError, TensorRTError) as error:
            if best is not None:
                # A later capture failed, as a rule for lack of memory; the earlier graph is good.
                return best
            short = isinstance(error, CudaError) and error.out_of_memory
            self.give_up('out of memory while capturing' if short else 'failed while capturing')
            logger.warning('%s', error)
        return best

    def give_up(self, reason: str) -> None:
        self._captures = 0
        self.status = f'eager: {reason}'
        logger.warning(
            'The %s network runs without a CUDA graph from now on (%s): same results, slower.',
            self.name,
            reason,
        )

    def launch(self, graph: Graph) -> None:
        self.runtime.launch(graph)

    def destroy(self, graph: Graph) -> None:
        self.runtime.destroy(graph)

    def _time(self, graph: Graph) -> float:
        def replay() -> None:
            self.launch(graph)

        replay()
        return min(self.runtime.milliseconds(replay) for _ in range(_TIMED_REPLAYS))
