"""Work of a network that is replayed from a CUDA graph, whatever captures it.

Addresses are frozen at capture, so the work reads and writes only buffers that live as long as the
graph. Invariants:
- with a probe, a graph is used only after a check on two different inputs: its outputs differ from
  each other and equal those of plain runs;
- a graph that is not kept is destroyed, however its trial ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

Work = Callable[[], None]
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


class Capturer(Protocol):
    """Captures the work of one network; after one failure it never tries again."""

    name: str

    @property
    def status(self) -> str:
        """`eager`, or why a capture was given up."""

    @property
    def active(self) -> bool:
        """False where nothing is captured."""

    def capture(self, work: Work, once: bool = False) -> Any:
        """Return a graph of the work; None where it has to run plainly.

        With `once` it captures one graph, where the fastest of several would be kept.
        """

    def launch(self, graph: Any) -> None:
        """Replay a graph."""

    def destroy(self, graph: Any) -> None:
        """Free a graph."""

    def give_up(self, reason: str) -> None:
        """Run this network plainly from now on, and say so once."""


class GraphedWork:
    """Work that is replayed from a graph where one could be captured; else it is run as it is.

    `prepared` says whether a capture was tried.
    """

    def __init__(self, work: Work, capturer: Capturer) -> None:
        self._work = work
        self._capturer = capturer
        self._graph: Any = None
        self.prepared = False

    @property
    def status(self) -> str:
        """`captured`, `eager`, or why there is no graph."""
        return 'captured' if self._graph is not None else self._capturer.status

    @property
    def captures(self) -> bool:
        """True where `run` would capture first."""
        return not self.prepared and self._capturer.active

    def prepare(self, probe: Probe | None = None, once: bool = False) -> None:
        """Capture a graph, unless that was tried.

        Args:
            probe: writes the work's inputs and reads its outputs; overwrites the inputs.
            once: capture one graph rather than the fastest of several, because somebody waits.

        Raises:
            BrokenEngineError: plain runs give the same numbers for both inputs, or numbers that are
                not finite.
        """
        if self.prepared:
            return
        if probe is None:
            self._graph = self._capturer.capture(self._work, once)
        else:
            self._capture_checked(probe, once)
        # Last, so that work whose trial was interrupted is tried again before it runs.
        self.prepared = True

    def run(self) -> None:
        """Run once; the first time captures."""
        self.prepare()
        self()

    def _capture_checked(self, probe: Probe, once: bool) -> None:
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

    def _follows(self, graph: Any, plain: list[np.ndarray], spread: float, probe: Probe) -> bool:
        """Return whether replays give what plain runs gave; destroy the graph where not."""
        follows = False
        try:
            replays = _runs(lambda: self._capturer.launch(graph), probe)
            errors = [np.abs(a - b).max() for a, b in zip(plain, replays, strict=True)]
            # Written so that NaN is an error.
            follows = bool(max(errors) <= _TOLERANCE * spread)
        finally:
            if not follows:
                self._capturer.destroy(graph)
        if not follows:
            self._capturer.give_up('a replay differed from a plain run')
        return follows

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            self._capturer.destroy(graph)

    def __call__(self) -> None:
        if self._graph is not None:
            self._capturer.launch(self._graph)
        else:
            self._work()


def _runs(work: Work, probe: Probe) -> list[np.ndarray]:
    outputs = []
    for seed in (1, 2):
        probe.vary(seed)
        work()
        outputs.append(probe.outputs())
    return outputs
