"""Capture a fixed piece of work into a CUDA graph, or say once why it runs without one.

Addresses are frozen at capture, so the work must read and write only buffers that live as long as
the graph. Invariants: the work is run eagerly before it is captured (lazy initialisation must not
be recorded), and a capture that runs out of memory is given up once, for good, with a log line;
the work then goes on eagerly and the report says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

Work = Callable[[], None]


def capture_cuda_graph(work: Work) -> Work:
    """Record `work` on a side stream and return its replay.

    Raises:
        torch.OutOfMemoryError: the graph's private pool does not fit.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class GraphedWork:
    """Work that is replayed from a graph where one could be captured.

    Args:
        name: for the log line (`vision`, `prefix`, `denoise`).
        work: reads and writes static buffers only; run as it is when there is no graph.
        capture: turns work into a replay; None (a CPU, or graphs not wanted) runs eagerly.
    """

    def __init__(self, name: str, work: Work, capture: Callable[[Work], Work] | None) -> None:
        self._name = name
        self._work = work
        self._capture = capture
        self._replay: Work | None = None
        self.status = 'eager'

    def __call__(self) -> None:
        """Run once; the first call captures."""
        if self._replay is None and self._capture is not None:
            self._try_capture(self._capture)
        (self._replay or self._work)()

    def _try_capture(self, capture: Callable[[Work], Work]) -> None:
        try:
            self._replay = capture(self._work)
            self.status = 'captured'
        except torch.OutOfMemoryError as error:
            self._capture = None
            self.status = 'eager: out of memory while capturing'
            logger.warning(
                'No memory to capture the %s network as a CUDA graph; it runs without one from '
                'now on (slower, same results). Free GPU memory or load fewer rows. %s',
                self._name,
                error,
            )
