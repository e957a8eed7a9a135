"""Capture a fixed piece of work into a CUDA graph, or say once why it runs without one.

Addresses are frozen at capture, so the work must read and write only buffers that live as long as
the graph. Invariants:
- the work is run eagerly before it is captured, because lazy initialisation must not be recorded;
- warm-up, capture and replay happen on the work's own device, whichever device is current: a
  capture on another device's stream records nothing and replays nothing, silently;
- one capture at a time in the process; another thread's work goes on meanwhile;
- after a failed capture a network runs eagerly for good; that is logged once and stands in the
  report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

import torch

logger = logging.getLogger(__name__)

# Beginning a capture waits for the device, which fails while another capture is under way.
_capturing = Lock()

Work = Callable[[], None]
Capture = Callable[[Work], Work]


def captures_graphs(device: torch.device) -> bool:
    """Return whether work on this device can be captured: shapes must not depend on numbers."""
    return device.type == 'cuda'


class CudaGraphCapture:
    """Records work on one device.

    All its graphs share one memory pool and cuBLAS's scratch memory, which is safe because they
    replay one after the other and leave their results in buffers outside.

    Args:
        device: a CUDA device.
    """

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

    Args:
        name: name of the network in the log (as `vision_of`, or `prefix`, `denoise`).
        capture: turns work into a replay; None (a CPU, or graphs not wanted) never captures.
    """

    def __init__(self, name: str, capture: Capture | None) -> None:
        self.name = name
        self._capture = capture
        self.status = 'eager'

    @property
    def active(self) -> bool:
        return self._capture is not None

    def try_capture(self, work: Work) -> Work | None:
        """Return the replay, or None where the work has to run eagerly."""
        if self._capture is None:
            return None
        try:
            return self._capture(work)
        except Exception as error:
            # Of any kind: Triton's errors, which compiled networks raise, are no RuntimeError.
            self._capture = None
            reason = 'out of memory' if _is_out_of_memory(error) else 'failed'
            self.status = f'eager: {reason} while capturing'
            logger.warning(
                'The network of %s could not be captured as a CUDA graph (%s) and runs without one '
                'from now on: same results, slower. Free GPU memory, or load the policy without '
                'guidance. %s',
                self.name,
                reason,
                error,
            )
            return None


def capturers_of(device: torch.device, graphs: bool, cameras: int) -> dict[str, Capturer]:
    """Return those of each camera, `prefix` and `denoise`; without `graphs` none captures.

    Those of all cameras, of the prefix and of the denoise loop may replay at the same time, so they
    share no memory.
    """
    names = (*map(vision_of, range(cameras)), 'prefix', 'denoise')
    return {name: Capturer(name, CudaGraphCapture(device) if graphs else None) for name in names}


def vision_of(camera: int) -> str:
    """Name of a camera's vision work."""
    return f'vision of camera {camera}'


class GraphedWork:
    """Work that is replayed from a graph where one could be captured.

    Args:
        work: reads and writes static buffers only; run as it is where there is no graph.
        capturer: capturer of the network that the work belongs to.
    """

    def __init__(self, work: Work, capturer: Capturer) -> None:
        self._work = work
        self._capturer = capturer
        self._replay: Work | None = None

    @property
    def status(self) -> str:
        """`captured`, `eager`, or why a capture was given up."""
        return 'captured' if self._replay is not None else self._capturer.status

    @property
    def captures(self) -> bool:
        """True where running would capture first."""
        return self._replay is None and self._capturer.active

    def prepare(self) -> None:
        """Capture, unless that was done or given up."""
        if self._replay is None:
            self._replay = self._capturer.try_capture(self._work)

    def __call__(self) -> None:
        """Run once; the first call captures."""
        self.prepare()
        (self._replay or self._work)()


def _is_out_of_memory(error: Exception) -> bool:
    # Inside a capture a failed allocation may surface as a CUDA error of another name.
    signs = ('out of memory', 'alloc_failed', 'streamcaptureinvalidated')
    text = str(error).lower().replace(' ', '')
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(
        sign.replace(' ', '') in text for sign in signs
    )
