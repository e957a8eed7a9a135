"""Capture a fixed piece of work into a CUDA graph, or say once why it runs without one.

Addresses are frozen at capture, so the work reads and writes only buffers that live as long as the
graph. Invariants:
- the work is run eagerly before it is captured: lazy initialisation must not be recorded;
- warm-up, capture and replay happen on the work's own device, whichever device is current: a
  capture on another device's stream records and replays nothing, silently;
- one capture at a time in the process; another thread's work goes on meanwhile;
- after a failed capture a network runs eagerly for good; that is logged once and reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

import torch

from vla_runtime.engines.graphed_work import Work

logger = logging.getLogger(__name__)

# Beginning a capture waits for the device, which fails while another capture is under way.
_capturing = Lock()

Capture = Callable[[Work], Work]


def captures_graphs(device: torch.device) -> bool:
    """Return whether work on this device can be captured: shapes must not depend on numbers."""
    return device.type == 'cuda'


class CudaGraphCapture:
    """Records work on one device; all its graphs, run one after the other, share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Work) -> Work:
        """Record `work` and return its replay.

        Raises:
            RuntimeError: the capture failed; most often the graph's pool does not fit in memory,
                which PyTorch reports as OutOfMemoryError or as an invalidated capture.
        """
        with _capturing, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # What other threads do (allocate, wait) must not spoil this thread's capture.
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode='thread_local',
            ):
                work()

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay


class Capturer:
    """Captures the work of one network; after one failure it never tries again.

    `capture` turns work into a replay; None (a CPU, or graphs not wanted) never captures.
    """

    def __init__(self, name: str, capture: Capture | None) -> None:
        self.name = name
        self._capture = capture
        self.status = 'eager'

    @property
    def active(self) -> bool:
        return self._capture is not None

    def capture(self, work: Work, once: bool = True) -> Work | None:
        """Return the replay, or None where the work has to run eagerly; there is only one."""
        if self._capture is None:
            return None
        try:
            return self._capture(work)
        except Exception as error:
            # Of any kind: Triton's errors, which its kernels raise, are no RuntimeError.
            reason = 'out of memory' if _is_out_of_memory(error) else 'failed'
            remedy = f'Free GPU memory, or load the policy without guidance. {error}'
            self.give_up(f'{reason} while capturing', remedy)
            return None

    def launch(self, graph: Work) -> None:
        graph()

    def destroy(self, graph: Work) -> None:
        """Do nothing: PyTorch frees a graph with the last reference to it."""

    def give_up(self, reason: str, remedy: str = '') -> None:
        self._capture = None
        self.status = f'eager: {reason}'
        logger.warning(
            'The network of %s runs without a CUDA graph from now on (%s): same results, '
            'slower. %s',
            self.name,
            reason,
            remedy,
        )


def capturers_of(device: torch.device, graphs: bool, cameras: int) -> dict[str, Capturer]:
    """Return those of each camera, `prefix` and `denoise`; without `graphs` none captures.

    They may replay at the same time, so they share no memory.
    """
    names = (*map(vision_of, range(cameras)), 'prefix', 'denoise')
    return {name: Capturer(name, CudaGraphCapture(device) if graphs else None) for name in names}


def vision_of(camera: int) -> str:
    return f'vision of camera {camera}'


def _is_out_of_memory(error: Exception) -> bool:
    # Inside a capture a failed allocation may surface as a CUDA error of another name.
    signs = ('out of memory', 'alloc_failed', 'streamcaptureinvalidated')
    text = str(error).lower().replace(' ', '')
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(
        sign.replace(' ', '') in text for sign in signs
    )
