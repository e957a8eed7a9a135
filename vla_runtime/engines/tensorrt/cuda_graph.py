"""CUDA graphs without PyTorch: capture several, keep the fastest, or report why not.

Invariants:
- work is run plainly before it is captured: lazy initialisation must not be recorded;
- after a failed capture a network runs plainly for good; that is logged once and reported;
- a graph that is not kept is destroyed, however its trial ended.
"""

from __future__ import annotations

import logging

from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime, Graph
from vla_runtime.engines.graphed_work import Work
from vla_runtime.engines.tensorrt.adapter import TensorRTError

logger = logging.getLogger(__name__)

# A graph's time is the fastest of this many replays.
_TIMED_REPLAYS = 3


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
