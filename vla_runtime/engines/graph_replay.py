"""CUDA graphs without PyTorch: capture several, keep the fastest, check it, or report why not.

Addresses are frozen at capture, so the work must read and write only buffers that live as long as
the graph. Invariants:
- work is run plainly before it is captured, because lazy initialisation must not be recorded;
- a graph is used only after a check that it follows its inputs: on two different inputs its outputs
  differ from each other and equal those of plain runs;
- after a failed capture a network runs plainly for good; that is logged once and stands in the
  report;
- a graph that is not kept is destroyed, however its trial ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np

from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime, Graph
from vla_runtime.engines.tensorrt.adapter import TensorRTError

logger = logging.getLogger(__name__)

Work = Callable[[], None]
# A graph's time is the fastest of this many replays.
_TIMED_REPLAYS = 3
# Largest difference of replay and plain run, as a share of the two inputs' difference in output.
_TOLERANCE = 1e-3


class BrokenEngineError(ValueError):
    """An engine whose numbers are of no use, with a CUDA graph or without."""


class Probe(Protocol):
    """Fills the inputs of a piece of work and reads its outputs, for a trial on two inputs."""

    def vary(self, seed: int) -> None:
        """Fill the work's input buffers with numbers drawn from this seed."""

    def outputs(self) -> np.ndarray:
        """Wait, and return everything the work wrote as one flat float32 array."""


class GraphCapturer:
    """Captures the work of one network; after one failure it never tries again.

    Args:
        name: name of the network in the log (`vision`, `prefix`, `denoise`).
        runtime: runtime of the device.
        captures: number of captures, of which the fastest graph is kept; 0 never captures.
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
        """Return a graph of the work; None where it has to run plainly.

        Args:
            work: work to capture.
            once: capture one graph, and time none; else the fastest of several.
        """
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
        """Run this network plainly from now on."""
        self._captures = 0
        self.status = f'eager: {reason}'
        logger.warning(
            'The %s network runs without a CUDA graph from now on (%s): same results, slower.',
            self.name,
            reason,
        )

    def _time(self, graph: Graph) -> float:
        def replay() -> None:
            self.runtime.launch(graph)

        replay()
        return min(self.runtime.milliseconds(replay) for _ in range(_TIMED_REPLAYS))


class GraphedWork:
    """Work that is replayed from a graph where one was captured and follows its inputs.

    Args:
        work: reads and writes static buffers only; run as it is where there is no graph.
        capturer: capturer of the network that the work belongs to.
    """

    def __init__(self, work: Work, capturer: GraphCapturer) -> None:
        self._work = work
        self._capturer = capturer
        self._graph: Graph | None = None
        self.prepared = False

    @property
    def status(self) -> str:
        """`captured`, `eager`, or why there is no graph."""
        return 'captured' if self._graph is not None else self._capturer.status

    def prepare(self, probe: Probe, once: bool = False) -> None:
        """Capture a graph and compare it with plain runs on two inputs; overwrites the inputs.

        Args:
            probe: probe that writes the work's inputs and reads its outputs.
            once: capture one graph rather than the fastest of several, because somebody waits.

        Raises:
            BrokenEngineError: plain runs give the same numbers for both inputs, or numbers that are
                not finite.
        """
        plain = _runs(self._work, probe)
        if not all(np.isfinite(output).all() for output in plain):
            raise BrokenEngineError(
                f'the {self._capturer.name} engine gives numbers that are not finite for ordinary '
                'inputs; export with float32 or bfloat16, and run vla_runtime build --force'
            )
        spread = float(np.abs(plain[0] - plain[1]).max())
        if spread == 0.0:
            raise BrokenEngineError(
                f'the {self._capturer.name} engine gives the same numbers for two different '
                'inputs; run vla_runtime build --force'
            )
        graph = self._capturer.capture(self._work, once)
        if graph is not None and self._follows(graph, plain, spread, probe):
            self._graph = graph
        # Last, so that work whose trial was interrupted is tried again before it runs.
        self.prepared = True

    def _follows(self, graph: Graph, plain: list[np.ndarray], spread: float, probe: Probe) -> bool:
        """Return whether replays give what plain runs gave; destroy the graph where not."""
        runtime, follows = self._capturer.runtime, False
        try:
            replays = _runs(lambda: runtime.launch(graph), probe)
            errors = [np.abs(a - b).max() for a, b in zip(plain, replays, strict=True)]
            # Written so that NaN is an error.
            follows = bool(max(errors) <= _TOLERANCE * spread)
        finally:
            if not follows:
                runtime.destroy(graph)
        if not follows:
            self._capturer.give_up('a replay differed from a plain run')
        return follows

    def close(self) -> None:
        """Free the graph."""
        graph, self._graph = self._graph, None
        if graph is not None:
            self._capturer.runtime.destroy(graph)

    def __call__(self) -> None:
        if self._graph is not None:
            self._capturer.runtime.launch(self._graph)
        else:
            self._work()


def _runs(work: Work, probe: Probe) -> list[np.ndarray]:
    outputs = []
    for seed in (1, 2):
        probe.vary(seed)
        work()
        outputs.append(probe.outputs())
    return outputs
