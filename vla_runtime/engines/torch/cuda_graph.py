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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

import torch

from vla_runtime.engines.graphed_work import Work
from vla_runtime.engines.protocol import PrefixSlot

# --- CUDA streams of a torch engine: one for each camera, one for the prefix, one for denoising


# A kind of work, and the slot or the camera that it was on.
Mark = tuple[str, PrefixSlot | int | None]


class CudaStreams:
    """Queues work of one device on streams, ordered by events where they share a view or a slot."""

    def __init__(self, device: torch.device, cameras: int, cuda: Any = torch.cuda) -> None:
        self._cuda, self._cameras = cuda, range(cameras)
        self._streams = {
            name: cuda.Stream(device)
            for name in (*map(_view, self._cameras), 'encoding', 'denoising')
        }
        # Of the newest work.
        self._events: dict[Mark, Any] = {}
        self._used = local()
        # Torch's own streams do not wait for the default stream, where the weights were loaded.
        cuda.synchronize(device)

    @contextmanager
    def vision(self, camera: int) -> Iterator[None]:
        """Queue vision work of a camera, which writes its view."""
        with self._queue(_view(camera), [('views read', None)], [('seen', camera)]):
            yield

    @contextmanager
    def encode(self, place: PrefixSlot) -> Iterator[None]:
        """Queue prefix work, which reads every view and writes a slot."""
        after = [('seen', camera) for camera in self._cameras]
        marks = [('encoded', place), ('views read', None)]
        with self._queue('encoding', [('read', place), *after], marks):
            yield

    @contextmanager
    def denoise(self, *places: PrefixSlot) -> Iterator[None]:
        """Queue the expert's work; `places` are the slots that it reads."""
        after, marks = ([(what, place) for place in places] for what in ('encoded', 'read'))
        with self._queue('denoising', after, marks):
            yield

    def synchronize(self) -> None:
        """Wait until all that this thread has queued is done."""
        for stream in vars(self._used).values():
            stream.synchronize()

    @contextmanager
    def _queue(self, name: str, after: Sequence[Mark], marks: Sequence[Mark]) -> Iterator[None]:
        stream = self._streams[name]
        setattr(self._used, name, stream)
        with self._cuda.stream(stream):
            for one in after:
                if one in self._events:
                    stream.wait_event(self._events[one])
            yield
            for one in marks:
                if one not in self._events:
                    self._events[one] = self._cuda.Event()
                self._events[one].record(stream)


def _view(camera: int) -> str:
    return f'view {camera}'


# --------------------------------------------------------------------------------------------------

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
    """Return those of each camera, `prefix`, `denoise` and `together`, of batches.

    Without `graphs` none captures.

    They may replay at the same time, so they share no memory.
    """
    names = (*map(vision_of, range(cameras)), 'prefix', 'denoise', 'together')
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
